"""Runs whose prompts bring their responses: supervised fine-tuning and preference pairs, from a
file."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestration.recipe.checks.other_models import teacher_is_needed
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sections import TeacherSection
from orchestration.recipe.sizes.planner import notices_of
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.model.load import load_model, load_tokenizer
from stages.prompts.rows.files import PromptError
from stages.prompts.rows.options import PromptOptions
from stages.prompts.sources import load_prompts
from tests.orchestration.run.test_run import assert_nothing_left
from tests.orchestration.runs import TINY, complete, recipe


def pairs(path: Path, count: int = 200) -> Path:
    """Preferred: the prompt's first letter, four times, as messages after the prompt's.

    Rejected: its second letter.
    """
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            good, bad = rng.sample("abcdefgh", 2)
            chosen = [
                {"role": "user", "content": f"{good}{bad}="},
                {"role": "assistant", "content": good * 4},
            ]
            row = {
                "prompt": f"{good}{bad}=",
                "chosen": chosen,
                "rejected": bad * 4,
                "answer": good * 4,
            }
            file.write(json.dumps(row) + "\n")
    return path


def from_file(path: Path, responses: list[str], **changes: Any) -> Any:
    data = {
        **TINY,
        "prompts": {"source": "jsonl", "path": str(path), "max_prompt_tokens": 16, "held_out": 0.1},
    }
    return recipe(
        data, prompts__responses=responses, algorithm__group_size=len(responses), **changes
    )


SFT: dict[str, Any] = {
    **TINY,
    "prompts": {
        "source": "builtin",
        "task": "repeat",
        "responses": ["answer"],
        "max_prompt_tokens": 16,
    },
    "algorithm": {"name": "sft", "group_size": 1},
}


async def test_pairs_from_a_file_are_learned_without_generating_anything(tmp_path: Path) -> None:
    made = from_file(
        pairs(tmp_path / "pairs.jsonl"),
        ["chosen", "rejected"],
        algorithm__name="dpo",
        rollout__max_tokens=5,
        train__steps=12,
        train__groups_per_step=16,
    )
    watched, _ = await complete(Execution(RunFolder.create(made, tmp_path / "run")))
    steps = [event.data for event in watched.events if event.kind == "step"]
    assert len(steps) == 12
    assert steps[0]["preference_accuracy"] == 0.0, "policy and reference are the same"
    assert steps[-1]["preference_accuracy"] > 0.9
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert not any(
        event.data["worker"].startswith("rollout")
        for event in watched.events
        if event.kind == "worker"
    )
    samples = [
        json.loads(line)
        for file in (tmp_path / "run").glob("samples/*.jsonl")
        for line in file.open()
    ]
    assert all(sample["response"] == sample["prompt"][sample["place"]] * 4 for sample in samples)
    assert {sample["place"]: sample["reward"] for sample in samples} == {0: 1.0, 1: 0.0}
    assert all(sample["tokens"] == 5 for sample in samples), "four letters and the end of sequence"
    assert_nothing_left(watched.run)


async def test_supervised_fine_tuning_with_an_evaluation(tmp_path: Path) -> None:
    made = from_file(
        pairs(tmp_path / "pairs.jsonl"),
        ["answer"],
        algorithm__name="sft",
        rollout__max_tokens=5,
        train__steps=30,
        train__groups_per_step=64,
        evaluate__every=30,
        evaluate__prompts=8,
    )
    watched, _ = await complete(Execution(RunFolder.create(made, tmp_path / "run")))
    steps = [event.data for event in watched.events if event.kind == "step"]
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    held_out = {
        e.data["version"]: e.data["reward_mean"] for e in watched.events if e.kind == "evaluation"
    }
    assert held_out[30] > held_out[0] + 0.3
    assert_nothing_left(watched.run)


def response_logprob(of: Recipe, prompt: str, response: str) -> tuple[float, int]:
    """The sum of the logprobs of a response and of the end token under the model that the run
    begins with, by a plain forward in float64; and the number of these tokens."""
    model, tokenizer = load_model("tiny", dtype=torch.float64, seed=of.seed)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer = [*tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    with torch.no_grad():
        logits = model(torch.tensor([[*ids, *answer]])).logits[0, len(ids) - 1 : -1]
    return float(
        -torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
    ), len(answer)


def trained_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in folder.glob("samples/*.jsonl") for line in file.open()]


# Each of them changes what is sampled, and nothing is.
SAMPLING: dict[str, Any] = {
    "rollout__temperature": 0.5,
    "rollout__top_p": 0.7,
    "rollout__top_k": 3,
    "rollout__stop": ["a"],
}


@pytest.mark.parametrize("evaluated", [0, 1])
async def test_sampling_options_do_not_change_the_cross_entropy(
    tmp_path: Path, evaluated: int
) -> None:
    """With evaluations the engine's logprobs are compared with the trainer's after each swap, at
    the same temperature."""
    made = from_file(
        pairs(tmp_path / "pairs.jsonl"),
        ["answer"],
        algorithm__name="sft",
        rollout__max_tokens=5,
        train__steps=2,
        evaluate__every=evaluated,
        **SAMPLING,
    )
    watched, result = await complete(Execution(RunFolder.create(made, tmp_path / "run")))
    assert result.state == "finished", result.reason
    first = watched.of("step")[0]
    rows = [row for row in trained_rows(tmp_path / "run") if row["step"] == 1]
    of_rows = [response_logprob(made, row["prompt"], row["response"]) for row in rows]
    assert len(rows) == made.train.groups_per_step
    expected = -sum(logprob for logprob, _ in of_rows) / sum(tokens for _, tokens in of_rows)
    assert first["loss"] == pytest.approx(expected, rel=1e-5)
    assert first["truncated"] == 0.0
    swaps = [event for event in watched.of("sync") if event.get("gap_max") is not None]
    assert bool(swaps) == bool(evaluated)
    assert all(event["gap_max"] < 1e-3 for event in swaps)


async def test_sampling_options_do_not_change_the_logprobs_of_pairs(tmp_path: Path) -> None:
    """With a reference of its own: its logprobs are at temperature 1 too, so that the first margin
    is zero."""
    options = {"rollout__max_tokens": 5, "train__steps": 1, **SAMPLING}
    made = from_file(
        pairs(tmp_path / "pairs.jsonl"), ["chosen", "rejected"], algorithm__name="dpo", **options
    )
    watched, result = await complete(Execution(RunFolder.create(made, tmp_path / "run")))
    assert result.state == "finished", result.reason
    [step] = watched.of("step")
    chosen = [row for row in trained_rows(tmp_path / "run") if row["place"] == 0]
    expected = sum(
        response_logprob(made, row["prompt"], row["response"])[0] for row in chosen
    ) / len(chosen)
    assert step["chosen_logprob"] == pytest.approx(expected, rel=1e-5)
    assert step["reward_margin"] == pytest.approx(0.0, abs=1e-5)
    assert step["loss"] == pytest.approx(math.log(2), rel=1e-5)


def test_a_temperature_without_effect_is_noticed(tmp_path: Path) -> None:
    path = pairs(tmp_path / "pairs.jsonl")
    [notice] = notices_of(
        from_file(path, ["answer"], algorithm__name="sft", rollout__temperature=0.5)
    )
    assert notice.key == "rollout.temperature"
    assert "nothing is sampled" in str(notice)
    assert not notices_of(from_file(path, ["answer"], algorithm__name="sft"))


def test_a_teacher_behind_a_server_gives_logprobs_of_pairs_at_any_sampling_temperature(
    tmp_path: Path,
) -> None:
    """It gives them at temperature 1, and so they are."""
    teacher = TeacherSection(url="http://127.0.0.1:9/v1")
    given = from_file(
        pairs(tmp_path / "pairs.jsonl"), ["chosen", "rejected"], algorithm__name="dpo", **SAMPLING
    )
    online = recipe(TINY, algorithm__name="dpo", rollout__temperature=0.5)
    found = [
        list(teacher_is_needed(of.model_copy(update={"teacher": teacher})))
        for of in (given, online)
    ]
    assert [[problem.key for problem in problems] for problems in found] == [
        [],
        ["rollout.temperature"],
    ]


async def test_a_longer_response_is_cut_and_counts_as_truncated(tmp_path: Path) -> None:
    made = from_file(
        pairs(tmp_path / "pairs.jsonl"),
        ["answer"],
        algorithm__name="sft",
        rollout__max_tokens=3,
        train__steps=1,
    )
    watched, _ = await complete(Execution(RunFolder.create(made, tmp_path / "run")))
    [step] = [event.data for event in watched.events if event.kind == "step"]
    assert step["truncated"] == 1.0
    assert step["response_length_mean"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"algorithm__name": "sft", "algorithm__group_size": 4},
            r"algorithm\.group_size = 4: is "
            r"not the number of",
        ),
        ({"algorithm__name": "grpo"}, r"algorithm\.name = \"grpo\": reads rollout_logprobs, but"),
        (
            {"algorithm__name": "sft", "external__stages": ["reward"]},
            "has 'reward', but prompts.responses are given",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    data = {
        **TINY,
        "prompts": {
            "source": "jsonl",
            "path": str(pairs(tmp_path / "pairs.jsonl")),
            "held_out": 0.1,
        },
    }
    with pytest.raises(RecipeError, match=message):
        recipe(
            data,
            **{"prompts__responses": ["chosen", "rejected"], "algorithm__group_size": 2, **changes},
        )


def test_a_row_without_its_response_is_named(tmp_path: Path) -> None:
    path = pairs(tmp_path / "pairs.jsonl", 3)
    with path.open("a") as file:
        file.write(json.dumps({"prompt": "ab=", "chosen": "aaaa", "rejected": None}) + "\n")
    with pytest.raises(RecipeError, match=r"line 4 has None in column 'rejected'"):
        from_file(path, ["chosen", "rejected"], algorithm__name="dpo")
    options = PromptOptions(source="jsonl", path=str(path), responses=["chosen", "rejected"])
    with pytest.raises(PromptError, match=r"line 4 has None in column 'rejected'"):
        load_prompts(options, load_tokenizer("tiny"), 0)


def test_rewards_are_needed_only_where_something_is_scored() -> None:
    given = {name: table for name, table in SFT.items() if name != "reward"}
    assert recipe(given, evaluate__every=0).reward.functions == []
    with pytest.raises(
        RecipeError,
        match=r"reward: is missing, and evaluate\.every asks for "
        r"evaluations, which score",
    ):
        recipe(given, evaluate__every=2, prompts__held_out=0.1)
    with pytest.raises(RecipeError, match=r"reward: is missing; add a \[reward\] section"):
        recipe({name: table for name, table in TINY.items() if name != "reward"})
    with pytest.raises(RecipeError, match=r"reward\.functions: is missing; name at least 1"):
        recipe({**TINY, "reward": {"timeout": 5.0}})


async def test_a_run_on_given_responses_needs_no_reward(tmp_path: Path) -> None:
    given = {name: table for name, table in SFT.items() if name != "reward"}
    watched, result = await complete(
        Execution(RunFolder.create(recipe(given, evaluate__every=0), tmp_path / "run"))
    )
    assert result.state == "finished", result.reason
    assert [step["step"] for step in watched.of("step")] == list(
        range(1, given["train"]["steps"] + 1)
    )
    assert watched.run.recipe.reward.functions == []
