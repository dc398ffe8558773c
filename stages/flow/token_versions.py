"""Which tokens of responses a policy has generated, by the column ``versions``."""

from __future__ import annotations

from pipeline.data.columns import Packed, offsets_of
from stages.flow.catalogue import OBSERVED


def generated_tokens(responses: Packed, versions: Packed) -> Packed:
    """Return the tokens of ``responses`` without those that were observed. ``versions``: version,
    tokens, version, tokens, … of each.

    >>> from torch import tensor
    >>> responses = Packed(tensor([4, 5, 6, 7, 8]), tensor([0, 3, 5]))
    >>> versions = Packed(tensor([3, 1, -1, 1, 4, 1, 3, 2]), tensor([0, 6, 8]))
    >>> generated_tokens(responses, versions).lists()
    [[4, 6], [7, 8]]
    """
    version, tokens = versions.values.view(-1, 2).unbind(1)
    is_generated = Packed((version != OBSERVED).repeat_interleave(tokens), responses.offsets)
    lengths = is_generated.sums()
    return Packed(responses.values[is_generated.values], offsets_of(lengths.numpy()))
