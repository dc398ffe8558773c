"""The model that is trained: attention, layers, outputs, packed micro-batches, the optimizer."""
