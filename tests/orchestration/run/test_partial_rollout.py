"""Runs whose responses are cut and continued: nothing is lost, the bound stands, and the responses
are the same."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import arena_bytes
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.workers.engines import rollout_engine, sampling_of, train_engine
from pipeline.index.client import Claim
from pipeline.warehouse.dock import Dock
from stages.engines.protocols import Completion, GroupRequest
from stages.rollout.stage import group_seed
from tests.orchestration.run.test_run import assert_each_sample_once, assert_nothing_left
from tests.orchestration.runs import MOCK, TINY, Watched, complete, executing, recipe

# Long tails, two replicas, weights that stay as they are: what a response is depends on nothing but
# its seed. Generation is what takes time, so that every swap finds something in flight.
LONG_TAILED: dict[str, Any] = {
    **MOCK,
    "name": "long-tailed",
    "rollout": {
        **{"engine": "mock", "workers": 2, "max_rows": 8, "max_tokens": 600},
        "mock": {"time_scale": 0.06, "median_tokens": 100.0, "sigma": 1.0},
    },
    "train": {
        "engine": "mock",
        "groups_per_step": 4,
        "mock": {"time_scale": 0.01, "learning_rate": 0.0},
    },
}
STEPS = 5
Versions = list[tuple[int, int]]


class Spy:
    """What the rollout stage commits and parks, of an inline run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, Versions]] = {}
        self.oldest: dict[tuple[int, int], int] = {}
        self.parked: list[tuple[str, int, int]] = []  # worker, group, place
        commit = Dock.commit
        park = Dock.park

        async def committing(
            dock: Dock, claim: Claim, positions: Sequence[int], rows: Any, **options: Any
        ) -> None:
            await commit(dock, claim, positions, rows, **options)
            if claim.stage == "rollout":
                self.read(claim, positions, rows, options["generated"])

        async def parking(
            dock: Dock, claim: Claim, positions: Sequence[int], rows: Any, **options: Any
        ) -> None:
            await park(dock, claim, positions, rows, **options)
            self.parked += [
                (dock.worker, claim.rows[i].group, claim.rows[i].place) for i in positions
            ]

        monkeypatch.setattr(Dock, "commit", committing)
        monkeypatch.setattr(Dock, "park", parking)

    def read(
        self, claim: Claim, positions: Sequence[int], rows: Mapping[str, Any], made: Any
    ) -> None:
        for i, position in enumerate(positions):
            row = claim.rows[position]
            flat = rows["versions"][i].tolist()
            key = (row.group, row.place)
            versions = list(zip(flat[::2], flat[1::2], strict=True))
            assert key not in self.ended, "committed twice"
            self.ended[key] = (rows["response_ids"][i], rows["rollout_logprobs"][i], versions)
            self.oldest[key] = made[i][0]


async def uncut(of: Recipe, groups: int, *, loaded: bool) -> dict[tuple[int, int], Completion]:
    """The run's responses in one piece, by the engine as it starts, or by one with the trainer's
    weights ``loaded``."""
    engine = rollout_engine(of, version=0)
    sampling = sampling_of(of, tokenizer_of(of))
    if loaded:
        await engine.load_weights(1, dict(train_engine(of).weights()))
    places = tuple(range(of.algorithm.group_size))
    prompt = torch.ones(1, dtype=torch.int64)
    requests = [
        GroupRequest(group, places, prompt, sampling, group_seed(of.seed, group))
        for group in range(groups)
    ]
    return {(done.group, done.place): done async for done in engine.generate(requests)}


@pytest.mark.parametrize(
    ("bound", "window", "budget", "on_update"),
    [(1, 1, 40, "keep"), (1, 1, 0, "cut"), (2, 3, 60, "cut")],
)
async def test_cut_responses_keep_the_bound_and_are_those_of_a_run_without_cuts(
    bound: int,
    window: int,
    budget: int,
    on_update: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: dict[str, Any] = {
        "pipeline__staleness": bound,
        "pipeline__window": window,
        "train__steps": STEPS,
    }
    settings |= {"rollout__budget": budget, "rollout__on_update": on_update}
    # on a machine that others use, a swap may come when nothing is in flight
    for time_scale in (0.06, 0.24, 0.96):
        spy = Spy(monkeypatch)
        mock = {**LONG_TAILED["rollout"]["mock"], "time_scale": time_scale}
        # what the recipe asks for at least is enough
        room = arena_bytes(recipe(LONG_TAILED, **settings))
        of = recipe(LONG_TAILED, **settings, rollout__mock=mock, pipeline__arena=room)
        watched, result = await complete(
            Execution(RunFolder.create(of, tmp_path / f"run-{time_scale}"))
        )
        assert result.state == "finished", result.reason
        assert_each_sample_once(of, watched)
        if any(len(spy.ended[group, place][2]) > 1 for _, group, place in spy.parked):
            break
        monkeypatch.undo()
    assert max(step["staleness_max"] for step in watched.of("step")) >= 1, "nothing ever overlapped"
    groups = STEPS * 4
    assert sorted(spy.ended) == [(group, place) for group in range(groups) for place in range(4)]
    first, later = [await uncut(of, groups, loaded=loaded) for loaded in (False, True)]
    for key, (tokens, logprobs, versions) in spy.ended.items():
        assert spy.oldest[key] == min(version for version, _ in versions)
        assert len(tokens) == len(first[key].token_ids)
        at = 0
        for version, count in versions:
            whole = later[key] if version else first[key]
            part = slice(at, at + count)
            assert torch.equal(tokens[part], whole.token_ids[part])
            assert torch.equal(logprobs[part], whole.logprobs[part])
            at += count
        assert at == len(tokens)
    cut = {(group, place) for _, group, place in spy.parked}
    assert cut, "nothing was cut"
    assert any(len(spy.ended[key][2]) > 1 for key in cut), (
        "no response was continued by a newer version"
    )
    if budget and on_update == "keep":
        visits = {key: -(-len(spy.ended[key][0]) // budget) for key in spy.ended}
        assert len(spy.parked) == sum(visits.values()) - len(visits)
    else:
        assert all(
            len(versions) == 1 for key, (_, _, versions) in spy.ended.items() if key not in cut
        )


async def test_a_torch_engine_in_a_run_with_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    of = recipe(TINY, rollout__budget=3, rollout__max_tokens=8, rollout__on_update="cut")
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    assert spy.parked


async def test_a_killed_rollout_worker_loses_nothing_that_was_parked(tmp_path: Path) -> None:
    # One worker, so that it is the one that holds what is begun and not parked.
    settings: dict[str, Any] = {"rollout__workers": 1, "rollout__budget": 30, "train__steps": STEPS}
    of = recipe(LONG_TAILED, **settings, launch__launcher="process")
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        before = await until(watched, lambda reported: reported["begun"] > reported["parked"] > 0)
        assert watched.run.supervisor is not None
        os.kill(watched.run.supervisor.pids()["rollout-0"], signal.SIGKILL)
        await watched.until(lambda: any(w["change"] == "died" for w in watched.of("worker")))
        after = (await watched.run.supervisor.index.stats())["stages"]["rollout"]
        assert after["parked"] == after["begun"] > 0, (before, after)
        assert after["leased"] == 0
        result = await work
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    assert_nothing_left(watched.run)


async def until(watched: Watched, condition: Any) -> dict[str, Any]:
    """The rollout stage's figures in the index when they fulfil ``condition``."""
    async with asyncio.timeout(60):
        await watched.until(lambda: len(watched.of("step")) >= 2)
        assert watched.run.supervisor is not None
        while True:
            reported = (await watched.run.supervisor.index.stats())["stages"]["rollout"]
            if condition(reported):
                return reported


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"rollout__budget": 600},
            "rollout.budget = 600: cuts nothing, as no response is longer than rollout.max_tokens",
        ),
        (
            {"rollout__budget": 9, "pipeline__staleness": 0},
            "rollout.budget = 9: cuts responses, but with pipeline.staleness = 0 and "
            "pipeline.window = 1 the run is the synchronous one bit for bit, and a continued "
            "response is rounded otherwise; set pipeline.staleness >= 1, or rollout.budget = 0",
        ),
        (
            {"rollout__speculate": "on", "pipeline__staleness": 0},
            'rollout.speculate = "on": drafts tokens, but with pipeline.staleness = 0',
        ),
        (
            {"rollout__on_update": "cut", "pipeline__staleness": 0},
            'rollout.on_update = "cut": cuts responses, but with pipeline.staleness = 0',
        ),
        (
            {"rollout__on_update": "drop"},
            "rollout.on_update = \"drop\": is not allowed; use one of: 'cut', 'keep'",
        ),
    ],
)
def test_what_could_not_be_meant_is_refused_with_what_to_write(
    changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        recipe(LONG_TAILED, train__steps=4, **changes)
    assert complaint in str(refused.value)
    assert len(refused.value.problems) == 1
