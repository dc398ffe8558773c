"""Places where checkpoints are kept beside the folder of the run."""
