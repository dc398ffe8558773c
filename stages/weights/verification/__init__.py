"""Verification of new weights: the probe of a version, and what a refused one shows."""
