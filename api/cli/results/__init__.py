"""Commands about what runs have made: samples, checkpoints, comparisons, sweeps, exports."""
