"""Interfaces of other libraries, over this one."""
