"""Output in a terminal: the live view, reports, escaped text."""
