"""Reading of recipes, and the reference of their keys."""
