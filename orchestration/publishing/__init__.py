"""A run's model for others: a folder that opens with transformers, its model card, the Hub."""
