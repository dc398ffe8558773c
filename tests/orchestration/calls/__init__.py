"""The service of training calls."""
