"""Runs beside each other: what they were asked for, and what came of it; no process, no torch."""
