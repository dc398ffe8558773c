"""The training step, its parallel strategies, and the weights that it publishes."""
