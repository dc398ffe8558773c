"""The life of a run: recipe, state machine, launchers, supervisor, checkpoint.

Knows processes and runs, not HTTP.
"""
