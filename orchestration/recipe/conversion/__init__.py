"""Recipes from the configurations of other trainers."""
