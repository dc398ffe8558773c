"""Commands about what runs have made: their samples, comparisons, sweeps, exports."""
