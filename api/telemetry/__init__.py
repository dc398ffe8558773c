"""Readers of a run's events: histories, streams, series, traces, metrics, trackers."""
