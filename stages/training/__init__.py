"""Training: advantages, optimizer steps, ranks, and devices that rollout engines share."""
