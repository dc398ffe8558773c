"""Tests of Tinker's API; an SDK runs in an environment of its own (tests/api/tinker/sdk.py)."""
