"""Decoding of a changing batch: the model as a decoder, its KV cache and weights, the rows,
sampling."""
