"""One worker of a stage: its controller, its clock, its spans."""
