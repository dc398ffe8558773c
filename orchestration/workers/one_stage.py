"""The workers of one stage: of further rewards, of the reference, and of a stage that the recipe
names."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestration.recipe.flow import declarations_of, flow_of, stage_of
from orchestration.recipe.models import teacher_options
from orchestration.recipe.sections import StageSection
from orchestration.workers.engines import reference_engine
from orchestration.workers.job import Job
from stages.flow.adapter import StageAdapter
from stages.flow.catalogue import teacher_tokens
from stages.flow.declarations import StageDeclaration
from stages.flow.stage_calls import StageCaller, StageCalls
from stages.inference.scores import Reference
from stages.inference.teacher import TeacherReference, TeacherServer

if TYPE_CHECKING:
    from stages.inference.moving import MovingReference


class RewardJob(Job):
    """For ``reward.workers`` above 1: computes the rewards of the rows that it claims, beside the
    reward stage of the `flow` worker."""

    async def build(self) -> None:
        self.control(await self.reward_stage())


class ReferenceJob(Job):
    """The job that gives logprobs under the model that the run began with, ``model.reference``, or
    the model of ``teacher.url``."""

    async def build(self) -> None:
        recipe = self.recipe
        declared = flow_of(recipe)["reference"]
        if recipe.teacher.url:
            top_k = teacher_tokens(declared)
            server = TeacherServer(teacher_options(recipe), self.tokenizer, top_k)
            self.resources.push_async_callback(server.close)
            await server.open()
            size = recipe.algorithm.group_size
            self.control(
                TeacherReference(
                    server,
                    in_flight=recipe.teacher.in_flight,
                    group_size=size,
                    declared=declared,
                )
            )
            return
        if recipe.model.reference_every:
            self.control(self._moving_reference(declared))
            return
        engine = await asyncio.to_thread(reference_engine, recipe)
        self.resources.callback(engine.close)
        self.control(Reference(engine, declared))

    def _moving_reference(self, declared: StageDeclaration) -> MovingReference:
        from orchestration.checkpoints.references import References
        from stages.inference.moving import MovingReference

        model = self.recipe.model
        references = References(self.paths.out, model.reference_every, model.reference_mix)
        stage = MovingReference(
            lambda version: reference_engine(self.recipe, references.path(version)),
            declared,
            model.reference_every,
        )
        self.resources.callback(stage.close)
        return stage


class StageJob(Job):
    """The job that has one instance of the class of a stage under ``[[stages]]`` called: in a
    process of its own, or with the inline launcher in this one."""

    async def build(self) -> None:
        named = zip(self.recipe.stages, declarations_of(self.recipe), strict=True)
        section = next(section for section, declared in named if declared.name == self.kind)
        flow = flow_of(self.recipe)
        declared = flow[self.kind]
        declared = replace(declared, needs={name: flow.columns[name] for name in declared.needs})
        caller = await self._caller(section, declared)
        self.control(StageAdapter(caller, declared, index=self.index, timeout=section.timeout))

    async def _caller(self, section: StageSection, declared: StageDeclaration) -> StageCaller:
        if self.recipe.launch.launcher == "inline":
            calls = StageCalls(stage_of(section), declared, self.tokenizer, section.timeout)
            self.resources.callback(calls.close)
            return calls
        from orchestration.user_stages.caller import stage_process  # of a run with stages alone

        log = self.paths.out / "logs" / f"{self.kind}-{self.number}.log"
        process = stage_process(self.recipe, section, declared, log, f"{self.kind}-{self.number}")
        self.resources.push_async_callback(process.close)
        await process.open()
        return process
