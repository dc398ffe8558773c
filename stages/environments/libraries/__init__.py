"""Environments of other libraries, as classes with ``reset`` and ``step``."""
