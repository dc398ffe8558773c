"""The streaming data loader."""
