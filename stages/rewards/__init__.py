"""Rewards: the stage, and the functions that it calls by name."""
