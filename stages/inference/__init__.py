"""Inference stages: what another model computes of a sample."""
