"""Called models on several ranks: what one process gives, whatever is shared out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stages.calls.packing import plan
from stages.model.load import tiny_model, tiny_tokenizer
from tests.ranks import on_ranks
from tests.stages.calls import ranks
from tests.stages.calls.data import sampled


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("base") / "tiny"
    tiny_model(3, torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def assert_equal(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """To 1e-6: logprobs, metrics, and norms of gradients."""
    for step, expected in zip(got, wanted, strict=True):
        assert step["norm"] == pytest.approx(expected["norm"], rel=1e-6)
        for (rows, metrics), (expected_rows, expected_metrics) in zip(
            step["outputs"], expected["outputs"], strict=True
        ):
            for row, expected_row in zip(rows, expected_rows, strict=True):
                assert row.shape == expected_row.shape
                assert np.allclose(row, expected_row, rtol=1e-6, atol=1e-6)
            assert metrics.keys() == expected_metrics.keys()
            for name in metrics.keys() - {"fed_tokens:sum"}:
                # of sums over some forty tokens
                assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-6, abs=4e-5)


@pytest.mark.parametrize(
    ("kind", "dp", "tp"),
    [("adapter", 2, 1), ("adapter", 1, 2), ("head", 1, 2), ("whole", 2, 1), ("whole", 2, 2)],
)
def test_ranks_give_what_one_process_gives(source: str, kind: str, dp: int, tp: int) -> None:
    of_ranks = on_ranks(dp, tp, ranks.steps, source, kind)
    assert_equal(of_ranks[0], ranks.steps(None, source, kind))


def test_a_model_without_files_is_shared_too() -> None:
    of_ranks = on_ranks(2, 1, ranks.steps, "tiny", "head")
    assert_equal(of_ranks[0], ranks.steps(None, "tiny", "head"))


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)])
def test_models_side_by_side_share_the_base_and_get_the_bits_that_each_gets_alone(
    source: str, dp: int, tp: int
) -> None:
    for of_rank in on_ranks(dp, tp, ranks.side_by_side, source):
        assert of_rank["same"]
        # one of 49 rows is filled up on a rank, each time
        assert of_rank["copied"] <= {"model.embed_tokens.weight"}


def test_all_ranks_refuse_what_one_of_them_cannot_do(source: str, tmp_path: Path) -> None:
    first, second = on_ranks(2, 1, ranks.refusals, source, str(tmp_path))
    assert first["same"]
    assert second["same"]
    assert "data.1: its importance_sampling loss is" in first["messages"][0]
    for at, expected in enumerate(
        ("data.1: its imp", "data.1: its imp", "a gradient is not finite", "data: is empty")
    ):
        assert expected in first["messages"][at]
        assert first["messages"][at] == second["messages"][at]
    assert "cannot be read by another rank" in first["messages"][4]
    assert "missing" in second["messages"][4]
    assert "no gradients" in first["messages"][5] == second["messages"][5]


@pytest.mark.parametrize("kind", ranks.KINDS)
def test_a_checkpoint_of_some_ranks_goes_on_with_others(
    source: str, kind: str, tmp_path: Path
) -> None:
    """Files are the same, and one step more after each: one process, two ranks, one process."""
    names = ("first", "second", "third")
    first, second, third = (str(tmp_path / name) for name in names)
    norm = ranks.saved(None, source, kind, first, "")
    ranks.saved(None, source, kind, str(tmp_path / "expected"), first)
    of_two = on_ranks(1, 2, ranks.saved, source, kind, second, first)[0]
    ranks.saved(None, source, kind, third, second)
    assert norm > 0
    assert of_two > 0

    def files(folder: Path) -> set[Path]:
        return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}

    assert files(tmp_path / "second") == files(tmp_path / "expected") == files(tmp_path / "third")
    for path in (tmp_path / "expected").rglob("*.safetensors"):
        name = path.relative_to(tmp_path / "expected")
        expected = load_file(path)
        got = load_file(tmp_path / "second" / name)
        assert got.keys() == expected.keys(), name
        for key, value in expected.items():
            assert torch.allclose(got[key], value, rtol=1e-4, atol=2e-5), (name, key)


def test_replicas_have_even_shares_and_compute_few_beginnings_twice() -> None:
    groups = [datum.tokens for datum in sampled(prompts=(30, 30, 30, 30), group=4)]
    plans, fed = plan(groups, 64, 2)
    assert sorted(n for share in plans for each in share for n in each.data) == [*range(16)]
    assert fed == plan(groups, 64)[1], "each group has a replica of its own"
    one_group = [datum.tokens for datum in sampled(prompts=(30,), group=16)]
    shares, fed = plan(one_group, None, 2)
    assert fed == plan(one_group, None)[1] + 30, "its beginning is computed on both"
    assert [len(each.data) for share in shares for each in share] == [8, 8]
    assert [len(share) for share in plan(groups[:1], None, 3)[0]] == [1, 0, 0]
