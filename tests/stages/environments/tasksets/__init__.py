"""Tasksets of verifiers, as modules that it finds by their names."""
