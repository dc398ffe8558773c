"""Checks of a recipe beyond single keys: relations between keys, code that it names, files and
devices of the machine."""
