"""Costs measured in a finished or running run: from its events, and the lengths from its samples.

    steps ──▶ seconds a token trained, seconds between steps        rollout workers ──▶ tokens/s of a response
    swaps ──▶ seconds in which nothing decodes, and beside it       samples ──▶ lengths, by group
    starts ──▶ seconds until a replica decodes again                ledgers ──▶ share of groups dropped
    a profile of the engine alone, where the folder has one ──▶ tokens/s by rows, seconds of a prefill
    a run with smaller steps, where the folder has one ──▶ seconds of a step and of a swap that no token or response explains

The rate of generation is fitted: where the trainer has waited for samples, the simulated run is as
fast with it as the measured one; elsewhere its rollout workers are busy for the same share of the
time. Where engines share the cores of this machine, so are the threads of everything else: training
waits for a core as long as it did.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any

from orchestration.history.events_file import METRICS, read_metrics
from orchestration.history.kept import of_one
from orchestration.history.worker_clock import WorkerClock
from orchestration.recipe.devices import SIDES, cores_here, on_this_node, wanted_devices
from orchestration.recipe.loading.load import compare_recipe, recorded_recipe
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.recipe.worker_kinds import remote_workers, workers_of
from orchestration.simulation.costs import ASSUMED, Costs, DrawnLengths, EngineProfile
from orchestration.simulation.forecast import forecast, margin_of, setup_of
from orchestration.state.paths import RECIPE
from pipeline.data.events import Event
from pipeline.problems import Problem, ProblemError
from stages.samples.reading import newest
from stages.samples.sample_log import FOLDER

FEWEST_STEPS = 4
LAST_BYTES = 64 << 20  # of the file of events
SAMPLES = 4096  # the newest, whose lengths count
# share of the time that the trainer has waited for samples: from here on generation limits the run
WAITED = 0.05
SMALLER = "smaller"  # folder of a run with fewer groups in a step, in that of a profile
# share of the time that rollout workers are busy, or idle, below which it says nothing of their
# rate
LEAST_BUSY = 0.02
FITTED_SAMPLES = 200_000  # that are simulated for a fit, about
# the rate of generation is looked for within this factor, by so many halvings
WITHIN = 8.0
HALVINGS = 12
ROUNDS = 4  # fits of generation, then of other threads, where they share cores


class NotMeasured(ProblemError, ValueError):
    """The run's folder lacks what costs are measured from."""

    def __init__(self, run: Path | str, wrong: str, fix: str) -> None:
        super().__init__(Problem(f"{run}", None, wrong, fix))


def recorded_costs(folder: Path) -> tuple[Costs, DrawnLengths]:
    """Costs and lengths of the run in ``folder``, by its newest events. Raises NotMeasured."""
    return measured_costs(read_metrics(folder / METRICS, LAST_BYTES, detail=True), folder)


def recipe_of(folder: Path) -> Recipe:
    """The recipe of the run in ``folder``. Raises NotMeasured."""
    try:
        return recorded_recipe(folder / RECIPE)
    except FileNotFoundError:
        raise NotMeasured(folder, f"holds no {RECIPE}", "give the folder of a run") from None


def measured_costs(
    stream: Iterable[Event], folder: Path, recipe: Recipe | None = None
) -> tuple[Costs, DrawnLengths]:
    """As :func:`recorded_costs`, from events of the run, all or those of some steps in a row.

    ``recipe``: with what the run has changed of it since it began.
    """
    run = _Measured.of(stream, folder, recipe or recipe_of(folder))
    profile = EngineProfile.read(folder)
    runs = [run]
    of_smaller = folder / SMALLER
    if profile is not None and of_smaller.exists():
        runs.append(
            _Measured.of(
                read_metrics(of_smaller / METRICS, LAST_BYTES, detail=True),
                of_smaller,
                recipe_of(of_smaller),
            )
        )
    # of each row
    prompted = profile.prompt_tokens / run.recipe.algorithm.group_size if profile else 0.0
    cores = _cores(run.recipe)
    settled = [step for each in runs for step in each.settled]
    fed = [_tokens(step) + prompted * step.data["rows"] for step in settled]
    by_token, by_step = _line(fed, [_training(step, alone=cores > 0) for step in settled])
    measured = run.events
    swaps = [
        of_one(swap)
        for swap in measured["sync"]
        if swap["worker"].startswith("rollout-") and swap.get("exposed_seconds")
    ]
    reference = [
        report
        for report in measured["stage"]
        if report["stage"] == "reference" and report["tokens"] and report.get("busy")
    ]
    costs = Costs(
        row_rate=run.row_rate,
        saturation_rows=run.saturation_rows,
        prefill_rate=float("inf"),  # the time of prompts is in the rates
        step_seconds=by_step,
        token_seconds=by_token,
        swap_seconds=median(swap["exposed_seconds"] for swap in swaps) if swaps else 0.0,
        copy_seconds=median(swap.get("hidden_seconds") or 0.0 for swap in swaps) if swaps else 0.0,
        reference_token_seconds=reference[-1]["busy"] / reference[-1]["tokens"]
        if reference
        else 0.0,
        between_steps=run.between,
        dropped=_dropped(measured["ledger"]),
        cores=cores,
        sources=dict.fromkeys(Costs.__dataclass_fields__, f"measured in {folder.name}"),
    )
    if run.starts:
        costs = replace(costs, restart_seconds=median(run.starts))
    else:
        costs = replace(costs, sources={**costs.sources, **ASSUMED})
    if profile is not None:
        costs = replace(
            costs,
            row_rate=1 / profile.token_seconds,
            saturation_rows=inf,
            row_seconds=profile.row_seconds,
            prefill_seconds=profile.prefill_seconds,
            prefill_token_seconds=profile.prefill_token_seconds,
            prompt_tokens=profile.prompt_tokens,
        )
    of_samples = _lengths(folder / FOLDER, run.steps[0].data["step"])
    mean_lengths = [[round(step.data["response_length_mean"])] for step in run.steps]
    lengths = DrawnLengths(
        run.recipe.algorithm.group_size,
        run.recipe.rollout.max_tokens,
        of_samples or mean_lengths,
        seed=run.recipe.seed,
    )
    fits = [_fitted(costs, lengths, each) for each in runs]
    return (_divided(fits, runs) if len(fits) > 1 else fits[0]), lengths


@dataclass
class _Measured:
    """What the events of a run say.

    ``settled``: steps without those in which the pipeline fills and drains; the first one has one
    before it. ``between``: seconds. ``row_rate``, ``saturation_rows``: as in :class:`Costs`.
    ``busy``: share of the time, of its rollout workers; None where the trainer has waited for
    samples. ``starts``: seconds until a replica that was started decodes.
    """

    recipe: Recipe
    steps: list[Event]
    settled: list[Event]
    events: Mapping[str, list[Mapping[str, Any]]]
    between: float
    row_rate: float
    saturation_rows: float
    busy: float | None
    starts: list[float]

    @classmethod
    def of(cls, stream: Iterable[Event], folder: Path, recipe: Recipe) -> _Measured:
        """Raises NotMeasured."""
        events = defaultdict[str, list[Mapping[str, Any]]](list)
        steps = list[Event]()
        trainer = list[tuple[float, ...]]()
        trainer_clock = WorkerClock(("wall", "waiting_input"))
        begun = dict[str, float]()
        starts = list[float]()
        for event in stream:
            events[event.kind].append(event.data)
            if event.kind == "step" and event.data.get("train_seconds"):
                steps.append(event)
            elif event.kind == "stage" and event.data["stage"] == "update":
                trained = sum(step.data["train_seconds"] for step in steps)
                trainer_clock.add(event.data)
                trainer.append((*trainer_clock.totals.values(), trained, len(steps)))
            elif event.kind == "worker" and event.data["stage"] == "rollout":
                if event.data["change"] in ("started", "died"):
                    begun.setdefault(event.data["worker"], event.time)
                elif event.data["change"] == "ready" and event.data["worker"] in begun:
                    starts.append(event.time - begun.pop(event.data["worker"]))
        if len(steps) < FEWEST_STEPS:
            too_few = f"{len(steps)} optimizer steps are too few to measure"
            raise NotMeasured(folder, too_few, f"let it make {FEWEST_STEPS}")
        margin, (between, waited) = margin_of(len(steps)), _between(trainer)
        settled = steps[max(1, margin) : len(steps) - margin + 1]
        row_rate, rows, busy = _decoding(events["stage"], recipe.rollout.max_rows)
        return cls(
            recipe,
            steps,
            settled,
            events,
            between,
            row_rate,
            rows,
            None if waited > WAITED else busy,
            starts,
        )

    @property
    def seconds(self) -> float:
        """Of the settled steps."""
        return self.settled[-1].time - self.steps[self.steps.index(self.settled[0]) - 1].time


def with_smaller_steps(recipe: Recipe) -> Recipe | None:
    """``recipe`` with half as many groups in a step, for the run in :data:`SMALLER`; None where
    that is no valid recipe."""
    try:
        return compare_recipe(
            recipe, [f"train.groups_per_step={recipe.train.groups_per_step // 2}"]
        )
    except RecipeError:
        return None


def _tokens(step: Event) -> float:
    return float(step.data["rows"] * step.data["response_length_mean"])


def _training(step: Event, *, alone: bool) -> float:
    """Seconds; ``alone``: that the step would take if its thread waited for no core."""
    return float(step.data["train_seconds"] * ((alone and step.data.get("train_cpu_share")) or 1))


def _cores(recipe: Recipe) -> int:
    """CPU cores of this machine, where one rank and all replicas of ``recipe`` compute on them; 0
    elsewhere."""
    kinds = on_this_node()
    devices = [
        wanted_devices(recipe, worker, kinds) for worker in workers_of(recipe) if worker[0] in SIDES
    ]
    alone = not recipe.launch.on_cluster and not remote_workers(recipe) and recipe.train.ranks == 1
    return cores_here() if alone and all(each and each[0] == "cpu" for each in devices) else 0


def _dropped(ledgers: list[Mapping[str, Any]]) -> float:
    """Share of the samples that were dropped, among those that left."""
    if not ledgers:
        return 0.0
    first = ledgers[0] if len(ledgers) > 1 else {}
    trained, dropped = (ledgers[-1][name] - first.get(name, 0) for name in ("trained", "filtered"))
    return dropped / (trained + dropped) if dropped else 0.0


def _lengths(folder: Path, oldest_step: int) -> list[list[int]]:
    """Tokens of the newest samples below ``folder``, by group, of ``oldest_step`` and later
    ones."""
    by_group = defaultdict[tuple[int, int], list[int]](list)
    for sample in islice(newest(folder), SAMPLES):
        if sample["step"] < oldest_step:
            break
        by_group[sample["step"], sample["group"]].append(sample["tokens"])
    return list(by_group.values())


def _fitted(costs: Costs, lengths: DrawnLengths, run: _Measured) -> Costs:
    """``costs`` with the rate of generation with which the simulated run is as the measured one: in
    the share of time in which rollout workers are busy; where the trainer has waited, in tokens/s.
    Where engines share cores, with as many other threads as make its training as slow."""
    busy = run.busy
    if busy is not None and not LEAST_BUSY < busy < 1 - LEAST_BUSY:
        return costs  # any rate would do
    rows = run.recipe.rows_per_step
    simulated = max(6, min(16, FITTED_SAMPLES // (HALVINGS * rows)))
    setup = setup_of(run.recipe, steps=simulated)
    wanted = sum(map(_tokens, run.settled)) / run.seconds
    trained, trained_alone = (
        fmean(_training(step, alone=alone) for step in run.settled) for alone in (False, True)
    )
    row_rate = costs.row_rate
    most = 2 * setup.replicas * run.seconds / len(run.settled) / rows

    def generating(costs: Costs, speed: float) -> Costs:
        """``speed``: from 0 to 1."""
        # decoding was measured alone: unknown is what a response takes beside it
        if costs.saturation_rows == inf:
            return replace(costs, response_seconds=(1 - speed) * most)
        return replace(costs, row_rate=row_rate * WITHIN ** (2 * speed - 1))

    for _ in range(ROUNDS if costs.cores else 1):
        slow = 0.0
        fast = 1.0
        for _ in range(HALVINGS):
            middle = (slow + fast) / 2
            simulated_run = forecast(setup, generating(costs, middle), lengths)
            too_slow = simulated_run.tokens_per_second < wanted
            if too_slow if busy is None else simulated_run.decoding > busy:
                slow = middle
            else:
                fast = middle
        costs = generating(costs, (slow + fast) / 2)
        if costs.cores:
            fitted = forecast(setup, costs, lengths)
            slower = (trained - fitted.training * fitted.step_seconds) / trained_alone
            costs = replace(
                costs, other_threads=max(0.0, costs.other_threads + costs.cores * slower)
            )
    return costs


def _divided(fits: Sequence[Costs], runs: Sequence[_Measured]) -> Costs:
    """The costs of the first of two fits, with the time that a step's responses take beside
    decoding divided into one of each response and one of each swap, which a smaller step has as
    well."""
    (more, fewer), (costs, smaller) = (run.recipe.rows_per_step for run in runs), fits
    taken = costs.response_seconds * more
    taken_smaller = smaller.response_seconds * fewer
    of_response = min(max(0.0, (taken - taken_smaller) / (more - fewer)), costs.response_seconds)
    of_swap = (taken - of_response * more) / runs[0].recipe.replicas
    return replace(costs, response_seconds=of_response, swap_seconds=costs.swap_seconds + of_swap)


def _line(x: list[float], y: list[float]) -> tuple[float, float]:
    """Slope and offset of y over x, neither below 0.

    Where x hardly varies, or does not explain y, all is slope.
    """
    x_mean = fmean(x)
    y_mean = fmean(y)
    x_spread = sum((value - x_mean) ** 2 for value in x)
    y_spread = sum((value - y_mean) ** 2 for value in y)
    together = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True))
    slope = together / x_spread if x_spread else 0.0
    explained = slope**2 * x_spread / (y_spread or 1.0)
    if explained < 0.5 or not 0 < slope * x_mean < y_mean:
        return y_mean / x_mean, 0.0
    return slope, y_mean - slope * x_mean


def _between(trainer: list[tuple[float, ...]]) -> tuple[float, float]:
    """Seconds a step that the trainer neither trained nor waited for samples, from the first step
    to the last one; and the share of the time that it waited. A share that is small counts as its
    turn-around: the samples lay ready."""
    ends = dict[float, tuple[float, ...]]()  # number of steps -> the first report after them
    for moment in trainer:
        ends.setdefault(moment[3], moment)
    after = [ends[steps] for steps in sorted(ends) if steps > 0]
    if len(after) < 2:
        return 0.0, 0.0
    wall, waited, trained, steps = (
        last - first for first, last in zip(after[0], after[-1], strict=True)
    )
    turn = wall - trained - (waited if waited / wall > WAITED else 0.0)
    return max(0.0, turn / steps), waited / wall


def _decoding(stages: list[Mapping[str, Any]], max_rows: int) -> tuple[float, float, float]:
    """Tokens/s of one response, over the time that responses were held by a rollout worker, of
    which ``max_rows`` decode; how many of them did when it was nearly full; and the share of the
    time that the workers were busy. Where none was held at any report, half of ``max_rows`` were
    while the worker was busy."""
    decoding = list[float]()
    row_seconds = 0.0
    tokens = 0.0
    busy = 0.0
    wall = 0.0
    clocks = defaultdict[str, WorkerClock](lambda: WorkerClock(("tokens", "busy", "wall")))
    newest = dict[str, Mapping[str, Any]]()  # report of each worker
    for report in stages:
        if report["stage"] != "rollout":
            continue
        clock = clocks[report["worker"]]
        before = clock.totals
        goes_on = clock.add(report)
        last = newest.get(report["worker"])
        newest[report["worker"]] = report
        if last is None or not goes_on or not last["tokens"]:
            continue
        added = clock.since(before)
        held = min(max_rows, (report["in_flight"] + last["in_flight"]) / 2)
        decoding.append(min(max_rows, report["in_flight"]))
        row_seconds += held * added["wall"]
        tokens += added["tokens"]
        busy += added["busy"]
        wall += added["wall"]
    if not tokens:  # a run of a few seconds: no worker has reported twice
        tokens, busy, wall = (
            sum(clock.totals[name] for clock in clocks.values())
            for name in ("tokens", "busy", "wall")
        )
    if not row_seconds:
        decoding = [max_rows]
        row_seconds = busy * max_rows / 2
    if tokens <= 0 or row_seconds <= 0:
        no_tokens = "no rollout worker has reported tokens"
        raise NotMeasured("the run", no_tokens, "give a run that has generated its responses")
    return (
        tokens / row_seconds,
        max(1.0, sorted(decoding)[int(0.9 * (len(decoding) - 1))]),
        busy / wall,
    )
