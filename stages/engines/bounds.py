"""Bounds of how tokens are sampled.

Imports nothing: the schemas of requests and recipes have them, too.

Engines compute logits, their softmax and its sums in float32, also with weights in bfloat16, which
has the same range. A number is divided by the temperature and multiplied by ``top_p``.

>>> float32_max, largest_logit, vocabulary = 3.4e38, 2.0**27, 2**24
>>> largest_logit / LEAST < float32_max
True
>>> LEAST / vocabulary > 2.0**-126  # the least normal number
True
"""

from __future__ import annotations

LEAST = 1e-30
"""Of a temperature that is not 0, and of ``top_p``: logits and kept mass stay finite and above
0."""

LEAST_TRAINED = 1e-6
"""Of a temperature whose logprobs are trained.

A gradient is divided by it, and its norm is a sum of squares.
"""

LEAST_VLLM = 0.01
"""Of a temperature that is not 0 in vLLM, which changes smaller ones to this number, or to 0
(``SamplingParams``)."""

MOST_TEMPERATURE = 100.0


def temperature_fix(temperature: float) -> str:
    """Return what to give in place of a sampling temperature; "" for a usable one. 0 is greedy.

    >>> temperature_fix(0.0), temperature_fix(0.7)
    ('', '')
    >>> temperature_fix(1e-300)
    'give 0 for the likeliest token, or a number from 1e-30 to 100'
    """
    if temperature == 0 or LEAST <= temperature <= MOST_TEMPERATURE:
        return ""
    return f"give 0 for the likeliest token, or a number from {LEAST:g} to {MOST_TEMPERATURE:g}"


def top_p_fix(top_p: float) -> str:
    """Return what to give in place of ``top_p``; "" for one that can be used.

    >>> top_p_fix(1e-300)
    'give a number from 1e-30 to 1'
    """
    return "" if LEAST <= top_p <= 1 else f"give a number from {LEAST:g} to 1"
