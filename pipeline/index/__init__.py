"""The index of a run: its client, its server-side functions, its embedded server."""
