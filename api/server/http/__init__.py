"""Bodies of requests within limits, and errors as problems (RFC 9457)."""
