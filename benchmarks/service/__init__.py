"""The servers and their clients: REST, Tinker, a served policy, a first run."""
