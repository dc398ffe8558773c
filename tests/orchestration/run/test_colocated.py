"""Runs in which training and generation take turns on the same devices: the same samples, steps and
weights, and never the memory of both."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.runs.synchronous import SynchronousStep, synchronous_run
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import held_bytes, plan, reshard_plan, turns
from orchestration.recipe.worker_kinds import workers_of
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.resharding.exchange import SharedExchange
from stages.resharding.plan import Phase, memory
from stages.resharding.swap import Swap
from tests.orchestration.run.test_run import (
    assert_each_sample_once,
    assert_equal,
    assert_nothing_left,
    synchronous,
    trained,
)
from tests.orchestration.runs import TINY, Watched, complete, executing, recipe

TURNS: dict[str, Any] = {
    "launch__placement": "colocated",
    "pipeline__staleness": 0,
    "reward__functions": [{"name": "tests.orchestration.scores:early_letters"}],
}


def assert_within_the_plan(of: Recipe, watched: Watched) -> None:
    """What was counted in each phase is what the plan computes, on each rank, and training's bytes
    are gone meanwhile."""
    plan = reshard_plan(of)
    most = turns(of)
    weights = [plan.source.nbytes(rank) for rank in range(plan.world)]
    figures = {one.phase: one for one in memory(plan, held_bytes(of, plan.source))}
    for rank in range(plan.world):
        # AdamW's step counters, a number each; and FSDP pads what its ranks cannot share evenly.
        slack = 4 * 64 + (0 if plan.world == 1 else weights[rank] // 50)
        swaps = [sync for sync in watched.of("sync") if sync["worker"] == f"rollout-{rank}"]
        for sync in swaps:
            if sync["to"] == "generation" and sync["version"] > 0:  # AdamW has its moments
                counted = sync["device_bytes"]
                assert 0 <= counted["gather"] - figures[Phase.GATHER].live[rank] <= slack
                assert counted["offload weights"] == figures[Phase.GENERATE].live[rank]
                assert 0 <= sync["released_bytes"] - figures[Phase.PREFETCH].host[rank] <= slack
                assert sync["bytes"] == plan.received[rank] + plan.kept[rank]
        reported = [turn for turn in watched.of("turn") if turn["worker"] == f"rollout-{rank}"]
        left = [turn for turn in reported if turn["phase"] == "returning"]
        assert left
        for turn in left:
            assert turn.get("cache_bytes", 0) <= most.caches
            assert turn.get("generating_bytes", 0) == figures[Phase.GENERATE].live[rank] + turn.get(
                "cache_bytes", 0
            )
            assert turn["device_bytes"] <= figures[Phase.PREFETCH].live[rank] + slack
        order = [turn["phase"] for turn in reported]
        if not deaths(watched):
            assert order == [
                ("generating", "returning", "training")[at % 3] for at in range(len(order))
            ]
    assert any(turn.get("cache_bytes", 0) > 0 for turn in watched.of("turn"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_on_one_rank_with_bound_zero_it_is_the_synchronous_run_bit_for_bit(
    dtype: str, tmp_path: Path
) -> None:
    of = recipe(TINY, **TURNS, evaluate__every=2, evaluate__prompts=4, model__dtype=dtype)
    expected, weights = await synchronous(of)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    assert_equal(trained(of, result), weights)
    assert_each_sample_once(of, watched)
    assert [evaluation["version"] for evaluation in watched.of("evaluation")] == [0, 2, 4, 6]
    gaps = [
        sync["gap_max"]
        for sync in watched.of("sync")
        if sync["version"] and sync["to"] == "generation"
    ]
    assert len(gaps) == 6, "probed at each swap"
    assert 0 < max(gaps) < (1e-5 if dtype == "float32" else 0.05)
    assert_within_the_plan(of, watched)
    assert_nothing_left(watched.run)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_adapters_take_turns_beside_a_base_that_stays(dtype: str, tmp_path: Path) -> None:
    """The plain loop, bit for bit; both engines have one base, and a turn moves adapters alone."""
    lora = {
        "model__lora": {"rank": 4},
        "train__learning_rate": 1e-2,
        "algorithm__options": {"kl_coef": 0.1},
    }
    of = recipe(TINY, **TURNS, **lora, evaluate__every=3, evaluate__prompts=4, model__dtype=dtype)
    expected, weights = await synchronous(of)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    assert_equal(trained(of, result), weights)
    assert_each_sample_once(of, watched)
    assert_nothing_left(watched.run)
    follows = plan(of)
    item = 4 if dtype == "float32" else 2
    assert follows.parameters is not None and follows.trained_parameters is not None  # noqa: PT018
    swaps = [sync for sync in watched.of("sync") if sync["to"] == "generation"]
    assert {sync["bytes"] for sync in swaps} == {item * follows.trained_parameters}
    assert all(sync["gap_mean"] < sync["gap_mean_limit"] for sync in swaps if sync["version"]), (
        "each was probed"
    )
    most = turns(of)
    left = [turn for turn in watched.of("turn") if turn["phase"] == "returning"]
    for turn in left:
        held = turn["generating_bytes"] - turn["cache_bytes"]
        assert turn["device_bytes"] == held <= 1.05 * most.generating
        assert 1 < held / (follows.parameters * item) < 2, "no second base"
    assert min(turn["cache_bytes"] for turn in left) > 0, "the cache alone goes"


async def test_adapters_of_two_ranks_take_turns_and_survive_a_kill(tmp_path: Path) -> None:
    lora = {"model__lora": {"rank": 4}, "train__learning_rate": 1e-2, "checkpoint__every": 2}
    of = recipe(TINY, **TURNS, **lora, train__dp=2, train__steps=5, launch__launcher="process")
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 3)
        assert watched.run.supervisor is not None
        os.kill(watched.run.supervisor.pids()["colocated-1"], signal.SIGKILL)
        result = await work
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    assert_nothing_left(watched.run)
    swaps = [sync for sync in watched.of("sync") if sync["to"] == "generation" and sync["version"]]
    assert {sync["worker"] for sync in swaps} == {"rollout-0", "rollout-1"}
    probed = [sync for sync in swaps if "gap_mean" in sync]
    assert len(probed) >= len(swaps) - 2, (
        "a rank that starts again with nothing to replay has no rows to probe with"
    )
    assert all(sync["gap_mean"] < sync["gap_mean_limit"] for sync in probed)


@pytest.mark.parametrize("prefetch", [True, False])
async def test_with_slack_as_many_steps_follow_on_one_another_as_there_are_batches(
    prefetch: bool, tmp_path: Path
) -> None:
    of = recipe(
        TINY, **{**TURNS, "pipeline__staleness": 1}, train__steps=8, sync__prefetch=prefetch
    )
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    assert max(step["staleness_max"] for step in watched.of("step")) == 1
    swaps = [sync for sync in watched.of("sync") if sync["to"] == "generation"]
    assert 4 <= len(swaps) <= 8, "a swap for two steps, where nothing was in the way"
    back = [sync for sync in watched.of("sync") if sync["to"] == "training"]
    assert len(back) == len(swaps)
    assert all(sync["exposed_seconds"] >= 0 and sync["hidden_seconds"] >= 0 for sync in back)
    assert_within_the_plan(of, watched)


async def test_what_is_in_flight_when_the_batch_is_complete_is_cut_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups at a time, so that the first step's are done while others are not."""
    settings = {
        "pipeline__staleness": 2,
        "rollout__max_rows": 8,
        "rollout__max_tokens": 48,
        "train__steps": 6,
    }
    of = recipe(TINY, **{**TURNS, **settings}, train__groups_per_step=2)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    rollout = [stage for stage in watched.of("stage") if stage["stage"] == "rollout"]
    assert rollout[-1]["parked"] > 0, "nothing was cut"
    assert max(step["staleness_max"] for step in watched.of("step")) >= 1


async def test_weights_that_arrive_damaged_make_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank there are no messages with checksums; the probe is what notices.

    The rank begins again at its last checkpoint, replays, and ends at the weights of an undisturbed
    run.
    """
    swap = Swap.to_rollout
    damaged = [2]

    def damaging(self: Swap) -> Any:
        tensors = swap(self)
        if damaged and self.arena.used and next(self._training_state(), None) is not None:
            damaged[0] -= 1
            if not damaged[0]:
                damaged.clear()
                tensors["model.layers.1.mlp.down_proj.weight"][3] += 1.0
        return tensors

    monkeypatch.setattr(Swap, "to_rollout", damaging)
    of = recipe(TINY, **TURNS)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    monkeypatch.undo()
    assert result.state == "finished", result.reason
    (died,) = [worker for worker in watched.of("worker") if worker["change"] == "died"]
    assert (
        "SwapError: rollout-0: with the weights of version 2 the engine's logprobs differ"
        in died["reason"]
    )
    assert "start again at the last checkpoint" in died["reason"]
    assert_each_sample_once(of, watched)
    expected, weights = await synchronous(of)
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    assert_equal(trained(of, result), weights)


# --- several ranks
# --------------------------------------------------------------------------------------------------


class Laborious(GRPO):
    """GRPO whose steps take a while.

    In one of the run's lives (chosen by the file ``damage``, once) rank 1 receives another byte
    than was sent, in the swap after a step.
    """

    damage: str = ""

    def loss(self, tokens: Any) -> Any:
        time.sleep(0.15)
        if self.damage and dist.get_rank() == 1:
            try:
                os.unlink(self.damage)
            except FileNotFoundError:
                return super().loss(tokens)
            sound = SharedExchange.messages

            def damaging(self: SharedExchange, number: int) -> Any:
                messages = sound(self, number)
                messages[0].view(torch.uint8)[5] ^= 4
                SharedExchange.messages = sound  # type: ignore[method-assign]
                return messages

            SharedExchange.messages = damaging  # type: ignore[method-assign]
        return super().loss(tokens)


async def expected_of(of: Recipe) -> tuple[list[SynchronousStep], dict[str, torch.Tensor]]:
    steps = [step async for step in synchronous_run(of)]
    return steps, {name: weight.clone() for name, weight in steps[-1].engine.weights()}


def assert_close(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """But for the order of sums, which AdamW lets grow a little from step to step."""
    for name, weight in expected.items():
        assert (weights[name] - weight).norm() < 1e-4 * weight.norm(), name


def test_each_rank_is_one_worker() -> None:
    of = recipe(TINY, **TURNS, train__dp=2, launch__launcher="process")
    assert workers_of(of) == [("flow", 0), ("colocated", 0), ("colocated", 1)]


async def test_any_rank_may_die_in_any_phase_and_each_sample_is_trained_once(
    tmp_path: Path,
) -> None:
    """Killed while it generates, while training comes back, and while it trains; and a message that
    arrives damaged. Each time both ranks begin again at the last checkpoint, and the weights are
    those of an undisturbed run."""
    settings: dict[str, Any] = {
        "train__dp": 2,
        "checkpoint__every": 2,
        "launch__launcher": "process",
        "launch__startup_timeout": 300.0,
        "launch__max_restarts": 20,
        "reward__functions": [{"name": "tests.orchestration.scores:unhurried"}],
        "algorithm__name": "tests.orchestration.run.test_colocated:Laborious",
        "rollout__max_tokens": 24,
        "sync__bucket": "8KiB",
    }
    of = recipe(
        TINY, **{**TURNS, **settings}, algorithm__options={"damage": str(tmp_path / "damage")}
    )
    expected, weights = await expected_of(
        recipe(TINY, **{**TURNS, **settings}, algorithm__options={})
    )
    victims = [
        ("rollout-0", "generating", 1),
        ("rollout-1", "returning", 2),
        ("rollout-0", "training", 3),
    ]
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        for rank, phase, version in victims:
            while await killed_in(watched, rank, phase, version) != phase:
                pass  # the phase was over before the signal came
        (tmp_path / "damage").touch()
        result = await work
    assert result.state == "finished", result.reason
    assert watched.run.supervisor is not None
    *kills, damaged = (death["reason"] for death in deaths(watched))
    assert watched.run.supervisor.restarts == len(kills) + 1, "one for both ranks"
    assert set(kills) == {"ended by signal 9"}
    assert "1 messages are not what was sent" in damaged
    assert_each_sample_once(of, watched)
    assert_within_the_plan(of, watched)
    assert_nothing_left(watched.run)
    assert [step["reward_mean"] for step in watched.of("step")] == [
        step.reward_mean for step in expected
    ]
    norms = [step.metrics["grad_norm"] for step in expected]
    assert [step["grad_norm"] for step in watched.of("step")] == pytest.approx(norms, rel=1e-4)
    assert_close(trained(of, result), weights)


async def killed_in(watched: Watched, rank: str, phase: str, version: int) -> str:
    """Kill ``rank`` when it is next in ``phase``, with ``version`` or a later one.

    Returns the phase that it died in.
    """
    number = len(deaths(watched))

    def turns() -> list[dict[str, Any]]:
        return [turn for turn in watched.of("turn") if turn["worker"] == rank]

    before = len(turns())
    await watched.until(
        lambda: (
            bool(now := turns()[before:][-1:])
            and now[0]["phase"] == phase
            and now[0]["version"] >= version
        ),
        timeout=240,
    )
    assert watched.run.supervisor is not None
    os.kill(watched.run.supervisor.pids()[rank.replace("rollout", "colocated")], signal.SIGKILL)
    await watched.until(lambda: len(deaths(watched)) == number + 1)
    return [turn["phase"] for turn in before_death(watched, number) if turn["worker"] == rank][-1]


def deaths(watched: Watched) -> list[dict[str, Any]]:
    return [worker for worker in watched.of("worker") if worker["change"] == "died"]


def before_death(watched: Watched, number: int) -> list[dict[str, Any]]:
    """The turns that were reported before death ``number``."""
    died = [
        event
        for event in watched.events
        if event.kind == "worker" and event.data["change"] == "died"
    ][number]
    return [
        event.data for event in watched.events[: watched.events.index(died)] if event.kind == "turn"
    ]


async def test_a_run_that_was_stopped_goes_on_at_another_number_of_ranks_and_ends_evaluated(
    tmp_path: Path,
) -> None:
    """One process; then two ranks that cut the matrices between them."""
    of = recipe(TINY, **TURNS, train__steps=7, evaluate__every=7, evaluate__prompts=4)
    expected, weights = await expected_of(of)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 4)
        watched.stop.set()
        assert (await work).state == "stopped"
    assert_nothing_left(watched.run)
    before = {step["step"]: step["grad_norm"] for step in watched.of("step")}
    resumed = Execution(
        RunFolder.resume(
            tmp_path / "run",
            ["train.tp=2", "launch.launcher=process", "launch.startup_timeout=300"],
        )
    )
    assert resumed.folder.start is not None
    assert resumed.folder.start.version == len(before), (
        "training has had the device back to write its checkpoint"
    )
    watched, result = await complete(resumed)
    assert result.state == "finished", result.reason
    reported = before | {step["step"]: step["grad_norm"] for step in watched.of("step")}
    norms = [step.metrics["grad_norm"] for step in expected]
    assert [reported[step] for step in range(1, 8)] == pytest.approx(norms, rel=1e-4)
    assert_close(trained(resumed.recipe, result), weights)
    assert [evaluation["version"] for evaluation in watched.of("evaluation")] == [7]
    assert_within_the_plan(resumed.recipe, watched)
    assert_nothing_left(watched.run)
