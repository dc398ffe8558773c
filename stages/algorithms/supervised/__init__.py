"""Algorithms that learn from given or compared responses, without importance weights, one short
file each."""
