"""Reward functions in processes of their own: the pool, and what runs in each process."""
