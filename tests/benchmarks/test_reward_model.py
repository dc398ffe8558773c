"""A reward model that is trained on pairs ranks held-out ones, as the reward function reads it."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks.harness import read_result
from benchmarks.learning import reward_model
from stages.rewards import judge
from tests.stages.rewards.test_judge import CHAT, classifier_in


def test_it_ranks_pairs_that_it_has_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    classifier_in(base, 1, CHAT)
    words = random.Random(0)
    pairs = [
        {
            "prompt": "".join(words.choices("abcd", k=4)),
            "chosen": "".join(words.choices("efgh", k=4)),
            "rejected": "".join(words.choices("ijkl", k=4)),
        }
        for _ in range(40)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    out = tmp_path / "reward-model"
    options = {
        "--base": base,
        "--pairs": tmp_path / "pairs.jsonl",
        "--out": out,
        "--learning-rate": 1e-2,
        "--json": tmp_path / "result.json",
    }
    arguments = [str(part) for option in options.items() for part in option]
    monkeypatch.setattr(sys, "argv", ["reward_model", *arguments])
    reward_model.main()

    result = read_result(tmp_path / "result.json")
    assert (result["trained_pairs"], result["held_out_pairs"]) == (32, 8)
    assert result["accuracy"] == 1
    assert result["losses"][-1] < result["losses"][0]
    chosen, rejected = (
        judge.reward_model(
            [pair["prompt"] for pair in pairs],
            [pair[which] for pair in pairs],
            [str(out)] * len(pairs),
        )
        for which in ("chosen", "rejected")
    )
    assert all(one > other for one, other in zip(chosen, rejected, strict=True))
