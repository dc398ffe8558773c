"""Scores of given responses by other models than the policy: logprobs under the frozen reference,
for algorithms with a KL term, or its most probable tokens, for those that learn from all of them;
and values of the states before the tokens, under the critic that is trained in the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import torch
from tensordict import TensorDict

from pipeline.index.client import Claim
from pipeline.problems import Problem
from pipeline.worker.controller import Stage
from pipeline.worker.outputs import Output, Written
from stages.algorithms.batch import seen_by_teacher
from stages.engines.protocols import TeacherEngine, TrainEngine
from stages.engines.registry import EngineUnknown
from stages.flow.catalogue import (
    CRITIC,
    REFERENCE,
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    scored_columns,
    teacher_tokens,
)
from stages.flow.declarations import StageDeclaration
from stages.flow.groups import GROUPS_AT_ONCE
from stages.training.critic import CriticWorker
from stages.training.ranks import train_batch


class Reference(Stage):
    """Claims one group at a time, so that bits do not depend on which groups came together. Its
    columns are as the flow has ``declared`` them. Raises EngineUnknown for an engine that cannot
    make them."""

    name = "reference"

    def __init__(self, engine: TrainEngine, declared: StageDeclaration) -> None:
        if teacher_tokens(declared):
            teacher(engine)
        self.engine = engine
        self.declared = declared
        self.fetches = tuple(declared.needs)

    def room(self, held: int) -> int:
        return 0 if held else 1

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        batch = train_batch(claim, rows)
        columns = await asyncio.to_thread(scores, self.engine, batch, self.declared)
        yield Written(range(len(claim)), rows=columns, tokens=int(claim.tokens.sum()))


def scores(
    engine: TrainEngine, batch: TensorDict, declared: StageDeclaration
) -> dict[str, torch.Tensor]:
    """Return what the stage ``declared`` makes of ``batch``, each a nested tensor [B, j, …]."""
    columns = {}
    if top_k := teacher_tokens(declared):
        top = teacher(engine).top_logprobs(seen_by_teacher(batch), top_k)
        columns[TEACHER_LOGPROBS], columns[TEACHER_IDS] = top
    if REFERENCE.keys() <= declared.makes.keys():
        columns["ref_logprobs"] = engine.logprobs(batch)
    return columns


def teacher(engine: TrainEngine) -> TeacherEngine:
    """Return ``engine``, if it can teach. Raises EngineUnknown."""
    if isinstance(engine, TeacherEngine):
        return engine
    reason = "has no top_logprobs, which the algorithm needs of a teacher"
    fix = "add it (TeacherEngine in stages/engines/protocols.py), or use 'distillation'"
    raise EngineUnknown(Problem("train.engine", type(engine).__name__, reason, fix))


class Values(Stage):
    """Claims groups once ``may_begin``: a critic that was started again replays its steps first.

    Groups are computed one by one, between two steps of ``critic``.
    """

    name = CRITIC

    def __init__(self, critic: CriticWorker) -> None:
        self.critic = critic
        self.fetches = scored_columns(critic.dock.schema)
        self.may_begin = False

    def room(self, held: int) -> int:
        return 0 if held or not self.may_begin else GROUPS_AT_ONCE

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        values = await self.critic.values(claim, rows)
        yield Written(range(len(claim)), rows={"values": values}, tokens=int(claim.tokens.sum()))
