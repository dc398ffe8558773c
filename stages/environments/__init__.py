"""Environments: what answers the turns of a trajectory."""
