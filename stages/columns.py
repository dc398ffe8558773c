"""The columns of a sample, and which stage needs and makes which. The pipeline's graph follows from this table alone.

gate ▶ prompt_ids given fields
         └▶ rollout ▶ response_ids rollout_logprobs versions truncated
                        ├▶ reward ▶ reward scores ──────────▶ advantage ▶ advantage ─┐
                        └▶ reference ▶ ref_logprobs  (when the algorithm needs it) ──┴▶ update
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeline.columns import Column, Schema
from pipeline.index.client import RunConfig, StageSpec, Takes
from pipeline.staleness import StalenessPlan

PROMPT = (Column.ragged("prompt_ids", torch.int64), Column.text("given"), Column.text("fields"))
RESPONSE = (
    Column.ragged("response_ids", torch.int64),
    Column.ragged("rollout_logprobs", torch.float32),
    Column.ragged("versions", torch.int64),  # run-length encoded: version, tokens, version, tokens, …
    Column.scalar("truncated", torch.bool),
)
REFERENCE = (Column.ragged("ref_logprobs", torch.float32),)
ADVANTAGE = (Column.scalar("advantage", torch.float32, finite=True),)


@dataclass(frozen=True)
class Flow:
    """What a run's samples are made of: ``rewards`` functions score them, ``reference`` says whether a reference does."""

    rewards: int = 1
    reference: bool = False

    @property
    def schema(self) -> Schema:
        scores = (
            Column.scalar("reward", torch.float32, finite=True),
            Column.fixed("scores", torch.float32, [self.rewards]),
        )
        return Schema([*PROMPT, *RESPONSE, *scores, *(REFERENCE if self.reference else ()), *ADVANTAGE])

    def config(self, plan: StalenessPlan) -> RunConfig:
        """What the index has to know of the stages and of the staleness bound."""
        schema = self.schema

        def stage(name: str, takes: Takes, needs: list[str], makes: list[str]) -> StageSpec:
            return StageSpec(name, takes, schema.mask(needs), schema.mask(makes))

        reference = (
            [stage("reference", "groups", ["prompt_ids", "response_ids"], ["ref_logprobs"])] if self.reference else []
        )
        trained = ["prompt_ids", "response_ids", "rollout_logprobs", "advantage"]
        return RunConfig(
            stages=(
                stage("rollout", "groups", ["prompt_ids"], [column.name for column in RESPONSE]),
                stage("reward", "rows", ["given", "fields", "response_ids"], ["reward", "scores"]),
                *reference,
                stage("advantage", "groups", ["reward"], ["advantage"]),
                stage("update", "batch", [*trained, "ref_logprobs"] if self.reference else trained, []),
            ),
            groups_per_step=plan.groups_per_step,
            slack=plan.slack,
            window=plan.window,
            staleness=plan.bound,
        )
