"""What happens to samples: prompts, rollout, reward, reference, advantage, update, weight sync,
evaluation."""
