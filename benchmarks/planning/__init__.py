"""Forecasts and formulas: what a run will take, beside what it took."""
