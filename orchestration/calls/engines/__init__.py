"""Engines of served base models: their processes, and how clients share one."""
