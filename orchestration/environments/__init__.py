"""Environments of a user in processes of their own: the pool, and what runs in a process."""
