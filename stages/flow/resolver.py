"""Resolves a flow backwards, like a build: from the columns that training reads to the stages that
make them.

update needs advantage ▶ made by advantage, which needs reward ▶ made by reward, which needs response_ids ▶ … ▶ source
what is wrong (a column that no stage makes, or two; a type; a cycle; a stage that nothing reads) ▶ FlowError, all at once
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from pipeline.problems import Problem
from stages.flow.catalogue import MASK, SOURCE, UPDATE, Truncated, credit_stage, update_stage
from stages.flow.declarations import (
    IN_TRAINING,
    AlgorithmDeclaration,
    Columns,
    FlowError,
    StageDeclaration,
    column,
    same_type,
)

if TYPE_CHECKING:
    from pipeline.data.columns import Schema
    from pipeline.index.client import RunConfig
    from pipeline.schedule.staleness import StalenessPlan

# that the index has bits for
MOST_STAGES = 16
MOST_COLUMNS = 31


@dataclass(frozen=True)
class Edge:
    """The columns that one stage makes and another one needs.

    ``direct``: no other way leads from the one to the other.
    """

    maker: str
    reader: str
    columns: tuple[str, ...]
    direct: bool


@dataclass(frozen=True)
class Flow:
    """The stages of a run in an order in which each comes after those that it reads from; the first
    is the source."""

    stages: tuple[StageDeclaration, ...]

    def __contains__(self, name: str) -> bool:
        return any(stage.name == name for stage in self.stages)

    def __getitem__(self, name: str) -> StageDeclaration:
        return next(stage for stage in self.stages if stage.name == name)

    @cached_property
    def columns(self) -> Columns:
        """Every column of a sample with its type, in the order in which they are made."""
        return {name: kind for stage in self.stages for name, kind in stage.makes.items()}

    @cached_property
    def schema(self) -> Schema:
        """The columns as the warehouses store them."""
        from pipeline.data.columns import Schema

        return Schema([column(name, kind) for name, kind in self.columns.items()])

    def config(
        self, plan: StalenessPlan, max_dropped: int = -1, replay_versions: int = 0
    ) -> RunConfig:
        """Return what the index needs to know of the stages and of the staleness bound. For each
        group that a step trains ``max_dropped`` may leave untrained; -1: any number."""
        from pipeline.index.client import RunConfig, StageSpec

        mask = self.schema.mask
        return RunConfig(
            stages=tuple(
                StageSpec(
                    stage.name,
                    stage.takes,
                    mask(stage.needs),
                    mask(stage.makes),
                    takes_turns_with=stage.takes_turns_with,
                )
                for stage in self.stages[1:]
            ),
            groups_per_step=plan.groups_per_step,
            slack=plan.slack,
            window=plan.window,
            staleness=plan.bound,
            max_dropped=max_dropped,
            replay_versions=replay_versions,
        )

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        maker = {name: stage.name for stage in self.stages for name in stage.makes}
        between: dict[tuple[str, str], list[str]] = {}
        for stage in self.stages:
            for name in stage.needs:
                between.setdefault((maker[name], stage.name), []).append(name)
        after: dict[str, set[str]] = {}  # all stages behind a stage, over at least one edge
        for stage in reversed(self.stages):
            readers = {reader for made_by, reader in between if made_by == stage.name}
            after[stage.name] = readers.union(*(after[reader] for reader in readers))
        ways = {
            pair: any(pair[1] in after[r] for a, r in between if a == pair[0] and r != pair[1])
            for pair in between
        }
        return tuple(Edge(a, b, tuple(names), not ways[a, b]) for (a, b), names in between.items())


def resolve(
    algorithm: AlgorithmDeclaration,
    catalogue: Sequence[StageDeclaration],
    truncated: Truncated = "train",
    drops: Columns | None = None,
) -> Flow:
    """Return the flow of ``algorithm`` over ``catalogue``: every stage on the way to what its loss
    reads, and no other. A stage that makes nothing (it can only drop groups) is on the way too:
    training waits for it. ``drops``: columns by which the credit stage drops groups. Raises
    FlowError."""
    masked = any(MASK in stage.makes for stage in catalogue)
    credit = credit_stage(algorithm, truncated, drops, masked=masked)
    update = update_stage(algorithm)
    if credit:
        before = _made_before(credit, catalogue)
        optional = {name: kind for name, kind in credit.optional.items() if name in before}
        credit = replace(credit, needs={**credit.needs, **optional})
    partners = [stage for stage in catalogue if stage.takes_turns_with]
    stages = [*catalogue, *([credit] if credit else [])]
    stages = [stage for stage in stages if stage not in partners]
    waits = {passed_column(stage.name): "bool" for stage in stages if not stage.makes}
    stages = [
        stage if stage.makes else replace(stage, makes={passed_column(stage.name): "bool"})
        for stage in stages
    ]
    columns = {name for stage in stages for name in stage.makes}
    optional = {name: kind for name, kind in update.optional.items() if name in columns}
    update = replace(update, needs={**update.needs, **optional, **waits})
    problems = [*_twice_named([*stages, update]), *_scores(algorithm, stages)]
    needed_names = _backwards(update, stages, problems)
    order = _in_order([stage for stage in stages if stage.name in needed_names], update, problems)
    problems += _twice_made(order)
    for partner in partners:
        places = [at for at, stage in enumerate(order) if stage.name == partner.takes_turns_with]
        for place in places:
            order.insert(place + 1, partner)
    for stage in stages:
        if stage.place and stage.name not in needed_names:
            names = " and ".join(map(repr, stage.makes))
            fix = (
                "let a reward function, another stage or the algorithm read it, or take the "
                "stage out"
            )
            problems.append(
                Problem(stage.place, stage.name, f"makes {names}, which nothing reads", fix)
            )
    flow = Flow(tuple(order))
    for what, count, most in (
        ("stages", len(order) - 1, MOST_STAGES),
        ("columns", len(flow.columns), MOST_COLUMNS),
    ):
        if count > most:
            problems.append(
                Problem(
                    "stages", None, f"make {count} {what} in all, at most {most} fit", "join some"
                )
            )
    if problems:
        raise FlowError(*problems)
    return flow


def passed_column(stage: str) -> str:
    """Return the column that a stage which declares none writes of each sample that it lets
    pass."""
    return f"passed_{stage}"


def _makers(stages: Iterable[StageDeclaration]) -> Mapping[str, list[StageDeclaration]]:
    makers: dict[str, list[StageDeclaration]] = {}
    for stage in stages:
        for name in stage.makes:
            makers.setdefault(name, []).append(stage)
    return makers


def _backwards(
    update: StageDeclaration, stages: Sequence[StageDeclaration], problems: list[Problem]
) -> set[str]:
    """Return the names of the stages on the way to ``update``; what is wrong goes to
    ``problems``."""
    makers = _makers(stages)
    waiting = [update]
    needed_names = {SOURCE}
    while waiting:
        reader = waiting.pop()
        for name, kind in reader.needs.items():
            made_by = makers.get(name, [])
            if len(made_by) != 1:
                problems.append(
                    _unmade(name, reader, makers)
                    if not made_by
                    else _many(name, reader.name, made_by)
                )
            for maker in made_by[:1]:
                if not same_type(kind, maker.makes[name]):
                    reason = (
                        f"needs {name!r} as {kind}, but stage {maker.name!r} makes it as "
                        f"{maker.makes[name]}"
                    )
                    problems.append(
                        Problem(_key(reader), reader.name, reason, "declare the same type in both")
                    )
                if maker.name not in needed_names:
                    needed_names.add(maker.name)
                    waiting.append(maker)
    return needed_names


def _key(stage: StageDeclaration) -> str:
    return stage.place or {"reward": "reward.functions"}.get(stage.name, "algorithm.name")


def _unmade(
    name: str, reader: StageDeclaration, makers: Mapping[str, list[StageDeclaration]]
) -> Problem:
    reason = f"needs the column {name!r}, which no stage makes"
    close = difflib.get_close_matches(name, makers, n=1)
    fix = f"did you mean {close[0]!r}, of stage {makers[close[0]][0].name!r}" if close else ""
    other = f"add a [[stages]] entry with a class that makes {name!r}, or prompts that bring it"
    return Problem(_key(reader), reader.name, reason, f"{fix}? Or {other}" if fix else other)


def _many(name: str, reader: str, made_by: Sequence[StageDeclaration]) -> Problem:
    makers = " and ".join(repr(stage.name) for stage in made_by)
    key = next((stage.place for stage in made_by if stage.place), "stages")
    reason = (
        f"the column {name!r}, which {reader!r} needs, is made by more than one stage: {makers}"
    )
    return Problem(key, None, reason, "rename the column of one of them, or take one out")


def _made_before(stage: StageDeclaration, others: Iterable[StageDeclaration]) -> set[str]:
    """Return the columns of ``others`` that do not depend on what ``stage`` makes."""
    others = list(others)
    after = set(stage.makes)
    while later := [
        name
        for other in others
        if after & {*other.needs}
        for name in other.makes
        if name not in after
    ]:
        after.update(later)
    return {name for other in others for name in other.makes} - after


def _twice_named(stages: Sequence[StageDeclaration]) -> list[Problem]:
    names = [stage.name for stage in stages]
    fix = "give its class another `name`"
    return [
        Problem(stage.place or "stages", stage.name, "is the name of another stage too", fix)
        for at, stage in enumerate(stages)
        if stage.name in names[:at] or (stage.place and stage.name == UPDATE)
    ]


def _twice_made(order: Sequence[StageDeclaration]) -> list[Problem]:
    """Return a problem for each column that no stage reads, but two on the way make."""
    needed = {name for stage in order for name in stage.needs}
    makers = _makers(order)
    return [
        _many(n, "the warehouse", by) for n, by in makers.items() if len(by) > 1 and n not in needed
    ]


def _scores(
    algorithm: AlgorithmDeclaration, stages: Sequence[StageDeclaration]
) -> Iterable[Problem]:
    """Yield a problem for each column that is not computed by what the algorithm wants."""
    makers = _makers(stages)
    for name, by in algorithm.scores.items():
        reads = name in algorithm.loss_reads or (
            by not in IN_TRAINING and name in algorithm.credit_reads
        )
        if not reads:
            where = "loss_reads" if by in IN_TRAINING else "credit_reads or loss_reads"
            yield Problem(
                "algorithm.name",
                None,
                f"scores has {name!r}, which is not read",
                f"add it to {where}",
            )
        if by in IN_TRAINING and name in makers:
            reason = (
                f"has {name!r} computed by the policy in training, but stage "
                f"{makers[name][0].name!r} makes it"
            )
            yield Problem("algorithm.name", None, reason, "rename one of the two")
        for maker in () if by in IN_TRAINING else makers.get(name, [])[:1]:
            if maker.runs_on != by:
                reason = (
                    f"wants {name!r} from a {by}, but stage {maker.name!r}, which makes it, "
                    f"runs on {maker.runs_on}"
                )
                yield Problem("algorithm.name", None, reason, f"name a stage with runs_on = {by!r}")


def _in_order(
    stages: Sequence[StageDeclaration], update: StageDeclaration, problems: list[Problem]
) -> list[StageDeclaration]:
    """Return ``stages`` so that each comes after those that it reads from, otherwise as they are;
    ``update`` is the last."""
    order: list[StageDeclaration] = []
    waiting = list(stages)
    available = set[str]()
    known = {name for stage in stages for name in stage.makes}
    while waiting:
        ready = next(
            (stage for stage in waiting if not (stage.needs.keys() & known) - available), None
        )
        if ready is None:
            names = " and ".join(repr(stage.name) for stage in waiting)
            key = next((stage.place for stage in waiting if stage.place), "stages")
            reason = f"the stages {names} wait for columns of one another"
            problems.append(
                Problem(key, None, reason, "let one of them need a column that is made before")
            )
            return [*order, *waiting, update]
        waiting.remove(ready)
        order.append(ready)
        available |= set(ready.makes)
    return [*order, update]
