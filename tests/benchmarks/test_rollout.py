"""The rollout benchmark's floor is what its docstring says, and every arm makes the same tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.engines.rollout import PARTS, Case, Machine, Sizes, floor_seconds, main
from stages.model.load import load_model


def tiny() -> Sizes:
    return Sizes.of(load_model("tiny", dtype=torch.float32, seed=0)[0])


def test_sizes_count_every_linear_weight_once() -> None:
    sizes = tiny()
    assert sizes.body == 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)
    assert sum(i * o * count for i, o, count in sizes.shapes) == sizes.body
    assert sizes.head == sizes.head_shape[0] * sizes.head_shape[1]
    assert sizes.kv == 2 * 2 * 32  # keys and values, layers, two heads of 16


@pytest.mark.parametrize("group", [1, 4])
def test_the_floor_adds_up_matmuls_and_attention(group: int) -> None:
    sizes = tiny()
    case = Case(8, group, 3, prompt=10)
    machine = Machine(rate=1e9, bandwidth=1e18)
    prompts = 8 // group
    fed = prompts * 10 + 8 + 8
    predicted = prompts + 8 + 8
    pairs = prompts * 50 + 8 * 11 + 8 * 12
    operations = (
        2 * (sizes.body * fed + sizes.head * predicted) + 4 * sizes.layers * sizes.attention * pairs
    )
    found = floor_seconds(sizes, case, machine, lambda i, o, tokens: 2 * i * o * tokens / 1e9)
    assert found == pytest.approx(operations / 1e9)


def test_the_floor_of_slow_memory_is_what_is_read() -> None:
    sizes = tiny()
    case = Case(8, 4, 3, prompt=10)
    machine = Machine(rate=1e18, bandwidth=1e6)
    weights = sizes.body + sizes.head
    cached = (20 + 8) + (20 + 16)  # a group's prompt is read once
    found = floor_seconds(sizes, case, machine, lambda i, o, tokens: 0.0)
    assert found == pytest.approx(4 * (3 * weights + sizes.kv * cached) / 1e6)


def test_the_smoke_run_has_all_arms_make_the_same_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--smoke", "--threads", "1", "--json", str(tmp_path / "rollout.json")])
    result = json.loads((tmp_path / "rollout.json").read_text())
    assert [(row["rows"], row["group"], row["tokens"]) for row in result["cases"]] == [
        (4, 2, 3),
        (2, 1, 4),
    ]
    for row in result["cases"]:
        assert row["bfloat16_tokens_per_s"] > 0
        assert list(row["arms"]) == ["ours", "generate", "continuous"]
        assert row["seconds_against_fastest"] >= 1.0
        for arm in row["arms"].values():
            assert arm["rows_equal_to_ours"] == 1.0
            assert arm["tokens_per_s"] == pytest.approx(
                row["floor_tokens_per_s"] * arm["share_of_floor"]
            )
    assert "vllm: left out" in capsys.readouterr().out


def test_the_profile_names_every_part_of_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--smoke", "--threads", "1", "--profile"])
    *_, header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == [
        *("rows", "×", "tokens", "all", "linear", "head", "attention", "norms,", "rope"),
        *("sampling", "prefill", "Python", "operators"),
    ]
    for line in (first, second):
        total, *parts = (float(found) for found in re.findall(r"(-?\d+\.\d+)", line))
        assert len(parts) == len(PARTS) + 1
        assert min(parts[:-1]) > 0
        assert sum(parts) == pytest.approx(total, abs=0.1)
