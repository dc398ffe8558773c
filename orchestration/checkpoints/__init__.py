"""Checkpoints: their files, the places where they are kept, their verification."""
