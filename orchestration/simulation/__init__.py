"""What a run will do, simulated from its recipe and the costs of its engines."""
