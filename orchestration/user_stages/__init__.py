"""Stages of a user in processes of their own: who calls one, and what runs in its process."""
