"""Supervision of a run's workers: restarts, scaling, liveness, alarms."""
