"""Runs whose stages other programs do: their sessions, and the accounting of their time."""
