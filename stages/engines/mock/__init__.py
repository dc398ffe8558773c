"""Mock engines: deterministic, with a model of latency."""
