"""The rollout engine in vLLM."""
