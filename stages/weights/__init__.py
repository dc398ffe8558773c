"""Weights: where published versions are kept, and how they reach rollout engines."""
