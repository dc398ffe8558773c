"""How people reach a run: the command line, the live terminal, the files that a run leaves."""
