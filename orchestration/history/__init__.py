"""Storage of a run's events for later: which of them, in which files, and as points of charts."""
