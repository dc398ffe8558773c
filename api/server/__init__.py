"""The REST server: the application, its operations, and what they share."""
