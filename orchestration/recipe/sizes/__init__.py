"""Sizes that follow from a recipe: groups in flight, tokens, and the memory of each process."""
