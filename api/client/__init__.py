"""Python clients of a service, and the client of external stages."""
