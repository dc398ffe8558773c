"""Samples that a run has kept: the log of the newest ones, and preference pairs of them."""
