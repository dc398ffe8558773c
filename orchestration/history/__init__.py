"""How a run's events are kept for later: which of them, in which files, and as points of charts."""
