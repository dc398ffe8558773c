"""Small train batches of made-up tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict

VOCABULARY = 97
RAGGED = [(6, (5, 3, 9, 1)), (1, (4, 4, 4, 4)), (11, (7,)), (4, (1, 1)), (3, (2, 12, 1, 6, 5))]


def tiny_rows() -> tuple[TensorDict, list[tuple[list[int], list[int]]]]:
    """A train batch of the tiny model's tokens; and prompt and response of each row."""
    batch = make_batch()
    for name in ("prompt_ids", "response_ids"):
        batch[name] = torch.nested.nested_tensor(
            [row % 40 for row in batch[name].unbind()], layout=torch.jagged
        )
    pairs = zip(batch["prompt_ids"].unbind(), batch["response_ids"].unbind(), strict=True)
    return batch, [(prompt.tolist(), response.tolist()) for prompt, response in pairs]


def make_batch(groups: Sequence[tuple[int, Sequence[int]]] = RAGGED, seed: int = 0) -> TensorDict:
    """A train batch of groups given as (prompt length, response lengths), with all columns that an
    algorithm may ask."""
    rng = torch.Generator().manual_seed(seed)
    rows: list[dict[str, torch.Tensor]] = []
    for group, (prompt_length, lengths) in enumerate(groups):
        prompt = torch.randint(VOCABULARY, (prompt_length,), generator=rng)
        for place, length in enumerate(lengths):
            rows.append(
                {
                    "group": torch.tensor(group + 40),
                    "place": torch.tensor(place),
                    "prompt_ids": prompt,
                    "response_ids": torch.randint(VOCABULARY, (length,), generator=rng),
                    "rollout_logprobs": torch.randn(length, generator=rng) * 0.3 - 4.5,
                    "ref_logprobs": torch.randn(length, generator=rng) * 0.3 - 4.5,
                    "advantage": torch.randn((), generator=rng),
                }
            )
    return stack(rows)


def stack(rows: Sequence[dict[str, torch.Tensor]]) -> TensorDict:
    columns = {
        name: torch.nested.nested_tensor([row[name] for row in rows], layout=torch.jagged)
        if rows[0][name].ndim
        else torch.stack([row[name] for row in rows])
        for name in rows[0]
    }
    return TensorDict(columns, batch_size=[len(rows)])


def unstack(batch: TensorDict) -> list[dict[str, torch.Tensor]]:
    columns = {name: batch[name].unbind() for name in batch.keys()}  # noqa: SIM118
    return [{name: column[i] for name, column in columns.items()} for i in range(len(batch))]
