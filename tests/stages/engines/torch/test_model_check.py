"""The comparison of `asyncdock check`: a small model in float32, past its windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engines.families import FAMILIES, config_of
from stages.engines.registry import Side
from stages.engines.torch import model_check
from stages.engines.torch.decoding import decoder
from stages.engines.torch.model import packed_model, packing
from stages.engines.torch.model.attention import Scores


@pytest.fixture(autouse=True)
def _anew() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model_check._refusal.cache_clear()
    yield
    torch.set_num_threads(threads)
    model_check._refusal.cache_clear()


@pytest.mark.parametrize("side", ["rollout", "train"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes(family: str, side: Side, tmp_path: Path) -> None:
    config_of(family).save_pretrained(tmp_path)
    assert model_check.refusal(tmp_path, side) == ""


@pytest.mark.parametrize("side", ["rollout", "train"])
@pytest.mark.parametrize(
    ("family", "left_out", "changes"),
    [
        ("Mistral", "window", {"sliding_window": 4096}),
        ("Gemma 2", "window", {"sliding_window": 4096}),
        ("Gemma 2", "softcap", {"attn_logit_softcapping": 50.0}),
        ("gpt-oss", "window", {"sliding_window": 128}),
    ],
)
def test_a_feature_that_is_left_out_is_refused(
    family: str,
    left_out: str,
    changes: dict[str, Any],
    side: Side,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Wrong(Scores):
        @classmethod
        def of(cls, query: Any, options: Any, fused: bool = True) -> Scores:
            found = Scores.of(query, options, fused)
            window = None if left_out == "window" else found.window
            return Scores(
                found.scaling, window, None if left_out == "softcap" else found.softcap, fused
            )

    for module in (packing, decoder):
        monkeypatch.setattr(module, "Scores", Wrong)
    config_of(family, **changes).save_pretrained(tmp_path)
    assert "logits that are off" in model_check.refusal(tmp_path, side)


@pytest.mark.parametrize("side", ["rollout", "train"])
def test_left_out_sinks_and_caps_of_logits_are_refused(
    side: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if side == "train":
        monkeypatch.setattr(packed_model, "logit_scale", lambda config: (1.0, None))
        for family in ("Granite", "Gemma 2"):
            config_of(family).save_pretrained(tmp_path)
            assert "logits that are off" in model_check.refusal(tmp_path, side), family
    name = "shared_prompt_attention" if side == "train" else "_two_part_attention"
    module = packed_model if side == "train" else decoder
    attention = getattr(module, name)
    monkeypatch.setattr(
        module, name, lambda *given, s_aux=None, **options: attention(*given, **options)
    )
    config_of("gpt-oss").save_pretrained(tmp_path)
    assert "logits that are off" in model_check.refusal(tmp_path, side)
