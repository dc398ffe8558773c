"""Policies that are served: their engines, and the versions that these take."""
