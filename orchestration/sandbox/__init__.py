"""Processes in which code runs that nobody has read: what they see and use is bounded by the
kernel."""
