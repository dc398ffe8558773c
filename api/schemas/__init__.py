"""Pydantic models of REST requests, answers and events."""
