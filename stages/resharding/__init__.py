"""Weights from the layout that trains them to the layout that generates with them, on the same ranks."""
