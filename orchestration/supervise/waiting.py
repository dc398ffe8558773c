"""The chain of waiting of a run at one moment: who waits for whom, for how long, and which bound
ends it.

    training ─▶ the oldest group that it does not have ─▶ the stage that must process it ─▶ the worker that holds it
                                                                                          └▶ its last sign of life
It is read from the index alone, so it can be asked from any machine, also about a run whose processes hang.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, computed_field
from pydantic.dataclasses import dataclass

from orchestration.recipe.schema import Recipe
from orchestration.state.documents import RUN_RECIPE
from pipeline.data.events import ENDED, by_count
from stages.weights.documents import ENGINES, LAST_TAKEN

if TYPE_CHECKING:
    from pipeline.index.client import Index, Missing, RunStatus, SignOfLife

SILENT_BEATS = 4  # signs of life that a worker misses until it is shown as silent


@dataclass(frozen=True)
class Wait:
    """One link of a chain of waiting: `who` waits for `on`; the next link is about that."""

    who: str
    on: str
    seconds: Annotated[
        float | None, Field(description="Since when; null where that is not known.")
    ] = None
    why: Annotated[str, Field(description="What is known of the cause.")] = ""
    bound: Annotated[str, Field(description="The recipe's key that ends it, and when.")] = ""
    process: Annotated[
        str, Field(description="Of a worker: its name in the index; else empty.")
    ] = ""

    @computed_field(description="All of it as a sentence.")  # type: ignore[prop-decorator]
    @property
    def text(self) -> str:
        since = "" if self.seconds is None else f" for {self.seconds:.1f} s"
        return "; ".join(
            filter(None, (f"{self.who} waits{since} for {self.on}", self.why, self.bound))
        )


async def waiting_chain(index: Index) -> list[Wait]:
    """Return the chain of the run in ``index``; empty for one that has ended.

    Raises LookupError for an unknown run.
    """
    state, reason, _ = await index.state()
    recipe = await RUN_RECIPE.get(index)
    if not state or recipe is None:
        raise LookupError(f"run: {index.run!r} is not in this index; give the id of a run that is")
    if state in ENDED:
        return []
    missing = await index.waiting()
    alive = await index.alive()
    status = await index.status()
    chain = _Chain(recipe, missing, alive)
    since = seconds(missing.state_age)
    published = seconds(missing.version_age)
    if state == "paused":
        return [Wait("the run", "`resume`", since, reason)]
    beginning = state in ("created", "starting")
    if beginning and (unready := [name for name, sign in alive.items() if not sign.ready]):
        bound = f"launch.startup_timeout = {recipe.launch.startup_timeout:g} s"
        links = [
            Wait("the run", f"{shown(name)} to be ready", since, bound=bound)
            for name in unready[:1]
        ]
        return [*links, chain.worker(unready[0])]
    if status.trained >= recipe.train.steps:
        for worker in await ENGINES.get(index) or []:
            taken = await LAST_TAKEN.get(index, worker=worker)
            if taken != recipe.train.steps:
                has = f"it has version {taken or 'none'} of {recipe.train.steps}"
                return [
                    Wait(
                        "the end of the run", f"{worker} to take the last version", published, has
                    ),
                    *chain.of(worker),
                ]
        return [
            Wait("the end of the run", "its workers to end", published, "all steps are trained"),
            *chain.stages(missing.trainer),
        ]
    first, *others = await _of_step(index, missing, status, recipe, chain)
    return [
        replace(first, why="; ".join(filter(None, (first.why, await _dropped(index, status))))),
        *others,
    ]


async def _of_step(
    index: Index, found: Missing, status: RunStatus, recipe: Recipe, chain: _Chain
) -> list[Wait]:
    """Return what the next step waits for."""
    step = f"step {status.trained + 1}"
    published = seconds(found.version_age)
    if (
        found.group is None
        and status.admitted - status.filtered < (status.trained + 1) * recipe.train.groups_per_step
    ):
        return [
            Wait(step, "the gate to admit groups", published),
            *await _gate(index, found, recipe, chain),
        ]
    if found.group is None or found.stage == found.trainer:
        return [Wait(step, "training", published), *chain.holders(found.trainer)]
    if not found.stage:
        return [
            Wait(step, f"group {found.group} to be admitted", published),
            *await _gate(index, found, recipe, chain),
        ]
    what = f"group {found.group} at stage {found.stage}"
    rows = f"{found.rows} of {recipe.algorithm.group_size} samples are missing" + (
        f", {found.parked} of them parked" if found.parked else ""
    )
    return [Wait(step, what, published, rows), *chain.holders(found.stage)]


async def _dropped(index: Index, status: RunStatus) -> str:
    """Return the groups that left untrained since the last step, and why groups have; "" where none
    did."""
    if not (since := status.filtered - status.dropped_before):
        return ""
    reasons = by_count((await index.ledger_event()).dropped)
    counts = ", ".join(f"{groups:,} {reason!r}" for reason, groups in reasons)
    return (
        f"{since:,} groups were dropped since the last step (in all: {counts}); "
        f"algorithm.max_dropped bounds them"
    )


async def _gate(index: Index, found: Missing, recipe: Recipe, chain: _Chain) -> list[Wait]:
    """Return why no group is admitted."""
    for name, house in sorted(((await index.stats())["warehouses"] or {}).items()):
        if house["used"] > 0.9 * house["capacity"]:
            full = (
                f"{house['used']:,} of {house['capacity']:,} bytes are used; a checkpoint "
                f"releases samples"
            )
            return [
                Wait("the gate", f"room in warehouse {name!r}", why=full),
                *chain.stages(found.trainer),
            ]
    if recipe.prompts.source == "external":
        return [Wait("the gate", "prompts of another program")]
    return chain.of("flow-0")


class _Chain:
    def __init__(self, recipe: Recipe, found: Missing, alive: dict[str, SignOfLife]) -> None:
        self._launch = recipe.launch
        self._external = recipe.external.stages
        self._found = found
        self._alive = alive

    def holders(self, stage: str) -> list[Wait]:
        """Return who holds the missing rows of ``stage``; where nobody does, who could claim
        them."""
        if not (
            held := sorted(
                self._found.holders, key=lambda holder: self._quiet(holder[0]), reverse=True
            )
        ):
            return self.stages(stage)
        name, since = held[0]
        return [
            Wait(
                f"stage {stage}",
                f"{shown(name)}, which holds them",
                (self._found.now - since) / 1000,
            ),
            self.worker(name),
        ]

    def stages(self, stage: str) -> list[Wait]:
        """Return the workers that have ``stage``, those without a sign of life first."""
        names = sorted(
            (n for n, sign in self._alive.items() if stage in sign.stages),
            key=self._quiet,
            reverse=True,
        )
        if not names and stage == "rollout" and self._launch.remote_rollouts:
            bound = f"launch.startup_timeout = {self._launch.startup_timeout:g} s"
            return [
                Wait(
                    f"stage {stage}",
                    "a host to start its workers",
                    why="start one with `asyncdock host`",
                    bound=bound,
                )
            ]
        if not names:
            who = (
                ("another program")
                if stage in self._external
                else "a worker of it, and none is alive"
            )
            return [Wait(f"stage {stage}", who)]
        return [Wait(f"stage {stage}", f"{shown(names[0])} to claim"), self.worker(names[0])]

    def of(self, worker: str) -> list[Wait]:
        """Return the living process of ``worker``, as KIND-NUMBER."""
        names = [name for name in self._alive if shown(name) == worker]
        return (
            [self.worker(names[-1])]
            if names
            else [Wait(worker, "a host or the launcher to start it")]
        )

    def worker(self, name: str) -> Wait:
        """Return what a worker's process waits for: the last link."""
        launch = self._launch
        sign = self._alive.get(name)
        quiet = self._quiet(name)
        on = "its own work"
        seconds = None
        why = f"alive {quiet:.1f} s ago"
        bound = (
            f"launch.stall_timeout = {launch.stall_timeout:g} s without progress of the run ends it"
        )
        if sign is None:
            on = "its first sign of life"
            why = ""
            bound = f"launch.startup_timeout = {launch.startup_timeout:g} s"
        elif quiet > SILENT_BEATS * launch.beat_seconds:
            on = "a sign of life"
            seconds = quiet
            why = "its process hangs or is stopped, or its machine is away"
            remaining = max(0.0, launch.hang_timeout - quiet)
            bound = f"launch.hang_timeout = {launch.hang_timeout:g} s ends it in {remaining:.1f} s"
        elif sign.version is not None:
            why += f", with version {sign.version}"
        return Wait(shown(name), on, seconds, why, bound, name)

    def _quiet(self, name: str) -> float:
        """Return the seconds since the last sign of life."""
        sign = self._alive.get(name)
        return (self._found.now - sign.at) / 1000 if sign is not None else float("inf")


def seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def shown(name: str) -> str:
    """Return KIND-NUMBER of a worker's name (:func:`pipeline.index.client.worker_name`)."""
    return name.rsplit("-", 2)[0]
