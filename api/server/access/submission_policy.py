"""Policy for recipes in requests: modules are imported, and paths looked at, only if the operator
allows it.

    recipe, or a stored one ──▶ overrides ──▶ code? addresses? paths? ──▶ the recipe's own checks ──▶ limits ──▶ Recipe
                                               └ refused: replaced by a harmless value ┘└─ all problems at once ─┘

Names without a colon belong to installed packages (built in, or an entry point); ``module:name``
could be any code on the machine, so the operator must have listed it.
"""

from __future__ import annotations

import copy
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from api.server.access.roots import below_root, leads_out
from api.server.access.settings import Settings
from api.server.http import problems as answers
from orchestration.bounds import out_of_bounds
from orchestration.checkpoints import base_models
from orchestration.checkpoints.forked import BASE, LONGEST_NAME, sources
from orchestration.cluster_backends import CLUSTERS
from orchestration.recipe.loading.load import (
    OWN_KEYS,
    SHIPPED,
    extended,
    fixed_problems,
    layered,
    override,
    parse_recipe,
    read_recipe,
)
from orchestration.recipe.model_files import KNOWN_MODELS, MODEL_KEYS
from orchestration.recipe.problems import RecipeError, suggest
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sections import VllmSection
from orchestration.recipe.sections.retired import migrated
from orchestration.units import format_size
from pipeline.index.address import redacted
from pipeline.node import AUTO, LOOPBACK
from pipeline.problems import Problem
from stages.json_schema import IsCode, IsPath, marked
from stages.prompts.conversations import is_template_name
from stages.prompts.rows.files import Reading
from stages.tasks.tasks import HARMLESS

ASK = "ask the operator for {}"
ENVIRONMENTS = "environment.use"
# a key whose value would have code run in a worker, that value, and a harmless one
IN_WORKER = ("launch.launcher", "inline", "process")


def stored_recipes(settings: Settings) -> dict[str, Path]:
    """Return the files of stored recipes by name: the operator's, then those of the package."""
    recipes: dict[str, Path] = {}
    for folder in (*settings.recipes, SHIPPED):
        for path in sorted(folder.glob("*.toml")):
            recipes.setdefault(path.stem, path)
    return recipes


def stored_recipe(settings: Settings, name: str, field: str = "recipe_name") -> dict[str, Any]:
    """Return the tables of a stored recipe over those that it extends, unchecked.

    Raises LookupError, and RecipeError, which names ``field``, when it cannot be read.
    """
    path = stored_recipes(settings)[name]  # a key of this dict, never part of a path
    try:
        data, _ = read_recipe(path)
    except RecipeError as error:
        problems = [
            Problem(field, name, f"cannot be read: {problem.key}: {problem.wrong}")
            for problem in error.problems
        ]
        raise RecipeError(name, problems) from error
    return data


def unknown_recipe(settings: Settings, name: str, status: int, field: str) -> answers.HTTPProblem:
    """Return the answer to a request with a ``field`` that names no stored recipe."""
    fix = suggest(name, list(stored_recipes(settings)))
    detail = "No stored recipe is called that."
    return answers.HTTPProblem(
        status, detail, kind="unknown-recipe", field=field, value=name, fix=fix
    )


def accept(
    settings: Settings,
    data: Mapping[str, Any],
    overrides: Mapping[str, Any],
    reading: Reading | None = None,
    *,
    resumed: Path | None = None,
    start: Path | None = None,
) -> Recipe:
    """Return the recipe of ``data``, which may extend a stored one, with ``overrides``.

    Of files below the operator's roots it reads what ``reading`` allows (default: what a check
    reads). ``resumed``: the folder of a run of ``data`` that goes on. ``start``: the checkpoint
    whose weights a forked run of ``data`` begins with. Raises RecipeError with all problems.
    """
    too_large = [
        *out_of_bounds(data, finite=True),
        *out_of_bounds(overrides, "overrides", finite=True),
    ]
    if too_large:  # other checks could fail on such values, or take long
        raise RecipeError("recipe", too_large)
    base = resumed / BASE if resumed else start
    tables = migrated(data) if base else copy.deepcopy(_extended(settings, data))
    submission = _Submission(settings, tables, dict(sources(base)) if base else {})
    for key, value in copy.deepcopy(dict(overrides)).items():
        if problem := override(submission.data, key, value, "overrides"):
            submission.problems.append(problem)
    submission.confine_environments()
    submission.refuse_code()
    submission.confine_rewards()
    submission.confine_stages()
    submission.refuse_addresses()
    submission.resolve_paths()
    if resumed:
        submission.refuse_changes(data, overrides, resumed)
    pipeline = submission.data.setdefault("pipeline", {})
    # checks see where the service's index is, without its password
    if settings.index and isinstance(pipeline, dict):
        pipeline["index"] = redacted(settings.index)
    recipe = parse_recipe(
        submission.data,
        problems=submission.problems,
        reading=reading,
        folder=settings.data,
        devices=settings.runs > 0,
    )
    if problems := list(_beyond_limits(settings, recipe)):
        raise RecipeError("recipe", problems)
    return recipe.model_copy(
        update={"pipeline": recipe.pipeline.model_copy(update={"index": "embedded"})}
    )


def _extended(settings: Settings, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``data`` over the stored recipe that it extends. Raises RecipeError."""
    name = data.get("extends")
    if not isinstance(name, str) or name not in stored_recipes(settings):
        return extended(data)
    base = stored_recipe(settings, name, "extends").items()
    own = {key: value for key, value in data.items() if key != "extends"}
    return layered({key: value for key, value in base if key not in OWN_KEYS}, own)


class _Submission:
    """A recipe in a request.

    A refused value becomes a problem and is replaced by a harmless one, so that the recipe's own
    checks can follow. They also check types.
    """

    def __init__(self, settings: Settings, data: dict[str, Any], models: Mapping[str, str]) -> None:
        """``models``: of the service's own runs, which ``data`` may name, by key."""
        self.settings = settings
        self.data = data
        self.models = models
        self.problems: list[Problem] = []

    def value(self, key: str) -> Any:
        """Return the value of a dotted key; None where there is none."""
        value: Any = self.data
        for part in key.split("."):
            if isinstance(value, list) and part.isdecimal():
                value = value[int(part)] if int(part) < len(value) else None
            else:
                value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def text(self, key: str) -> str:
        """Return the value of a dotted key, which is one of a set of names; "" where it is no text,
        which the recipe's own checks refuse."""
        value = self.value(key)
        return value if isinstance(value, str) else ""

    def refuse(self, key: str, value: Any, wrong: str, fix: str, replacement: Any) -> None:
        self.problems.append(Problem(key, value, wrong, fix))
        override(self.data, key, replacement)

    def refuse_changes(
        self, before: Mapping[str, Any], overrides: Mapping[str, Any], folder: Path
    ) -> None:
        """Refuse what may not change in the run in ``folder``.

        A base model may lie elsewhere, with the same files.
        """
        resolved = {key: self.value(key) for key in overrides}
        refused_keys = {problem.key for problem in self.problems}
        moved = set[str]()
        try:
            moved = base_models.moved(Recipe.recorded(before), resolved, folder)
        except base_models.BaseModelDiffers as error:
            self.problems.append(Problem(error.key, resolved[error.key], error.wrong, error.fix))
            refused_keys.add(error.key)
        self.problems += [
            problem
            for problem in fixed_problems(before, self.data)
            if problem.key not in refused_keys | moved
        ]

    def refuse_code(self) -> None:
        """Refuse ``module:name`` that the operator has not listed, and templates that do more than
        name columns."""
        for key, code in [*marked(Recipe, self.data, IsCode)]:
            names = self.value(key)
            allowed = getattr(self.settings, f"allow_{code.kind}s")
            for place, name in _names_by_key(key, names).items():
                if ":" in name and name not in allowed:
                    fix = f"use an installed name, or {ASK.format(f'--allow-{code.kind}')}"
                    violation = "is code that this server does not run"
                    self.problems.append(Problem(place, name, violation, fix))
                    override(self.data, key, code.harmless)
        if any(problem.key.startswith("stages.") for problem in self.problems):
            self.data["stages"] = []  # nothing of them is imported
        if any(problem.key.startswith(ENVIRONMENTS) for problem in self.problems):
            override(self.data, "environment.options", {})  # they are another class's
        for key in self._of_sources("template"):
            template = self.value(key)
            if isinstance(template, str) and not _only_names_columns(template):
                fix = "name columns alone, as {prompt}"
                self.refuse(key, template, "uses more than the columns themselves", fix, "{prompt}")

        vllm = self.value("rollout.vllm")
        for name in [*vllm] if isinstance(vllm, dict) else []:
            # some are paths, and some have vLLM run code of a model's folder
            if name not in VllmSection.model_fields:
                violation = "is passed to vLLM as it is, which a request may not"
                fix = "take it out"
                self.problems.append(
                    Problem(f"rollout.vllm.{name}", vllm.pop(name), violation, fix)
                )

    def confine_rewards(self) -> None:
        """Have reward functions run in a sandbox, with a network and an environment that the
        operator has allowed."""
        if self.value("stages") or self.value(ENVIRONMENTS):  # they see the same variables
            self.data.setdefault("reward", {})
        reward = self.data.get("reward")
        if not isinstance(reward, dict):
            return
        names = reward.get("environment")
        if names is None:
            reward["environment"] = []
        for index, name in enumerate(names if isinstance(names, list) else []):
            if isinstance(name, str) and name not in self.settings.allow_environment:
                violation = "is a variable that functions of requests may not see"
                fix = f"take it out, or {ASK.format(f'--allow-environment {name}')}"
                self.refuse(f"reward.environment.{index}", name, violation, fix, "")
        functions = reward.get("functions")
        for index, function in enumerate(functions if isinstance(functions, list) else []):
            if (
                isinstance(function, dict)
                and isinstance(name := function.get("name"), str)
                and name not in HARMLESS
            ):
                self._confine(
                    f"reward.functions.{index}", function, [name], ("reward.processes", 0, 1)
                )

    def confine_stages(self) -> None:
        """Have stages run in a sandbox, as reward functions do."""
        stages = self.data.get("stages")
        for index, stage in enumerate(stages if isinstance(stages, list) else []):
            if isinstance(stage, dict) and isinstance(name := stage.get("use"), str):
                self._confine(f"stages.{index}", stage, [name], IN_WORKER)

    def confine_environments(self) -> None:
        """Have environments run in a sandbox, as stages do; with a network only where all may have
        it."""
        table = self.data.get("environment")
        names = [*_names_by_key(ENVIRONMENTS, self.value(ENVIRONMENTS)).values()]
        if isinstance(table, dict) and names:
            self._confine("environment", table, names, IN_WORKER)

    def _confine(
        self,
        key: str,
        code: dict[str, Any],
        names: Sequence[str],
        in_worker: tuple[str, Any, Any],
    ) -> None:
        """Have ``code``, the table of the functions, stages or environments ``names``, run in a
        sandbox.

        ``in_worker``: the key whose value would have it run in a worker, that value, and a harmless
        one.
        """
        if not self.settings.unsandboxed_code:
            ask = ASK.format("--unsandboxed-code")
            if code.get("sandbox") is False:
                violation = "would run without a sandbox, which code of requests may not"
                self.refuse(f"{key}.sandbox", False, violation, f"leave it out, or {ask}", True)
            chooses, value, harmless = in_worker
            if self.value(chooses) == value:
                listed = ", ".join(map(repr, names))
                violation = f"would run {listed} in a worker, which has no sandbox"
                self.refuse(chooses, value, violation, f"leave it out, or {ask}", harmless)
            if code.get("sandbox") is None:
                code["sandbox"] = True
        offline = [name for name in names if name not in self.settings.allow_networks]
        if code.get("network") is True and offline:
            options = " ".join(f"--allow-network {name}" for name in offline)
            fix = f"leave it out, or {ASK.format(options)}"
            self.refuse(f"{key}.network", True, "may not use the network here", fix, False)

    def _each(self, table: str, key: str) -> Iterator[str]:
        """Return the dotted ``key`` of each entry of a list of tables."""
        entries = self.value(table)
        return (
            f"{table}.{index}.{key}"
            for index in range(len(entries) if isinstance(entries, list) else 0)
        )

    def _of_sources(self, key: str) -> list[str]:
        """Return the dotted ``key`` of the source of prompts, and of each of several."""
        return [f"prompts.{key}", *self._each("prompts.sources", key)]

    def refuse_addresses(self) -> None:
        """Refuse names that are too long, another index, and servers, places and ports that the
        operator has not allowed."""
        name = self.value("name")
        ask = ASK.format("--allow-listen")
        if isinstance(name, str) and len(name) > LONGEST_NAME:
            self.refuse(
                "name", name, f"is longer than {LONGEST_NAME} characters", "shorten it", "recipe"
            )
        port = "opens a port, which a request may not"
        urls = self.settings.allow_checkpoints
        place = "is a place to which runs of this service copy nothing"
        to_urls = ASK.format("--allow-checkpoints")
        for key, allowed, violation, fix in (
            ("pipeline.index", ("embedded",), "is chosen by the service", "leave it out"),
            ("checkpoint.url", urls, place, f"leave it out, or {to_urls}"),
            (
                "pipeline.serve",
                (AUTO, *self.settings.allow_listen),
                port,
                f"leave it out, or {ask}",
            ),
        ):
            if (value := self.value(key)) not in (None, "", *allowed):
                self.refuse(
                    key, value, violation, fix, "embedded" if key == "pipeline.index" else ""
                )
        teacher = self.value("teacher.url")
        if isinstance(teacher, str) and teacher and teacher not in self.settings.allow_teachers:
            # nor does it get a key of the environment
            violation = "is a server that runs of this service do not ask"
            self.refuse(
                "teacher.url",
                teacher,
                violation,
                f"use model.reference, or {ASK.format('--allow-teacher')}",
                "",
            )
            self.data.pop("teacher")
        cluster = self.text("launch.address") or "auto"
        if self.text("launch.launcher") in CLUSTERS and cluster not in self.settings.allow_clusters:
            violation = "is a cluster on which runs of this service have no workers"
            fix = f"take launch.launcher out, or {ASK.format('--allow-cluster')}"
            self.refuse("launch.address", cluster, violation, fix, "auto")
            override(self.data, "launch.launcher", "process")
        address = self.value("pipeline.serve") or LOOPBACK
        remote: tuple[str, str | int] = ("launch.remote_rollouts", 0)
        is_on_cluster = self.text("launch.launcher") in CLUSTERS
        if is_on_cluster:
            remote = ("launch.launcher", "process")
        if self.value(remote[0]):
            key, plain = remote
            derived = is_on_cluster or address in (LOOPBACK, AUTO)
            reason = option = ""
            if not self.settings.index:
                reason = "needs an index that other machines reach; this service's is its own"
                option = "--index redis://…"
            # It may be any address of this machine.
            if derived and not self._may_listen("0.0.0.0"):  # noqa: S104  (a question, nothing listens)
                reason = "has the run listen for other machines, which a request may not"
                option = "--allow-listen 0.0.0.0"
            if reason:
                self.refuse(
                    key, self.value(key), reason, f"leave it out, or {ASK.format(option)}", plain
                )
            return
        at_loopback = self.value("sync.transport") == "network" and address in (LOOPBACK, AUTO)
        if at_loopback and not self._may_listen(LOOPBACK):
            self.refuse(
                "sync.transport", "network", port, f"take it out, or {ask}", "shared_memory"
            )

    def _may_listen(self, address: Any) -> bool:
        return isinstance(address, str) and address in self.settings.allow_listen

    def resolve_paths(self) -> None:
        """Replace each path by its real path; one outside of the roots is refused, whether or not
        anything is there."""
        settings = self.settings
        refused_keys = {problem.key for problem in self.problems}
        paths = dict(zip(self._of_sources("path"), self._of_sources("source"), strict=True))
        keys = list[str]()
        for key, _ in marked(Recipe, self.data, IsPath):
            value = self.value(key)
            if key in paths and self.value(paths[key]) not in ("jsonl", "parquet", "datasets"):
                continue
            keys += (
                [f"{key}.{index}" for index in range(len(value))]
                if isinstance(value, list)
                else [key]
            )
        # Values that are no paths.
        plain = {
            **dict.fromkeys(MODEL_KEYS, KNOWN_MODELS),
            **dict.fromkeys(paths, settings.allow_datasets),
        }
        for key in keys:
            value = self.value(key)
            if (
                key in refused_keys
                or not isinstance(value, str)
                or not value
                or value in plain.get(key, ())
                or value == self.models.get(key)
            ):
                continue
            if key == "prompts.chat_template" and is_template_name(value):
                continue
            if real := below_root(settings.roots, value):
                if out := leads_out(settings.roots, real, settings.data):
                    fix = "give a folder with files of its own, and no links to other places"
                    self.refuse(
                        key, value, f"holds what this server does not read: {out}", fix, "refused"
                    )
                else:
                    override(self.data, key, str(real))
                continue
            roots = ", ".join(map(str, settings.roots))
            fix = (
                (f"give a path below {roots}")
                if roots
                else f"{ASK.format('--root')}; without one no file is read"
            )
            if key in MODEL_KEYS:
                fix = f"{suggest(value, KNOWN_MODELS)}; or {fix}"
            self.refuse(key, value, "lies outside of what this server reads", fix, "refused")


def _names_by_key(key: str, value: object) -> dict[str, str]:
    """Return the names in the ``value`` of ``key``, one or a table of several, by their keys."""
    names = (
        {f"{key}.{name}": each for name, each in value.items()}
        if isinstance(value, Mapping)
        else {key: value}
    )
    return {place: name for place, name in names.items() if isinstance(name, str)}


def _only_names_columns(template: str) -> bool:
    """Return whether ``str.format`` would insert columns as they are: no attributes, items,
    conversions or widths."""
    try:
        fields = [
            (name, spec, conversion)
            for _, name, spec, conversion in string.Formatter().parse(template)
        ]
    except ValueError:
        return False
    return all(
        name is None or (name.isidentifier() and not spec and not conversion)
        for name, spec, conversion in fields
    )


def _beyond_limits(settings: Settings, recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of a valid recipe that needs more than the operator gives to one run."""
    workers = recipe.rollout.workers + recipe.reward.workers + recipe.train.ranks
    workers += recipe.critic.ranks if recipe.trains_critic else 0
    workers += sum(stage.workers for stage in recipe.stages)
    workers += recipe.environment.processes if recipe.has_environment else 0
    if workers > settings.max_workers:
        violation = (
            f"makes {workers} workers with those of reward, stages and environments, and dp and tp "
            f"of train and critic"
        )
        yield Problem(
            "rollout.workers",
            recipe.rollout.workers,
            violation,
            f"at most {settings.max_workers} fit here",
        )
    if recipe.pipeline.arena > settings.max_arena:
        fix = f"use at most {format_size(settings.max_arena)}"
        yield Problem(
            "pipeline.arena", recipe.pipeline.arena, "is more than this server gives to a run", fix
        )
