"""Parallel training: its sizes, where each rank sits, what a rank holds and sends.

Arithmetic alone.
"""
