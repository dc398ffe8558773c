"""Runs whose prompts bring their responses: supervised fine-tuning and preference pairs, from a file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from orchestration.recipe.problems import RecipeError
from orchestration.run.run import Run
from stages.models import load_tokenizer
from stages.prompts.files import PromptError
from stages.prompts.options import PromptOptions
from stages.prompts.sources import load_prompts
from tests.orchestration.run.test_run import assert_nothing_left
from tests.orchestration.runs import TINY, complete, recipe


def pairs(path: Path, count: int = 200) -> Path:
    """Preferred: the prompt's first letter, four times, as messages after the prompt's. Rejected: its second letter."""
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            good, bad = rng.sample("abcdefgh", 2)
            chosen = [{"role": "user", "content": f"{good}{bad}="}, {"role": "assistant", "content": good * 4}]
            row = {"prompt": f"{good}{bad}=", "chosen": chosen, "rejected": bad * 4, "answer": good * 4}
            file.write(json.dumps(row) + "\n")
    return path


def from_file(path: Path, responses: list[str], **changes: Any) -> Any:
    data = {**TINY, "prompts": {"source": "jsonl", "path": str(path), "max_prompt_tokens": 16, "held_out": 0.1}}
    return recipe(data, prompts__responses=responses, algorithm__group_size=len(responses), **changes)


async def test_pairs_from_a_file_are_learned_without_generating_anything(tmp_path: Path) -> None:
    made = from_file(
        pairs(tmp_path / "pairs.jsonl"),
        ["chosen", "rejected"],
        algorithm__name="dpo",
        rollout__max_tokens=5,
        train__steps=12,
        train__groups_per_step=16,
    )
    watched, _ = await complete(Run.create(made, tmp_path / "run"))
    steps = [event.data for event in watched.events if event.kind == "step"]
    assert len(steps) == 12
    assert steps[0]["preference_accuracy"] == 0.0, "policy and reference are the same"
    assert steps[-1]["preference_accuracy"] > 0.9
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert not any(event.data["worker"].startswith("rollout") for event in watched.events if event.kind == "worker")
    samples = [json.loads(line) for file in (tmp_path / "run").glob("samples/*.jsonl") for line in file.open()]
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
    watched, _ = await complete(Run.create(made, tmp_path / "run"))
    steps = [event.data for event in watched.events if event.kind == "step"]
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    held_out = {e.data["version"]: e.data["reward_mean"] for e in watched.events if e.kind == "evaluation"}
    assert held_out[30] > held_out[0] + 0.3
    assert_nothing_left(watched.run)


async def test_a_longer_response_is_cut_and_counts_as_truncated(tmp_path: Path) -> None:
    made = from_file(
        pairs(tmp_path / "pairs.jsonl"), ["answer"], algorithm__name="sft", rollout__max_tokens=3, train__steps=1
    )
    watched, _ = await complete(Run.create(made, tmp_path / "run"))
    [step] = [event.data for event in watched.events if event.kind == "step"]
    assert step["truncated"] == 1.0
    assert step["response_length_mean"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm__name": "sft", "algorithm__group_size": 4}, r"algorithm\.group_size = 4: is not the number of"),
        ({"algorithm__name": "grpo"}, r"algorithm\.name = \"grpo\": reads rollout_logprobs, but"),
        ({"algorithm__name": "sft", "external__stages": ["reward"]}, "has 'reward', but prompts.responses are given"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    data = {**TINY, "prompts": {"source": "jsonl", "path": str(pairs(tmp_path / "pairs.jsonl")), "held_out": 0.1}}
    with pytest.raises(RecipeError, match=message):
        recipe(data, **{"prompts__responses": ["chosen", "rejected"], "algorithm__group_size": 2, **changes})


def test_a_row_without_its_response_is_named(tmp_path: Path) -> None:
    path = pairs(tmp_path / "pairs.jsonl", 3)
    with path.open("a") as file:
        file.write(json.dumps({"prompt": "ab=", "chosen": "aaaa", "rejected": None}) + "\n")
    with pytest.raises(RecipeError, match=r"line 4 has None in column 'rejected'"):
        from_file(path, ["chosen", "rejected"], algorithm__name="dpo")
    options = PromptOptions(source="jsonl", path=str(path), responses=["chosen", "rejected"])
    with pytest.raises(PromptError, match=r"line 4 has None in column 'rejected'"):
        load_prompts(options, load_tokenizer("tiny"), 0)
