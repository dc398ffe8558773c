"""Programs as environments: they ask the policy by an OpenAI-like URL of their own."""
