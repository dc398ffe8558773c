"""How the bytes of a published version travel to the nodes of rollout engines."""
