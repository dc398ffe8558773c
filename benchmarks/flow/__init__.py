"""The sample flow between stages: columns in and out, the index, bytes between nodes."""
