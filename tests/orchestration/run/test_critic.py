"""PPO with a critic that has an engine and a worker of its own: real processes that train, die and
go on together."""

from __future__ import annotations

import math
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.runs.synchronous import synchronous_run
from orchestration.checkpoints.checkpoint import CRITIC
from orchestration.recipe.flow import flow_of
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.recipe.worker_kinds import workers_of
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.workers.engines import critic_engine, train_engine
from stages.engines.torch.critic import VALUE_HEAD
from tests.orchestration import scores
from tests.orchestration.run.test_run import (
    assert_each_sample_once,
    assert_equal,
    assert_nothing_left,
    trained,
)
from tests.orchestration.runs import TINY, complete, executing, recipe

OWN: dict[str, Any] = {
    "algorithm__name": "ppo",
    "algorithm__options": {"critic": "own", "value_epochs": 3, "critic_warmup_steps": 2},
    "pipeline__staleness": 0,
    "reward__functions": [{"name": "tests.orchestration.scores:early_letters"}],
    "critic__learning_rate": 1e-3,
}


def state_of(critic: Any) -> dict[str, torch.Tensor]:
    state = critic.state_dict()
    return {
        f"{part} {name}": v.clone()
        for part in ("model", "exp_avg", "exp_avg_sq")
        for name, v in state[part].items()
    }


async def test_either_may_be_killed_and_both_have_the_weights_of_the_plain_loop(
    tmp_path: Path,
) -> None:
    """The critic before the first checkpoint, then the policy after it, then the critic again: with
    bound 0, bit for bit."""
    of = recipe(TINY, **OWN, train__steps=8, launch__launcher="process")
    reported = []
    policy = {}
    critic = {}
    async for step in synchronous_run(of):
        reported.append(
            (step.reward_mean, step.metrics["loss"], step.metrics["explained_variance"])
        )
        policy = {name: value.clone() for name, value in step.engine.weights()}
        critic = state_of(step.critic)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        for steps, worker in ((1, "critic-0"), (4, "update-0"), (6, "critic-0")):
            await watched.until(lambda: len(watched.of("step")) >= steps)  # noqa: B023
            assert watched.run.supervisor is not None
            deaths = len([w for w in watched.of("worker") if w["change"] == "died"])
            os.kill(watched.run.supervisor.pids()[worker], signal.SIGKILL)
            await watched.until(
                lambda: len([w for w in watched.of("worker") if w["change"] == "died"]) > deaths  # noqa: B023
            )
        result = await work
        assert watched.run.supervisor.restarts == 3, "one for both workers"
    assert result.state == "finished", result.reason
    died = [w["worker"] for w in watched.of("worker") if w["change"] == "died"]
    assert died == ["critic-0", "update-0", "critic-0"]
    assert_each_sample_once(of, watched)
    assert_nothing_left(watched.run)
    steps = watched.of("step")
    assert [(s["reward_mean"], s["loss"], s["explained_variance"]) for s in steps] == reported
    assert all(
        {"value_loss", "critic_grad_norm", "critic_learning_rate"} <= s.keys() for s in steps
    )
    assert_equal(trained(of, result), policy)
    assert result.checkpoint is not None
    engine = critic_engine(of)
    result.checkpoint.load_into(engine, CRITIC)
    assert_equal(state_of(engine), critic)
    assert not torch.equal(
        critic["model model.embed_tokens.weight"], policy["model.embed_tokens.weight"]
    )
    head = load_file(result.checkpoint.path / CRITIC / "model" / VALUE_HEAD)
    assert torch.equal(head["value_head.weight"], critic["model value_head.weight"])


@pytest.mark.parametrize("strategy", ["dp", "pp"])
async def test_a_critic_on_ranks_is_that_of_the_plain_loop_but_for_the_order_of_sums(
    strategy: str, tmp_path: Path
) -> None:
    """Also when the rank without orders of its own is killed after a checkpoint: all ranks
    replay."""
    ranks = {f"critic__{strategy}": 2, "train__threads": 1, "launch__launcher": "process"}
    of = recipe(TINY, **OWN, **ranks, train__steps=6, checkpoint__every=3)
    assert [worker for worker in workers_of(of) if worker[0] == "critic"] == [
        ("critic", 0),
        ("critic", 1),
    ]
    names = ("explained_variance", "value_loss")
    plain = []
    learned = {}
    async for made in synchronous_run(of):
        plain.append([made.reward_mean, *(made.metrics[name] for name in names)])
        learned = state_of(made.critic)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 4)
        assert watched.run.supervisor is not None
        os.kill(watched.run.supervisor.pids()["critic-1"], signal.SIGKILL)
        result = await work
        assert watched.run.supervisor.restarts == 1
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    assert_nothing_left(watched.run)
    for step, wanted in zip(watched.of("step"), plain, strict=True):
        assert [step["reward_mean"], *(step[name] for name in names)] == pytest.approx(
            wanted, rel=1e-3, abs=1e-4
        )
    assert result.checkpoint is not None
    engine = critic_engine(of)
    result.checkpoint.load_into(engine, CRITIC)
    for name, value in state_of(engine).items():
        assert (value - learned[name]).norm() <= 1e-3 * learned[name].norm() + 1e-6, name


def weights_at_the_start(of: Recipe) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in train_engine(of).weights()}


async def test_a_batch_that_the_critic_alone_cannot_learn_from_neither_of_them_learns_from(
    tmp_path: Path,
) -> None:
    """Squared errors of rewards of 2e37 overflow; advantages are whitened, so the policy has a
    finite loss. A kill after it makes both replay."""
    overflowing = {"reward__functions": [{"name": f"{scores.HERE}:overflowing"}]}
    options = {"algorithm__options": {"critic": "own", "epochs": 1, "whiten": True}}
    keys = {"train__steps": 8, "checkpoint__every": 8, "launch__launcher": "process"}
    of = recipe(TINY, **OWN | overflowing | options | keys)
    policy = weights_at_the_start(of)
    critic = state_of(critic_engine(of))
    skipped = []
    async for step in synchronous_run(of):
        before = policy, critic
        policy = {name: value.clone() for name, value in step.engine.weights()}
        critic = state_of(step.critic)
        if math.isnan(step.metrics["loss"]):
            skipped.append(step.step)
            assert_equal(policy, before[0])
            assert_equal(critic, before[1])
    assert 0 < len(skipped) < 8
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= skipped[0])
        assert watched.run.supervisor is not None
        os.kill(watched.run.supervisor.pids()["critic-0"], signal.SIGKILL)
        result = await work
    assert result.state == "finished", result.reason
    steps = watched.of("step")
    assert [step["step"] for step in steps if step.get("skipped")] == skipped
    assert all(
        steps[number - 1]["skipped"].startswith("critic: gradient norm is") for number in skipped
    )
    assert_equal(trained(of, result), policy)
    assert result.checkpoint is not None
    engine = critic_engine(of)
    result.checkpoint.load_into(engine, CRITIC)
    assert_equal(state_of(engine), critic)


async def test_a_stopped_run_goes_on_with_its_critic_and_another_run_begins_with_it(
    tmp_path: Path,
) -> None:
    of = recipe(TINY, **{**OWN, "pipeline__staleness": 1}, train__steps=40)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 4)
        watched.stop.set()
        result = await work
    assert result.state == "stopped"
    stopped = watched.of("step")[-1]["step"]
    assert result.checkpoint is not None
    assert result.checkpoint.version == stopped, "the last step's, of both"
    with pytest.raises(
        RecipeError,
        match="cannot change in a resumed run: the checkpoint has the weights of the critic",
    ):
        Execution(RunFolder.resume(tmp_path / "run", ["algorithm.options.critic=trunk"]))
    resumed = Execution(RunFolder.resume(tmp_path / "run", [f"train.steps={stopped + 3}"]))
    watched, result = await complete(resumed)
    assert result.state == "finished", result.reason
    assert [step["step"] for step in watched.of("step")] == [stopped + 1, stopped + 2, stopped + 3]
    assert result.checkpoint is not None
    source = result.checkpoint.path / CRITIC / "model"
    begun = critic_engine(recipe(TINY, **OWN, critic__source=str(source)))
    assert torch.equal(
        begun.state_dict()["model"]["value_head.weight"],
        load_file(source / VALUE_HEAD)["value_head.weight"],
    )


def test_the_flow_has_the_critic_and_it_lives_with_the_trainer() -> None:
    of = recipe(TINY, **OWN)
    flow = flow_of(of)
    assert (flow["critic"].runs_on, flow["critic"].takes) == ("critic", "groups")
    assert "values" in flow["update"].needs
    assert ("critic", 0) in workers_of(of)
    trunk = recipe(TINY, algorithm__name="ppo")
    assert "critic" not in flow_of(trunk)
    assert ("critic", 0) not in workers_of(trunk)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"critic__learning_rate": 1e-3, "algorithm__name": "ppo"},
            r"critic.learning_rate = 0.001: is read by no worker",
        ),
        (
            {**OWN, "critic__tp": 3, "launch__launcher": "process"},
            r"critic.tp = 3: cannot share "
            r"the model's num_",
        ),
        (
            {**OWN, "critic__pp": 99, "launch__launcher": "process"},
            r"critic.pp = 99: makes 99 stages, more than the model",
        ),
        (
            {**OWN, "critic__dp": 2, "launch__launcher": "inline"},
            r"critic.dp = 2 times critic.tp = "
            r"1 is 2 ranks",
        ),
        (
            {**OWN, "launch__placement": "colocated"},
            "ppo trains a critic of its own, which does not leave it",
        ),
        (
            {**OWN, "critic__source": "nowhere"},
            r'critic.source = "nowhere": is neither a known '
            r"model nor a directory",
        ),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(TINY, **changes)


async def test_a_run_whose_critic_learns_alone_at_first_is_the_plain_loop_after_a_death(
    tmp_path: Path,
) -> None:
    """A value head on the trunk: the trainer dies after the warm-up's checkpoint, and replays to
    the same bits."""
    options = {"critic_warmup_steps": 3, "value_learning_rate": 1e-2}
    algorithm = {
        "algorithm__name": "ppo",
        "algorithm__options": options,
        "reward__functions": OWN["reward__functions"],
    }
    of = recipe(TINY, **algorithm, pipeline__staleness=0, train__steps=6, checkpoint__every=2)
    policies = [dict[str, torch.Tensor]()]
    async for made in synchronous_run(of):
        policies.append({name: value.clone() for name, value in made.engine.weights()})
    for before, after in pairwise(policies[1:4]):
        assert_equal(after, before)
    assert not torch.equal(*(policies[at]["model.embed_tokens.weight"] for at in (3, 4)))
    of = of.model_copy(update={"launch": of.launch.model_copy(update={"launcher": "process"})})
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 3)
        assert watched.run.supervisor is not None
        os.kill(watched.run.supervisor.pids()["update-0"], signal.SIGKILL)
        result = await work
        assert watched.run.supervisor.restarts == 1
    assert result.state == "finished", result.reason
    assert_equal(trained(of, result), policies[-1])
    rates = [(step["learning_rate"], step["value_learning_rate"]) for step in watched.of("step")]
    assert rates == [(0.0, 1e-2)] * 3 + [(of.train.learning_rate, 1e-2)] * 3
