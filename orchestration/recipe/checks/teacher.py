"""Checks of a teacher behind a server: what does not fit together, and whether the server answers
with what is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from orchestration.recipe.checks.registry import Environment, check, machine_check, problem
from orchestration.recipe.flow import flow_of, needs_reference
from orchestration.recipe.problems import value_or_none
from orchestration.recipe.schema import Recipe
from pipeline.problems import Problem
from stages.flow.catalogue import teacher_tokens

# of a check; a run waits longer
PROBE_SECONDS = 20.0
PROBE_RETRIES = 1


@check(
    "teacher",
    "model.reference",
    "algorithm",
    "stages",
    "external",
    "rollout.temperature",
    "prompts.responses",
)
def teacher_is_needed(recipe: Recipe) -> Iterator[Problem]:
    teacher = recipe.teacher
    if not teacher.url:
        fields = type(teacher).model_fields
        for name in (name for name in fields if getattr(teacher, name) != fields[name].default):
            yield problem(
                recipe,
                f"teacher.{name}",
                "belongs to a teacher without teacher.url",
                "give it, or take this out",
            )
        return
    if recipe.model.reference is not None:
        reason = "is a checkpoint that gives ref_logprobs, and so does the server teacher.url"
        yield problem(recipe, "model.reference", reason, "take one of the two out")
    if not recipe.runs_stage("reference"):
        yield problem(
            recipe,
            "external.stages",
            "has 'reference', and so does teacher.url",
            "take one of the two out",
        )
    if recipe.logprob_temperature != 1.0:
        reason = "is not 1, but the server teacher.url gives logprobs at temperature 1"
        yield problem(
            recipe, "rollout.temperature", reason, "set it to 1.0, or use model.reference"
        )
    if value_or_none(lambda: needs_reference(recipe)) is False:
        reason = (
            f"is asked by no stage: {recipe.algorithm.name} with these options reads no "
            f"ref_logprobs"
        )
        yield problem(
            recipe, "teacher.url", reason, "take it out, or use an algorithm such as 'distillation'"
        )


@machine_check("teacher", "model.source")
def teacher_answers(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    if not recipe.teacher.url:
        return
    from orchestration.recipe.models import teacher_options, tokenizer_of
    from stages.inference.teacher import TeacherRefused, TeacherServer, TeacherUnreachable

    async def probe(server: TeacherServer) -> None:
        try:
            await server.open()
        finally:
            await server.close()

    if (tokenizer := value_or_none(lambda: tokenizer_of(recipe))) is None:
        return
    try:
        flow = value_or_none(lambda: flow_of(recipe))
        top_k = teacher_tokens(flow["reference"]) if flow and "reference" in flow else 0
        options = teacher_options(recipe, PROBE_SECONDS, PROBE_RETRIES)
        server = TeacherServer(options, tokenizer, top_k)
        # a loop of its own: a check may be called inside of one
        with ThreadPoolExecutor(1, "teacher") as thread:
            thread.submit(lambda: asyncio.run(probe(server))).result()
    except (TeacherRefused, TeacherUnreachable) as error:
        [found] = error.problems
        yield problem(recipe, found.key, found.wrong, found.fix or "look at the server's log")
