"""``asyncdock plan reshard``: the plan's figures before anything runs, and errors that say what to write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api import cli
from stages.models import load_config
from stages.resharding.layout import Layout, model_state, place
from stages.resharding.plan import adamw_bytes, memory, plan_reshard
from tests.stages.resharding.models import moe_config

runner = CliRunner()


def plan(*arguments: str) -> tuple[int, str, str]:
    result = runner.invoke(cli.app, ["plan", "reshard", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_json_has_the_plans_figures() -> None:
    code, out, _ = plan("tiny", "--train", "dp=2,tp=2", "--rollout", "dp=4,tp=1", "--bucket", "16KiB", "--json")
    told = json.loads(out)
    state = model_state(load_config("tiny"))
    train = place(state, Layout(dp_shard=2, tp=2))
    made = plan_reshard(train, place(state, Layout(dp_replicate=4), names="vllm"), bucket_bytes=16 * 1024)
    assert code == 0
    assert (told["bytes"], told["ranks"], told["rounds"]) == (state.nbytes, 4, len(made.rounds))
    assert (told["sent"], told["received"], told["kept"]) == tuple(map(list, (made.sent, made.received, made.kept)))
    for one, figures in zip(told["phases"], memory(made, adamw_bytes(train)), strict=True):
        assert one["phase"] == figures.phase.value
        assert one["live"] == list(figures.live)
        assert max(one["temporary"]) <= 2 * 16 * 1024
    generate = next(one for one in told["phases"] if one["phase"] == "generate")
    assert generate["live"] == [state.nbytes] * 4  # nothing of training is left
    assert sum(told["naive"]["redundant"]) > 0


def test_the_table_fits_a_terminal_and_names_phases_ranks_and_eq3() -> None:
    code, out, _ = plan("tiny", "--train", "dp=4", "--rollout", "tp=2,dp=2", "--set", "model.dtype=bfloat16")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "tiny in bfloat16: 150.8 KiB" in out
    for phase in ("train", "offload state", "gather", "offload weights", "generate", "prefetch"):
        assert any(line.startswith(phase) for line in out.splitlines())
    assert [line.split()[0] for line in out.splitlines() if line[:1].isdecimal() and "ranks" not in line] == list(
        "0123"
    )
    assert "Eq. 3" in out


def test_a_checkpoint_is_planned_without_its_weights(tmp_path: Path) -> None:
    moe_config().save_pretrained(tmp_path)
    code, out, _ = plan(
        "tiny", "--set", f"model.source={tmp_path}", "--train", "dp_replicate=2,tp=2,ep=2,ep_order=outer",
        "--rollout", "dp=4,ep=4", "--json",
    )  # fmt: skip
    told = json.loads(out)
    assert code == 0
    assert told["expert_bytes"] > 0
    assert sum(told["naive"]["redundant"]) == told["naive"]["eq3"] == told["naive"]["general"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tiny", "dp=4", "tp=2"), "--rollout: 'tp=2' has 2 ranks where --train 'dp=4' has 4; they take turns"),
        (("tiny", "xp=4", "tp=4"), "--train xp: is no part of a layout; use dp,"),
        (("tiny", "dp=4", "tp=four"), "--rollout tp: 'four' is no number of ranks; write for example tp=2"),
        (("tiny", "dp=4,ep=2", "tp=4"), "layout of tiny: ep: 2 for a model with no experts; use ep <= 1"),
        (("tiny", "pp=3", "tp=3"), "layout of tiny: pp: 3 stages are more than the 2 layers; use pp <= 2"),
        (("mock", "dp=4", "tp=4"), "model.source: 'mock' has no parameters to lay out; use 'tiny'"),
        (("tiny", "dp=4", "tp=4", "--bucket", "9"), "--bucket: '9' is less than 1024 bytes; use for example 4MiB"),
        (("tiny", "dp=4", "tp=4", "--bucket", "much"), "--bucket: 'much' is not a size; write a whole number"),
        (("tiny", "dp=4", "tp=4", "--ranks-per-node", "0"), "--ranks-per-node: 0 is no number of ranks; use a whole"),
    ],
)
def test_wrong_input_is_refused_with_what_to_write(arguments: tuple[str, ...], said: str) -> None:
    recipe, train, rollout, *more = arguments
    code, out, err = plan(recipe, "--train", train, "--rollout", rollout, *more)
    assert (code, out) == (2, "")
    assert said in err


def test_a_model_that_cannot_be_laid_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "num_hidden_layers": 2}')
    code, _, err = plan("tiny", "--set", f"model.source={tmp_path}", "--train", "dp=2", "--rollout", "dp=2")
    assert code == 2
    assert "num_attention_heads: mamba has none; use a decoder with attention" in err
    (tmp_path / "config.json").write_text("{")
    code, _, err = plan("tiny", "--set", f"model.source={tmp_path}", "--train", "dp=2", "--rollout", "dp=2")
    assert code == 2
    assert f"model.source: '{tmp_path}' cannot be planned" in err
