"""Checks of the models beside the policy: whether a reference, a critic, or a model that drafts
reads its tokens; of a teacher behind a server, what does not fit together, and whether the server
answers with what is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from orchestration.recipe import model_files
from orchestration.recipe.checks.registry import Environment, check, machine_check, problem
from orchestration.recipe.flow import flow_of, needs_reference
from orchestration.recipe.model_files import KNOWN_MODELS
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


@machine_check("model", "algorithm", "stages", "external")
def reference_fits(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    if (reference := recipe.model.reference) is None:
        return
    if not (needed := value_or_none(lambda: needs_reference(recipe))):
        if needed is False:
            reason = (
                f"is read by no stage: algorithm.name = {recipe.algorithm.name!r} with these "
                f"options needs no reference"
            )
            yield problem(
                recipe,
                "model.reference",
                reason,
                "take it out, or use an algorithm that reads ref_logprobs",
            )
        return
    fix = "give the directory of a Hugging Face checkpoint, such as checkpoints/STEP/model of a run"
    yield from _same_family(recipe, environment, "model.reference", reference, fix)


@machine_check("model", "critic", "algorithm", "train.engine")
def critic_fits(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    if recipe.critic.source is not None:
        fix = (
            "give the directory of a Hugging Face checkpoint, such as "
            "checkpoints/STEP/critic/model of a run"
        )
        yield from _same_family(recipe, environment, "critic.source", recipe.critic.source, fix)
    source = recipe.critic.source or recipe.model.source
    wanted = [name for name in ("tp", "pp") if getattr(recipe.critic, name) > 1]
    if wanted and recipe.trains_critic and model_files.text_config(source):
        from stages.engines.torch.model_check import refusal

        for name in wanted:
            if reason := refusal(model_files.folder_of(source), "train", **{name: True}):
                fix = f"set critic.{name} = 1 (critic.dp shards any model that one rank trains)"
                yield problem(
                    recipe,
                    f"critic.{name}",
                    f"is not available for the model in {source} ({reason})",
                    fix,
                )


@machine_check("rollout.draft_model", "rollout.engine", "rollout.speculate", "pipeline", "model")
def draft_model_fits(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    key = "rollout.draft_model"
    rollout = recipe.rollout
    if rollout.draft_model is None:
        return
    unused = {
        "drafts for the torch engine alone": rollout.engine != "torch",
        "drafts tokens, but rollout.speculate = 'off'": rollout.speculate == "off",
        "drafts tokens, but results of a synchronous run are exact bit for bit, and a drafted "
        "token is rounded otherwise": recipe.staleness_plan.slack == 0,
    }
    fix = "take it out"
    if rollout.engine == "vllm":
        fix += "; vLLM takes its own by rollout.vllm.speculative_config"
    for why in (why for why, holds in unused.items() if holds):
        yield problem(recipe, key, why, fix)
    fix = "give the directory of a Hugging Face checkpoint, smaller than the model"
    yield from _same_family(recipe, environment, key, rollout.draft_model, fix)


def _same_family(
    recipe: Recipe, environment: Environment, key: str, source: str, fix: str
) -> Iterator[Problem]:
    """What is wrong with ``source`` as a model that reads the policy's tokens."""
    if source not in KNOWN_MODELS and not model_files.is_folder(source):
        yield problem(recipe, key, "is neither a known model nor a directory", fix)
        return
    if source not in KNOWN_MODELS:
        folder = model_files.folder_of(source)
        needs_weights = recipe.train.engine != "mock"
        for fault in model_files.faults(folder, environment.reading, weights=needs_weights):
            yield problem(recipe, key, *fault)
    from stages.model.load import load_tokenizer

    vocabularies = value_or_none(
        lambda: [load_tokenizer(name).get_vocab() for name in (source, recipe.model.source)]
    )
    if vocabularies and vocabularies[0] != vocabularies[1]:
        reason = (
            f"has another vocabulary than model.source = {recipe.model.source!r}: it does "
            f"not read the same tokens"
        )
        yield problem(recipe, key, reason, "use a checkpoint of the same family")
