"""The workers of one stage: of further rewards, of the reference, and of a stage that the recipe names."""

from __future__ import annotations

import asyncio

from orchestration.recipe.flow import flow_of, stages_of
from orchestration.run.builders.job import Job
from orchestration.run.engines import reference_engine, teacher_options
from stages.flow.adapter import StageAdapter
from stages.inference.scores import Reference
from stages.inference.teacher import TeacherReference, TeacherServer


class RewardJob(Job):
    """For ``reward.workers`` above 1: computes the rewards of the rows that it claims, beside the reward stage of the `flow`
    worker."""

    async def build(self) -> None:
        self.control(await self.reward_stage())


class ReferenceJob(Job):
    """Gives logprobs under the model that the run began with, ``model.reference``, or the model of ``teacher.url``."""

    async def build(self) -> None:
        recipe = self.recipe
        if recipe.teacher.url:
            server = TeacherServer(teacher_options(recipe), self.tokenizer)
            self.resources.push_async_callback(server.close)
            await server.open()
            size = recipe.algorithm.group_size
            self.control(TeacherReference(server, in_flight=recipe.teacher.in_flight, group_size=size))
            return
        engine = await asyncio.to_thread(reference_engine, recipe)
        self.resources.callback(engine.close)
        self.control(Reference(engine))


class StageJob(Job):
    """Runs one instance of the class of a stage under ``[[stages]]``."""

    async def build(self) -> None:
        found = enumerate(stages_of(self.recipe))
        at, stage = next((at, stage) for at, (stage, declared) in found if declared.name == self.kind)
        timeout, declared = self.recipe.stages[at].timeout, flow_of(self.recipe)[self.kind]
        adapter = StageAdapter(stage, declared, self.tokenizer, index=self.index, timeout=timeout)
        self.resources.callback(adapter.close)
        self.control(adapter)
