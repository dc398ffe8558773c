"""Builders of the workers of a run: one file for each kind (``orchestration.run.kinds``)."""
