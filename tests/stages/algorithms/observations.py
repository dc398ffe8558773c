"""Batches of responses with turns: what the policy has generated, and what an environment has added
between."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from tensordict import TensorDict

from pipeline.data.columns import Packed
from stages.flow.catalogue import AGE, MASK, OBSERVED, TOKEN_STALENESS
from stages.training.token_versions import staleness_of
from tests.batches import stack

TRAINED_STEPS = 7
ANYTHING = (0.0, -1e9, 3.5, math.nan, math.inf, -math.inf)

Row = dict[str, torch.Tensor]


def masks_of(rows: Sequence[Row], seed: int) -> list[torch.Tensor]:
    """For each row a mask with as many true values as it has tokens, and others at random places:
    also at both ends."""
    rng = random.Random(seed)
    masks = []
    for row in rows:
        values = [True] * len(row["response_ids"])
        for _ in range(rng.randint(0, 3)):
            at = rng.randint(0, len(values))
            values[at:at] = [False] * rng.randint(1, 4)
        masks.append(torch.tensor(values))
    return masks


def versions_of(count: int, rng: random.Random) -> list[int]:
    """The version of each of ``count`` generated tokens, which get newer."""
    return sorted(rng.randint(0, TRAINED_STEPS) for _ in range(count))


def aged(rows: Sequence[Row], versions: Sequence[Sequence[int]]) -> TensorDict:
    """The batch of ``rows`` with the staleness and the age that the update stage gives it.
    ``versions``: of each token."""
    pairs = [torch.tensor([n for v in of_row for n in (v, 1)]) for of_row in versions]
    column = torch.nested.nested_tensor(pairs, layout=torch.jagged)
    staleness, ages = staleness_of(Packed.of(column), TRAINED_STEPS)
    batch = stack(rows)
    batch[TOKEN_STALENESS], batch[AGE] = staleness.jagged(), ages.jagged()
    return batch


def with_observations(
    rows: Sequence[Row],
    versions: Sequence[Sequence[int]],
    masks: Sequence[torch.Tensor],
    seed: int,
    anything: Sequence[float] = ANYTHING,
) -> TensorDict:
    """``rows`` with observed tokens where ``masks`` are false. Their values in ragged columns are
    some of ``anything``; their token ids those of ``seed`` 0 for any seed."""
    rng = random.Random(seed)
    ids = random.Random(0)
    wide = []
    wide_versions = []
    for row, of_row, mask in zip(rows, versions, masks, strict=True):
        wide_row: Row = {MASK: mask}
        for name, value in row.items():
            if not value.ndim or name == "prompt_ids":
                wide_row[name] = value
                continue
            are_ids = not value.is_floating_point()
            draw = ids.randrange(40) if are_ids else rng.choice(anything)
            out = torch.full((len(mask),), draw, dtype=value.dtype)
            for at in (~mask).nonzero()[:, 0].tolist():
                out[at] = ids.randrange(40) if are_ids else rng.choice(anything)
            out[mask] = value
            wide_row[name] = out
        wide.append(wide_row)
        generated = iter(of_row)
        wide_versions.append([next(generated) if one else OBSERVED for one in mask.tolist()])
    return aged(wide, wide_versions)
