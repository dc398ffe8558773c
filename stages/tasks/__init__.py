"""Built-in tasks, which make prompts, and the answers that their rewards read in responses."""
