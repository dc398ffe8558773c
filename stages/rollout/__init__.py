"""Generation: the rollout stage, evaluation, and new weights for rollout engines."""
