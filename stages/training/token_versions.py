"""What the column ``versions`` says of the tokens of responses: which of them a policy has generated,
and how old these are."""

from __future__ import annotations

import torch

from pipeline.data.columns import Packed, offsets_of
from stages.algorithms.token_batch import AGES
from stages.flow.catalogue import OBSERVED


def generated_tokens(responses: Packed, versions: Packed) -> Packed:
    """Return the tokens of ``responses`` without those that were observed. ``versions``: version,
    tokens, version, tokens, … of each.

    >>> responses = torch.nested.nested_tensor([[4, 5, 6], [7, 8]], layout=torch.jagged)
    >>> versions = torch.nested.nested_tensor([[3, 1, -1, 1, 4, 1], [3, 2]], layout=torch.jagged)
    >>> generated_tokens(Packed.of(responses), Packed.of(versions)).lists()
    [[4, 6], [7, 8]]
    """
    version, tokens = versions.values.view(-1, 2).unbind(1)
    is_generated = Packed((version != OBSERVED).repeat_interleave(tokens), responses.offsets)
    lengths = is_generated.sums()
    return Packed(responses.values[is_generated.values], offsets_of(lengths.numpy()))


def staleness_of(versions: Packed, trained: int) -> tuple[Packed, Packed]:
    """Returns int64 [T] of the tokens of each response: the steps that a trainer which has made
    ``trained`` steps has made since the token was generated, and the index into AGES of its age.
    Tokens that were observed do not age: 0 steps, and OBSERVED. ``versions``: version, tokens,
    version, tokens, … of each response.

    >>> column = torch.nested.nested_tensor([[1, 2, 5, 1, 7, 1], [7, 2]], layout=torch.jagged)
    >>> staleness, ages = staleness_of(Packed.of(column), 7)
    >>> staleness.lists(), ages.lists()
    ([[6, 6, 2, 0], [0, 0]], [[4, 4, 2, 5], [0, 0]])
    >>> column = torch.nested.nested_tensor([[7, 1, -1, 2, 7, 1]], layout=torch.jagged)
    >>> staleness, ages = staleness_of(Packed.of(column), 7)
    >>> staleness.lists(), ages.lists()
    ([[0, 0, 0, 0]], [[0, -1, -1, 0]])
    """
    generated, tokens = versions.values.view(-1, 2).unbind(1)
    pairs = versions.lengths() // 2
    row = torch.arange(len(pairs)).repeat_interleave(pairs)
    is_observed = generated == OBSERVED
    staleness = (trained - generated).masked_fill(is_observed, 0)
    oldest = torch.zeros_like(pairs).scatter_reduce(0, row, staleness, "amax", include_self=False)
    ages = staleness.clamp(0, len(AGES) - 2)
    ages[(staleness == 0) & (oldest[row] > 0)] = AGES.index("resumed")
    ages[is_observed] = OBSERVED
    offsets = offsets_of(torch.zeros_like(pairs).index_add(0, row, tokens).numpy())
    return (
        Packed(staleness.repeat_interleave(tokens), offsets),
        Packed(ages.repeat_interleave(tokens), offsets),
    )
