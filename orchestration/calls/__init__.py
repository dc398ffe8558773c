"""Clients' models: their calls in order, recorded before they are acknowledged, and made again."""
