"""Engines behind two small protocols.

Importing this package imports no engine library: adapters are named in the recipe.
"""
