"""Rows of prompts: the files of a split, and plain values of their columns."""
