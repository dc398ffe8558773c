"""Runs of a service: the registry, the agent, the runner of each run, the service's index
server."""
