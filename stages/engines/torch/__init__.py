"""Engines in PyTorch."""
