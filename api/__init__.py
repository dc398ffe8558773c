"""Ways to reach a run: the command line, the REST service and its clients, the live terminal, the
files that a run leaves."""
