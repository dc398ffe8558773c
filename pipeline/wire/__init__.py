"""The wire between nodes: one handshake and one form of frames, for warehouses, weights and ranks."""
