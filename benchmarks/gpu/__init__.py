"""What only a machine with an accelerator can measure: ``make gpu-check``."""
