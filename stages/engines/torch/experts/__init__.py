"""Parallel strategies of the torch training engine, a file each."""
