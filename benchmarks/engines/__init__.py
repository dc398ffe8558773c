"""The engines for rollout and training: speed, memory, and how near their numbers are to others."""
