"""Processes: the fork server, and handles of running processes."""
