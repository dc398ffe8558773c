"""Documents: values that the processes of a run tell each other by name in its index."""
