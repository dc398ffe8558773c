"""Figures of each reward function in an optimizer step.

scores of the step's rows ──▶ mean, std; of several functions: share, correlation ─┐
RewardSet: calls ── amounts of the index, which the step takes ────────────────────┴▶ StepEvent.rewards
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stages.rewards.calls import CallCounts
from stages.rewards.scores import has_reward, is_scored


def amounts_of(counts: Mapping[str, CallCounts]) -> dict[str, float]:
    """Return what calls have come to, by function, as amounts of the index."""
    return {
        f"reward/{name}/{what}": number
        for name, of_function in counts.items()
        for what, number in vars(of_function).items()
    }


def figures_by_function(
    weights: Mapping[str, float],
    amounts: Mapping[str, float],
    scores: torch.Tensor,
    groups: torch.Tensor,
) -> dict[str, dict[str, float | None]]:
    """Return the numbers of ``StepEvent.rewards``. ``weights``: of the functions, by their names;
    ``amounts``: those of the index; ``scores`` float32 [B, K], ``groups`` int64 [B]: of the step's
    rows."""
    parts = torch.empty(0, len(weights), dtype=torch.float64)
    if len(weights) > 1:
        has = has_reward(scores)
        weighted = scores[has].double().nan_to_num(nan=0.0)
        weighted *= torch.tensor([*weights.values()], dtype=torch.float64)
        parts = centred(weighted, groups[has])
    figures = {}
    for name, column, scored, part in zip(
        weights, scores.T, is_scored(scores).T, parts.T, strict=False
    ):
        values = column[scored].double()
        rest = parts.sum(dim=1) - part
        reward = part + rest
        numbers = {
            "mean": values.mean(),
            "std": (values - values.mean()).square().mean().sqrt(),
            "share": part @ reward / (reward @ reward),
            "correlation": part @ rest / (part.norm() * rest.norm()),
        }
        figures[name] = {
            **{what: None if number.isnan() else float(number) for what, number in numbers.items()},
            **{what: amounts.get(f"reward/{name}/{what}", 0) for what in vars(CallCounts())},
        }
    return figures


def centred(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return ``values`` float64 [B, K] less their mean in each group; 0 in a group of equal ones.
    ``groups``: int64 [B].

    >>> centred(torch.tensor([[0.1], [0.1], [0.1], [1.0], [0.0]]).double(), torch.tensor([7, 7, 7, 9, 9])).T
    tensor([[ 0.0000,  0.0000,  0.0000,  0.5000, -0.5000]], dtype=torch.float64)
    """
    _, place, sizes = groups.unique(return_inverse=True, return_counts=True)
    sums = values.new_zeros(len(sizes), values.shape[1]).index_add(0, place, values)
    differences = values - (sums / sizes[:, None])[place]
    return differences.masked_fill(differences.abs() <= 1e-9 * values.abs(), 0.0)  # by rounding
