"""The stages that a sample passes: prompts, rollout, reward, reference, advantage, update, weight
sync, evaluation."""
