"""Runs on responses of several turns: the loss is that of the assistant's tokens, given all that
stands before them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestration.recipe.schema import Recipe
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.model.load import load_model
from tests.orchestration.run.test_run import assert_nothing_left
from tests.orchestration.runs import TINY, complete, recipe

TEMPLATE = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '.' }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
Piece = tuple[str, bool]  # text, and whether it is trained


def turns(rng: random.Random) -> list[dict[str, str]]:
    roles = ["assistant", "user", "assistant", "user", "assistant"][: rng.choice([1, 3, 5])]
    return [
        {"role": role, "content": "".join(rng.choices("abcdefgh", k=rng.randint(1, 4)))}
        for role in roles
    ]


def of_rows(
    folder: Path, responses: list[str], **changes: Any
) -> tuple[Recipe, list[dict[str, Any]]]:
    rng = random.Random(1)
    rows = [{"prompt": f"{n:02d}", **{name: turns(rng) for name in responses}} for n in range(32)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "chat.jinja").write_text(TEMPLATE)
    prompts = {
        "source": "jsonl",
        "path": str(folder / "rows.jsonl"),
        "chat_template": str(folder / "chat.jinja"),
    }
    data = {**TINY, "prompts": {**prompts, "max_prompt_tokens": 16}, "evaluate": {"every": 0}}
    options = {
        "rollout__max_tokens": 48,
        "train__steps": 1,
        "train__groups_per_step": 32,
        **changes,
    }
    return recipe(
        data, prompts__responses=responses, algorithm__group_size=len(responses), **options
    ), rows


def pieces(response: list[dict[str, str]]) -> list[Piece]:
    """What a response is in the template, written by hand: an assistant's content with its full
    stop is trained, and the end token, as the template has none of its own."""
    found: list[Piece] = []
    for number, message in enumerate(response):
        if message["role"] == "user":
            found.append((f"u:{message['content']}.a:", False))
        else:
            end = "<eos>" if number == len(response) - 1 else ""
            found.append((f"{message['content']}.{end}", True))
    return found


def logprobs(of: Recipe, prompt: str, response: list[dict[str, str]]) -> list[float]:
    """The logprobs of the trained tokens, by a plain forward of the first model in float64."""
    model, tokenizer = load_model("tiny", dtype=torch.float64, seed=of.seed)
    ids = list(tokenizer(f"u:{prompt}.a:")["input_ids"])
    trained = list[int]()
    for text, is_trained in pieces(response):
        made = tokenizer(text)["input_ids"]
        trained += range(len(ids), len(ids) + len(made)) if is_trained else ()
        ids += made
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(rows[at - 1, ids[at]]) for at in trained]


async def test_the_cross_entropy_is_that_of_the_assistants_tokens(tmp_path: Path) -> None:
    of, rows = of_rows(tmp_path, ["answer"], algorithm__name="sft")
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    [step] = watched.of("step")
    of_tokens = [value for row in rows for value in logprobs(of, row["prompt"], row["answer"])]
    assert len({len(row["answer"]) for row in rows}) == 3
    assert step["loss"] == pytest.approx(-sum(of_tokens) / len(of_tokens), rel=1e-5)
    assert step["truncated"] == 0.0
    assert_nothing_left(watched.run)


async def test_pairs_of_conversations_compare_the_assistants_tokens(tmp_path: Path) -> None:
    of, rows = of_rows(tmp_path, ["chosen", "rejected"], algorithm__name="dpo")
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    [step] = watched.of("step")
    sums = [sum(logprobs(of, row["prompt"], row["chosen"])) for row in rows]
    assert step["chosen_logprob"] == pytest.approx(sum(sums) / len(sums), rel=1e-5)
    assert step["reward_margin"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("truncated", ["train", "mask"])
async def test_a_response_that_is_cut_before_its_end_is_trained_as_far_or_left_out(
    truncated: str, tmp_path: Path
) -> None:
    of, rows = of_rows(
        tmp_path,
        ["answer"],
        algorithm__name="sft",
        rollout__max_tokens=6,
        rollout__truncated=truncated,
    )
    whole = [
        row
        for row in rows
        if sum(len(text.replace("<eos>", "E")) for text, _ in pieces(row["answer"])) <= 6
    ]
    assert 0 < len(whole) < len(rows)
    _, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    samples = [
        json.loads(line)
        for file in (tmp_path / "run").glob("samples/*.jsonl")
        for line in file.open()
    ]
    assert len(samples) == 32
    if truncated == "train":
        assert sum(sample["truncated"] for sample in samples) == len(rows) - len(whole)
    else:
        assert not any(sample["truncated"] for sample in samples), (
            "others were taken in their place"
        )
        assert {sample["prompt"] for sample in samples} <= {row["prompt"] for row in whole}
