"""The served policy: one handler of requests, in a process of the server's or in a deployment of
Ray Serve."""
