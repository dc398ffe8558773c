"""Trajectories: rows that go between the policy and an environment, turn by turn."""
