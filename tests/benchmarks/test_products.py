"""The choice of a product of strategies by the planner's formulas."""

from __future__ import annotations

import math
from pathlib import Path

from transformers import Qwen3MoeConfig

from benchmarks.planning.products import Machine, Model, best, main
from stages.parallel.layout import Layout

CONFIG = Qwen3MoeConfig(
    hidden_size=512,
    intermediate_size=1024,
    moe_intermediate_size=256,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=16,
    num_experts_per_tok=2,
    vocab_size=4096,
)


def test_the_shortest_step_of_those_that_fit_is_chosen() -> None:
    model = Model.of(CONFIG)
    seconds = []
    for memory in (8e9, 1.6e9):
        found = best(model, Machine(memory, 1e14, 4, 1e11, 1e10), 4, 16, 8192)
        assert found
        assert all(each["memory"] <= memory for each in found)
        assert all(
            math.prod(each["product"].get(n, 1) for n in ("dp", "tp", "cp", "pp")) == 4
            for each in found
        )
        assert all(Layout.for_training(**each["product"]).world == 4 for each in found)
        seconds.append(found[0]["seconds"])
        assert seconds[-1] == min(each["seconds"] for each in found)
    assert seconds == sorted(seconds), "less memory, a longer step"
    slow = best(model, Machine(8e9, 1e14, 4, 1e9, 1e8), 4, 16, 8192)
    assert slow[0]["seconds"] > seconds[0], "slower links, a longer step"
    assert not best(model, Machine(1e7, 1e14, 4, 1e11, 1e10), 4, 16, 8192)


def test_a_model_in_a_folder_is_taken(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path / "own")
    options = [
        "--ranks",
        "2",
        "--rows",
        "16",
        "--tokens",
        "2048",
        "--json",
        str(tmp_path / "found.json"),
    ]
    assert main(["--model", str(tmp_path / "own"), *options]) == 0
    assert '"own"' in (tmp_path / "found.json").read_text()
