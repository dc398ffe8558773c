"""Wire formats of external stages: schemas of requests, columns, headers of weights."""
