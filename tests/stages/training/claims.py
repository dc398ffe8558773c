"""Groups in a real warehouse, as far as the update stage claims them."""

from __future__ import annotations

import torch

from pipeline.index.client import Claim
from pipeline.warehouse.dock import Dock
from tests.batches import make_batch, unstack

GROUPS = [(6, (5, 3)), (40, (2, 2)), (3, (12, 30)), (4, (1, 1))]


async def filled(dock: Dock) -> tuple[Claim, list[dict[str, torch.Tensor]]]:
    """A claim of the update stage, and its rows."""
    rows = unstack(make_batch(GROUPS))
    texts = [""] * len(GROUPS)
    prompts = [
        next(r["prompt_ids"] for r in rows if int(r["group"]) == 40 + g) for g in range(len(GROUPS))
    ]
    await dock.admit(
        [(group, 2) for group in range(len(GROUPS))],
        {"prompt_ids": prompts, "given": texts, "fields": texts},
    )
    made = await dock.claim("rollout", len(GROUPS), version=0, timeout=5)
    assert made is not None
    claimed = [
        rows[2 * group + place]
        for group, place in zip(made.group.tolist(), made.place.tolist(), strict=True)
    ]
    answered = {
        "response_ids": [row["response_ids"] for row in claimed],
        "rollout_logprobs": [row["rollout_logprobs"] for row in claimed],
        "versions": [torch.tensor([0, len(row["response_ids"])]) for row in claimed],
        "truncated": torch.zeros(len(claimed), dtype=torch.bool),
    }
    everything = list(range(len(claimed)))
    await dock.commit(
        made, everything, answered, generated=[(0, len(row["response_ids"])) for row in claimed]
    )
    for stage, column in (("reward", "reward"), ("advantage", "advantage")):
        claim = await dock.claim(stage, 100, timeout=5)
        assert claim is not None
        values = torch.stack(
            [rows[2 * g + p]["advantage"] for g, p in zip(claim.group, claim.place, strict=True)]
        )
        scores = {"scores": values[:, None]} if stage == "reward" else {}
        await dock.commit(claim, range(len(claim)), {column: values, **scores})
    claim = await dock.claim("update", 1, timeout=5)
    assert claim is not None
    return claim, rows
