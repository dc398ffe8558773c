"""Agents that know nothing of us, as processes."""
