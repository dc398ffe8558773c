"""Kills, faults, attacks, long runs, and what no test notices."""
