"""Warehouses: memory of samples, the dock that reads and writes it, and the wire between nodes."""
