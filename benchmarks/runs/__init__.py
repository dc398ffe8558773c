"""Whole runs: how near they come to their busiest stage, how they start and scale."""
