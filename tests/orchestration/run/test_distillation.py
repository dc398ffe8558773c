"""On-policy distillation: a student learns from a teacher's logprobs alone, without rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orchestration.recipe.problems import RecipeError
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.algorithms.batch import TrainBatch
from stages.algorithms.policy_gradient.distillation import Distillation
from stages.algorithms.supervised.self_distillation import NO_SUCCESS
from tests.batches import make_batch
from tests.orchestration.run.test_run import assert_nothing_left
from tests.orchestration.runs import TINY, Watched, complete, recipe


async def taught(folder: Path, **changes: Any) -> str:
    """The checkpoint of a model that was shown the answers."""
    shown = recipe(
        TINY,
        **{
            "prompts__responses": ["answer"],
            "rollout__max_tokens": 4,
            "algorithm__name": "sft",
            "algorithm__group_size": 1,
            "train__steps": 24,
            "train__groups_per_step": 48,
            **changes,
        },
    )
    _, result = await complete(Execution(RunFolder.create(shown, folder)))
    assert result.checkpoint is not None
    return str(result.checkpoint.model)


async def learn(folder: Path, steps: int, **changes: Any) -> tuple[Watched, dict[int, float]]:
    """A student's run, and its scores on held-out prompts by version."""
    student = recipe(
        TINY,
        **{
            "algorithm__group_size": 4,
            "rollout__max_rows": 128,
            "train__steps": steps,
            "train__groups_per_step": 16,
            "evaluate__every": steps,
            "evaluate__prompts": 8,
            **changes,
        },
    )
    watched, _ = await complete(Execution(RunFolder.create(student, folder)))
    assert len(watched.of("step")) == steps
    assert_nothing_left(watched.run)
    return watched, {each["version"]: each["reward_mean"] for each in watched.of("evaluation")}


async def test_a_student_comes_near_to_its_teacher(tmp_path: Path) -> None:
    """By the sampled token alone, and, in fewer steps, by whole distributions."""
    teacher = await taught(tmp_path / "teacher")
    watched, held_out = await learn(
        tmp_path / "student", 40, model__reference=teacher, algorithm__name="distillation"
    )
    steps = watched.of("step")
    assert steps[0]["reverse_kl"] > 2
    assert steps[-1]["reverse_kl"] < 0.5 * steps[0]["reverse_kl"]
    assert held_out[40] > held_out[0] + 0.3

    for divergence, top_k in (("forward", 4), ("reverse", 49), ("js", 4)):
        watched, held_out = await learn(
            tmp_path / divergence,
            20,
            model__reference=teacher,
            algorithm__name="gkd",
            algorithm__options={"divergence": divergence, "top_k": top_k},
        )
        steps = watched.of("step")
        assert steps[-1]["divergence"] < 0.5 * steps[0]["divergence"]
        assert 0.5 < steps[0]["teacher_mass"] <= 1 + 1e-5
        assert steps[0]["policy_mass"] < steps[-1]["policy_mass"] + 1e-5
        assert held_out[20] > held_out[0] + 0.3


@pytest.mark.parametrize(("teacher", "gain"), [("frozen", 0.3), ("current", 0.0)])
async def test_a_policy_learns_what_it_knows_when_it_sees_the_answer(
    teacher: str, gain: float, tmp_path: Path
) -> None:
    """It has learned to copy an answer that stands in its prompt, and does not know it without. A
    teacher that is trained itself forgets some of it."""
    template = "{prompt}{answer}"
    copies = await taught(tmp_path / "copies", prompts__template=template)
    watched, held_out = await learn(
        tmp_path / "student",
        40,
        model__source=copies,
        algorithm__name="opsd",
        algorithm__options={"template": template, "top_k": 8, "teacher": teacher},
    )
    steps = watched.of("step")
    assert steps[-1]["divergence"] < 0.5 * steps[0]["divergence"]
    assert held_out[0] < 0.5
    assert held_out[40] > held_out[0] + gain


async def test_successful_responses_teach_the_others_of_their_group(tmp_path: Path) -> None:
    """Those of groups without any are dropped, and others are generated."""
    copies = await taught(tmp_path / "copies", prompts__template="{prompt}{answer}")
    options = {"template": "{prompt}{solution}", "top_k": 8, "success_reward": 0.25}
    watched, _ = await learn(
        tmp_path / "student",
        6,
        model__source=copies,
        algorithm__name="sdpo",
        algorithm__options=options,
    )
    for step in watched.of("step"):
        assert 0 < step["divergence"] < 10
    ledger = watched.of("ledger")[-1]
    assert ledger["dropped"].keys() <= {NO_SUCCESS}


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


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"algorithm__options": {"top_k": 50}}, r"top_k = 50: is more than the 49 tokens"),
        (
            {"external__stages": ["reference"]},
            r"external\.stages = .*: has 'reference', which gives logprobs of sampled tokens alone",
        ),
        (
            {"algorithm__name": "opsd", "algorithm__options": {"template": "{prompt} {answer"}},
            r"options\.template = .*: is no template",
        ),
        ({"algorithm__name": "sdpo", "algorithm__group_size": 1}, r"group_size = 1: is too small"),
    ],
)
def test_a_teacher_of_distributions_that_does_not_fit_is_refused(
    changes: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(RecipeError, match=wrong):
        recipe(TINY, **{"algorithm__name": "gkd", **changes})
