"""Resharding: weights from the training layout to the rollout layout, on the same ranks."""
