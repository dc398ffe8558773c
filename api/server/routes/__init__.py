"""REST operations, one file a subject."""
