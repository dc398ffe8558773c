"""The table of model families: its command runs, sees differences, and
docs/measurements/models.md has all
families."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engines.families import FAMILIES, LONGROPE, ROPE_CHANGE, WINDOW, model_of, write
from benchmarks.engines.models import (
    COLUMNS,
    LENGTH,
    PROMPTS,
    Failed,
    judged,
    main,
    plain_rows,
    refusal,
    sequences,
)
from stages.model.load import tiny_tokenizer
from stages.weights.verification.probe import ProbeRule

PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "models.md"


@pytest.mark.timeout(600)
def test_the_command_measures_each_column_of_a_dense_model_and_of_one_with_experts(
    tmp_path: Path,
) -> None:
    file = tmp_path / "models.json"
    families = ["--family", "Qwen3", "--family", "Qwen3-MoE"]
    assert main([*families, "--dtype", "float32", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["float32"]
    assert found.keys() == {"Qwen3", "Qwen3-MoE"}
    for name, cells in found.items():
        assert cells.keys() == {*COLUMNS} - {"vllm"}
        states = {column: cell["state"] for column, cell in cells.items()}
        assert states == dict.fromkeys(states, "works"), name


@pytest.mark.parametrize(
    ("family", "without"),
    [
        ("Mistral", {"sliding_window": None}),
        ("Gemma 2", {"sliding_window": 255}),
        ("Gemma 2", {"attn_logit_softcapping": None}),
        ("Gemma 2", {"final_logit_softcapping": None}),
        ("Granite", {"logits_scaling": 1.0}),
        ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("SmolLM3", {"no_rope_layers": [1, 1, 1, 1]}),
    ],
)
def test_what_a_family_has_shows_in_the_logprobs(family: str, without: dict[str, object]) -> None:
    """An engine that ignored it would be outside of the limits, in bfloat16's too."""
    model = model_of(family)
    other = model_of(family, **without)
    other.load_state_dict(model.state_dict())
    rows = sequences()
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(Failed, match="logprobs differ by"):
            judged(plain_rows(other, rows), plain_rows(model, rows), ProbeRule(dtype, 4))


def test_the_row_of_a_checkpoint_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write("Gemma 3", tmp_path / "my-gemma", torch.bfloat16)
    weights = (folder / "model.safetensors").read_bytes()
    arguments = [
        "--checkpoint",
        str(folder),
        "--dtype",
        "bfloat16",
        "--column",
        "rollout",
        "--column",
        "train",
    ]
    assert main(arguments) == 0
    assert re.search(
        r"^\| my-gemma \| \S+ / \S+ \| \S+ / \S+; g \S+ "
        r"\|$",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    assert (folder / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("Qwen2", {}, "no sliding window for some layers only (max_window_layers = 2)"),
        ("Qwen2", {"max_window_layers": 4}, ""),
        ("Gemma 2", {}, "caps attention otherwise (attn_logit_softcapping = 5)"),
        (
            "gpt-oss",
            {},
            "in one tensor (model.layers.0.mlp.experts.down_proj) at its start only, "
            "not from an update",
        ),
        ("Mixtral", {}, ""),
        ("DeepSeek-V3", {}, ""),
        ("DeepSeek-V3", {"scoring_func": None}, "(scoring_func = 'sigmoid' is missing there)"),
        ("DeepSeek-V3", {"kv_lora_rank": 256}, "and the model's has {'kv_lora_rank': 256,"),
        ("Qwen3", {"head_dim": 48}, "and the model's have 48"),
        ("GPT-2", {"n_head": 8}, "and the model's have 16"),
        ("Phi-3 longrope", {}, ""),
        (
            "Phi-3 longrope",
            {"rope_parameters": {**LONGROPE, "attention_factor": 1.5}},
            "no attention_factor of longrope",
        ),
    ],
)
def test_what_vllm_cannot_run_or_update_is_refused_by_a_property(
    family: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model_of(family, **changes).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    text = refusal(tmp_path, "float32", "vllm")
    assert (reason in text and "set rollout.engine = 'torch'" in text) if reason else text == ""


def test_sinks_show_in_the_logprobs() -> None:
    model = model_of("gpt-oss")
    rows = sequences()
    with_sinks = plain_rows(model, rows)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.constant_(parameter, -1e4)
    with pytest.raises(Failed, match="logprobs differ by"):
        judged(plain_rows(model, rows), with_sinks, ProbeRule(torch.bfloat16, 4))


def test_sequences_pass_the_window_and_the_length_at_which_rope_changes() -> None:
    assert min(PROMPTS) < WINDOW < max(PROMPTS) < ROPE_CHANGE < LENGTH
    lengths = [len(prompt) + len(response) for prompt, response in sequences()]
    assert min(lengths) < ROPE_CHANGE < max(lengths) == LENGTH


def test_the_page_has_every_family_with_every_column() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for dtype in ("float32", "bfloat16"):
        table = text.partition(f"**{dtype}**")[2].partition("\n\n**")[0].partition("\n\n1. ")[0]
        rows = [
            line.strip("| ").split(" | ") for line in re.findall(r"^\|.*\|$", table, re.MULTILINE)
        ]
        assert rows[0] == [*COLUMNS]
        assert [row[0] for row in rows[2:]] == list(FAMILIES)
        assert all(len(row) == len(COLUMNS) + 1 and "–" not in row for row in rows[2:])
    assert "FAILS" not in text
