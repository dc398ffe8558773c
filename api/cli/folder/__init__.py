"""Commands that read the folder of a run, and need neither the run nor a service."""
