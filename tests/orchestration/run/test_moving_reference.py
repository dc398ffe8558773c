"""Runs whose reference becomes the policy every few steps."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

from orchestration.checkpoints.references import FOLDER
from orchestration.recipe.flow import flow_of
from orchestration.recipe.problems import RecipeError
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from pipeline.worker.outputs import Written
from stages.inference.moving import MovingReference
from tests.batches import make_batch
from tests.orchestration.run.test_run import assert_equal, synchronous, trained
from tests.orchestration.runs import TINY, complete, executing, recipe

MOVING: dict[str, Any] = {
    "pipeline__staleness": 0,
    "algorithm__options": {"kl_coef": 0.1, "scale_learning_rate": False},
    "checkpoint__every": 1,
    "checkpoint__keep": 9,
    "reward__functions": [{"name": "tests.orchestration.scores:early_letters"}],
    "model__reference_every": 2,
}


# Its teacher is the reference.
SDPO: dict[str, Any] = {
    "algorithm__name": "sdpo",
    "algorithm__options": {
        "teacher": "frozen",
        "template": "{prompt}",  # the teacher sees no more than the policy
        "success_reward": 0.0,
    },
}


def model_at(folder: Path, version: int) -> dict[str, Any]:
    return load_file(folder / "checkpoints" / f"step-{version:08d}/model/model.safetensors")


def reference_at(folder: Path, version: int) -> dict[str, Any]:
    return load_file(folder / FOLDER / f"step-{version:08d}/model.safetensors")


@pytest.mark.parametrize(
    ("algorithm", "distance"), [({}, "kl_reference"), (SDPO, "divergence")], ids=["grpo", "sdpo"]
)
async def test_the_reference_is_the_policy_of_every_second_step(
    algorithm: dict[str, Any], distance: str, tmp_path: Path
) -> None:
    """In a synchronous run the policy equals its reference in the step after: there the KL is 0."""
    of = recipe(TINY, **{**MOVING, **algorithm})
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    divergence = [abs(step[distance]) for step in watched.of("step")]
    assert max(divergence[0::2]) < 1e-7 < min(divergence[1::2]), divergence
    for version in (2, 4, 6):
        policy = model_at(tmp_path / "run", version)
        assert_equal(reference_at(tmp_path / "run", version), policy)


@pytest.mark.parametrize("algorithm", [{}, SDPO], ids=["grpo", "sdpo"])
async def test_a_mixed_reference_has_its_share_of_the_policy(
    algorithm: dict[str, Any], tmp_path: Path
) -> None:
    of = recipe(TINY, **{**MOVING, **algorithm}, model__reference_mix=0.25)
    _, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    before = reference_at(tmp_path / "run", 0)
    for version in (2, 4, 6):
        policy = model_at(tmp_path / "run", version)
        mixed = {
            name: (0.25 * weight.double() + 0.75 * before[name].double()).float()
            for name, weight in policy.items()
        }
        reference = reference_at(tmp_path / "run", version)
        assert reference.keys() == mixed.keys()
        for name, weight in mixed.items():
            assert float((reference[name] - weight).abs().max()) < 1e-6
            assert float((reference[name] - policy[name]).abs().max()) > 1e-4 or "norm" in name
        before = reference


@pytest.mark.parametrize("mix", [1.0, 0.25])
async def test_a_run_equals_the_plain_loop_bit_for_bit(tmp_path: Path, mix: float) -> None:
    of = recipe(TINY, **MOVING, model__reference_mix=mix)
    expected, weights = await synchronous(of)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    assert_equal(trained(of, result), weights)


@pytest.mark.parametrize("mix", [1.0, 0.5])
async def test_a_resumed_run_comes_to_the_weights_of_one_that_never_stopped(
    tmp_path: Path, mix: float
) -> None:
    options = {**MOVING, "model__reference_mix": mix}
    whole = recipe(TINY, **options, train__steps=5)
    _, at_once = await complete(Execution(RunFolder.create(whole, tmp_path / "whole")))
    assert at_once.state == "finished", at_once.reason
    half = recipe(TINY, **options, train__steps=3)
    await complete(Execution(RunFolder.create(half, tmp_path / "run")))
    with pytest.raises(RecipeError, match="cannot change in a resumed run: rows under way"):
        Execution(RunFolder.resume(tmp_path / "run", ["model.reference_every=3"]))
    _, result = await complete(Execution(RunFolder.resume(tmp_path / "run", ["train.steps=5"])))
    assert result.state == "finished", result.reason
    assert_equal(trained(whole, result), trained(whole, at_once))


@pytest.mark.parametrize("killed", ["update-0", "reference-0"])
async def test_a_killed_worker_comes_to_the_same_weights(tmp_path: Path, killed: str) -> None:
    """After the trainer's second reference, with steps to replay that go by the first."""
    changes = {**MOVING, "checkpoint__every": 6, "launch__launcher": "process"}
    of = recipe(TINY, **changes)
    expected, weights = await synchronous(of)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 4)
        assert watched.run.supervisor is not None
        os.kill(watched.run.supervisor.pids()[killed], signal.SIGKILL)
        result = await work
    assert result.state == "finished", result.reason
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    assert_equal(trained(of, result), weights)


async def test_references_that_no_checkpoint_needs_are_removed(tmp_path: Path) -> None:
    of = recipe(TINY, **{**MOVING, "checkpoint__keep": 1, "pipeline__staleness": 1})
    _, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    names = sorted(path.name for path in (tmp_path / "run" / FOLDER).iterdir())
    assert names == ["step-00000004", "step-00000006"]


class Logprobs:
    """An engine that gives each token its version."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.is_closed = False

    def logprobs(self, batch: TensorDict) -> torch.Tensor:
        rows = [torch.full((len(row),), float(self.version)) for row in batch["response_ids"]]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    def close(self) -> None:
        self.is_closed = True


async def test_rows_of_one_group_go_by_their_own_versions() -> None:
    """Whichever of them come first, and one engine is held at a time."""
    engines = list[Logprobs]()

    def make(version: int) -> Any:
        assert all(engine.is_closed for engine in engines)
        engines.append(Logprobs(version))
        return engines[-1]

    class Rows:
        group = np.array([0, 0, 0])
        place = np.arange(3)
        oldest_version = np.array([5, 3, 4], np.uint32)
        tokens = np.array([2, 1, 4])

        def __len__(self) -> int:
            return 3

    claim: Any = Rows()
    rows = make_batch([(3, (2, 1, 4))]).select("prompt_ids", "response_ids")
    declared = flow_of(recipe(TINY, **MOVING))["reference"]
    stage = MovingReference(make, declared, every=2)
    for _ in range(2):
        [written] = [output async for output in stage.process(claim, rows)]
        assert isinstance(written, Written)
        logprobs = [row.tolist() for row in written.rows["ref_logprobs"].unbind()]
        assert logprobs == [[4.0, 4.0], [2.0], [4.0] * 4]
    stage.close()
    assert [engine.version for engine in engines] == [2, 4, 2, 4]
    assert all(engine.is_closed for engine in engines)
