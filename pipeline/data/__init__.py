"""Rows as bytes: columns, blocks, arenas in shared memory; and the events of a run."""
