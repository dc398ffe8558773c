"""Workers of a run, one file for each kind, and the factories of their engines."""
