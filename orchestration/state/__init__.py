"""What a run and a service tell others of themselves: documents, paths, locks, the list of runs."""
