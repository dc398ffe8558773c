"""Optimizers of the torch train engine; their names: stages/engines/optimizers.py."""
