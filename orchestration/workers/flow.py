"""The worker of the light stages: the gate, advantage, and the first reward stage. A run has
one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from orchestration.guard.rules import DROPPED
from orchestration.recipe.flow import credit_truncated, flow_of, longest_teacher_prompt
from orchestration.recipe.sizes.planner import context_of, prompt_limits
from orchestration.rewards.functions import scored_by
from orchestration.state.documents import EXTERNAL_TERMS
from orchestration.workers.job import Job, Work
from pipeline.documents.flow import VERSION
from pipeline.schedule.pacing import Pacer
from stages.flow.catalogue import CREDIT, TEACHER_STAGE
from stages.flow.drop_alarm import DropAlarm
from stages.prompts.gate import Gate
from stages.prompts.sources import PromptSource, load_prompts
from stages.prompts.too_long import TOO_LONG_FILE
from stages.training.advantage import Advantage

if TYPE_CHECKING:
    from pipeline.worker.controller import Stage
    from stages.flow.declarations import StageDeclaration
    from stages.prompts.external import ExternalPrompts
    from stages.prompts.formatter import OpensConversation

log = structlog.get_logger()

EXTERNAL_PROMPTS = "prompts.jsonl"  # in the run's folder: the prompts that other programs have put


# steps, groups: as many dropped in a row are an alarm
STEPS_DROPPED = 16
LEAST_DROPPED = 64


class FlowJob(Job):
    """The job that admits prompts, computes rewards and advantages, and serves the warehouse to
    other nodes."""

    _external_prompts: ExternalPrompts | None = None

    async def build(self) -> None:
        recipe = self.recipe
        if recipe.warehouse_address:
            try:
                host, port = await self.dock.serve(recipe.warehouse_address)
            except ValueError as refused:
                raise ValueError(f"pipeline.{refused}") from refused
            log.info(
                "warehouse served to other nodes",
                host=host,
                port=port,
                tls=bool(recipe.pipeline.tls_certificate),
            )
        if recipe.external.stages:
            from orchestration.workers.terms import terms_of

            await EXTERNAL_TERMS.put(self.index, terms_of(recipe, self.tokenizer))
        prompts = await self._prompts()
        by_difficulty = recipe.prompts.sampling == "difficulty"
        difficulty = None
        if by_difficulty:
            from stages.prompts.difficulty import Difficulty, IndexedDifficulty

            difficulty = IndexedDifficulty(self.index, Difficulty(prompts, recipe.seed))
        self._gate = Gate(
            self.dock,
            prompts,
            group_size=recipe.algorithm.group_size,
            steps=recipe.train.steps,
            groups_per_step=recipe.train.groups_per_step,
            fed=self._external_prompts,
            difficulty=difficulty,
            pacer=Pacer(recipe.staleness_plan) if recipe.is_paced else None,
        )
        flow = flow_of(recipe)
        most = max(LEAST_DROPPED, STEPS_DROPPED * recipe.train.groups_per_step)
        alarm = (
            None
            if DROPPED in recipe.guard.off
            else DropAlarm(self.index, most, f"{self.kind}-{self.number}")
        )
        if recipe.prompts.responses:
            from stages.rollout.given_responses import GivenResponses

            count = len(recipe.prompts.responses)
            rollout = recipe.rollout
            unit = self.algorithm().unit
            self.control(
                GivenResponses(self.dock, count, rollout.max_tokens, rollout.truncated, unit, alarm)
            )
        if recipe.runs_stage("reward") and "reward" in flow:
            self.control(await self.reward_stage())
        if TEACHER_STAGE in flow:
            self.control(self._teacher_prompts(flow[TEACHER_STAGE]))
        if CREDIT in flow:
            rewards = tuple(scored_by(recipe)) if "scores" in flow[CREDIT].needs else ()
            rated = self.index if by_difficulty else None
            refill = self.index, recipe.algorithm.max_refill * recipe.train.groups_per_step
            self.control(
                Advantage(
                    self.algorithm(),
                    flow[CREDIT],
                    credit_truncated(recipe),
                    rewards,
                    rated,
                    alarm,
                    refill,
                )
            )

    def _teacher_prompts(self, declared: StageDeclaration) -> Stage:
        from stages.prompts.formatter import PromptFormatter
        from stages.prompts.rows.options import PromptLimits
        from stages.prompts.teacher_prompts import TeacherPrompts

        recipe = self.recipe
        longest = longest_teacher_prompt(recipe)
        if (context := context_of(recipe)) is not None:
            longest = min(longest, context - recipe.longest_response)
        formatter = PromptFormatter(recipe.prompts, self.tokenizer, PromptLimits())
        return TeacherPrompts(self.algorithm(), declared, formatter, self.tokenizer, longest)

    async def _dialogues(self) -> OpensConversation | None:
        """Return what renders conversations that an environment goes on with; None: none does."""
        if not self.recipe.has_environment:
            return None
        from orchestration.environments.declared import declarations
        from orchestration.recipe.dialogue import dialogues_of

        return dialogues_of(self.recipe, self.tokenizer, await declarations(self.index))

    async def _prompts(self) -> PromptSource:
        recipe = self.recipe
        limits = prompt_limits(self.recipe)
        if recipe.prompts.source != "external":
            listed = self.paths.out / TOO_LONG_FILE
            split = await asyncio.to_thread(
                load_prompts,
                recipe.prompts,
                self.tokenizer,
                recipe.seed,
                limits=limits,
                listed=listed,
                opens=await self._dialogues(),
            )
            return split.train
        from stages.prompts.external import ExternalPrompts
        from stages.prompts.formatter import PromptFormatter

        form = PromptFormatter(recipe.prompts, self.tokenizer, limits, await self._dialogues())
        prompts = self._external_prompts = ExternalPrompts(
            self.index, self.paths.out / EXTERNAL_PROMPTS, form
        )
        await prompts.begin()
        return prompts

    def until_stop(self) -> Sequence[Work]:
        return () if self._external_prompts is None else (self._external_prompts.run(),)

    def until_done(self) -> Sequence[Work]:
        return (self._gate.run(),)

    async def set_paused(self, is_paused: bool) -> None:
        await super().set_paused(is_paused)
        self._gate.paused = is_paused
        await self.index.wake(VERSION)

    async def stop(self) -> None:
        await self._gate.stop()
        await super().stop()
