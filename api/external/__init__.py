"""External stages over HTTP: schemas of requests, columns, uploads of weights, and the session of
one run."""
