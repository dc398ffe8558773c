"""Commands about a service: serve it, execute its runs, make its tokens, use it from afar."""
