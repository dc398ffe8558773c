"""Recipes: their schema, their checks, their problems, and the plan of what they take."""
