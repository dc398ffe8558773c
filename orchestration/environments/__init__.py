"""Environments in processes of their own, and what the workers of a run agree on about them."""
