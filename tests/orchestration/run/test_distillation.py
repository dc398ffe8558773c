"""On-policy distillation: a student learns from a teacher's logprobs alone, without rewards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from orchestration.recipe.problems import RecipeError
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.algorithms.batch import TrainBatch
from stages.algorithms.policy_gradient.distillation import Distillation
from tests.batches import make_batch
from tests.orchestration.run.test_run import assert_nothing_left
from tests.orchestration.runs import TINY, complete, recipe


async def test_a_student_comes_near_to_its_teacher(tmp_path: Path) -> None:
    taught = recipe(
        TINY,
        prompts__responses=["answer"],
        rollout__max_tokens=4,
        algorithm__name="sft",
        algorithm__group_size=1,
        train__steps=24,
        train__groups_per_step=48,
    )
    _, result = await complete(Execution(RunFolder.create(taught, tmp_path / "teacher")))
    assert result.checkpoint is not None
    student = recipe(
        TINY,
        model__reference=str(result.checkpoint.model),
        algorithm__name="distillation",
        algorithm__group_size=4,
        rollout__max_rows=128,
        train__steps=40,
        train__groups_per_step=16,
        evaluate__every=40,
        evaluate__prompts=8,
    )
    watched, _ = await complete(Execution(RunFolder.create(student, tmp_path / "student")))
    steps = watched.of("step")
    assert len(steps) == 40
    assert steps[0]["reverse_kl"] > 2
    assert steps[-1]["reverse_kl"] < 0.5 * steps[0]["reverse_kl"]
    held_out = {event["version"]: event["reward_mean"] for event in watched.of("evaluation")}
    assert held_out[40] > held_out[0] + 0.3
    assert_nothing_left(watched.run)


def test_whitened_advantages_leave_the_reported_divergence_as_it_is() -> None:
    batch = make_batch()
    own = Distillation(whiten=True)
    student, teacher = (batch[name].unbind() for name in ("rollout_logprobs", "ref_logprobs"))
    made = own.credit({"rollout_logprobs": student, "ref_logprobs": teacher})["advantage"]
    batch["advantage"] = torch.nested.nested_tensor(list(made), layout=torch.jagged)
    given = TrainBatch(batch, own)
    raw = torch.cat(list(made))
    assert given["advantage"].tolist() == pytest.approx(
        ((raw - raw.mean()) / raw.std(correction=0)).tolist(), abs=1e-5
    )
    now = torch.cat(list(student)).requires_grad_()
    tokens = given.tokens(
        range(len(batch)),
        [0] * len(batch),
        now,
        total_tokens=len(now),
        total_rows=1,
        total_groups=1,
    )
    assert own.loss(tokens).metrics["reverse_kl"].item() == pytest.approx(
        -raw.mean().item(), rel=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"model__reference": "nowhere"}, "is neither a known model nor a directory"),
        ({"model__reference": "tiny", "algorithm__name": "grpo"}, "is read by no stage"),
        ({"model__reference": "smollm2"}, "has another vocabulary"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(changes: dict[str, str], wrong: str) -> None:
    with pytest.raises(RecipeError, match=rf"model\.reference = .*: {wrong}"):
        recipe(TINY, **{"algorithm__name": "distillation", **changes})
