"""Algorithms that follow the gradient of the expected reward, one short file each."""
