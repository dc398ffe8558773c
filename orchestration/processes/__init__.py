"""Processes: the fork server, and handles of processes that another one started."""
