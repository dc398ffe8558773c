"""The API of Tinker's clients over the service of training calls (docs/tinker.md)."""
