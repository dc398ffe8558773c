"""One run: its supervisor, its workers, its launchers and its checkpoints."""
