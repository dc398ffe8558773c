"""Prompts: where they come from, tasks that make them, and checks of their files."""
