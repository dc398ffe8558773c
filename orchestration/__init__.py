"""How a run lives: recipe, state machine, launchers, supervisor, checkpoint.

Knows processes and runs, not HTTP.
"""
