"""The trainer that :mod:`tests.stages.engines.echo` understands: its policy is one whole number,
moved on by each step.

[train]
engine = "tests.stages.engines.counting:engine"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tensordict import TensorDictBase

from orchestration.recipe.schema import Recipe
from stages.engines.mock.engines import MockTrainEngine
from stages.engines.mock.options import MockTrainOptions
from stages.parallel.layout import RankCoordinates


class CountingTrainEngine(MockTrainEngine):
    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return [("step", torch.tensor([1 + self.state_dict()["step"]]))]

    def logprobs(self, batch: TensorDictBase) -> torch.Tensor:
        responses = batch["response_ids"]  # certain, as the echo is
        return torch.nested.nested_tensor_from_jagged(
            torch.zeros(len(responses.values())), responses.offsets()
        )

    def save_pretrained(self, path: Path, state: Mapping[str, Any] | None = None) -> None:
        path.mkdir(parents=True, exist_ok=True)
        save_file(
            {"step": torch.tensor([1 + (state or self.state_dict())["step"]])},
            path / "model.safetensors",
        )


def engine(
    recipe: Recipe, *, ranks: RankCoordinates, meeting: Any, step_seconds: float = 0.0
) -> CountingTrainEngine:
    """``step_seconds`` may be given in train.options."""
    return CountingTrainEngine(
        MockTrainOptions(step_seconds=step_seconds, time_scale=1.0), seed=recipe.seed
    )
