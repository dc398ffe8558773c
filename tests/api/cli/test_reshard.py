"""``asyncdock plan reshard``: the plan's figures before anything runs, and errors that say what to
write."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

from api.cli import main as cli
from orchestration.recipe.loading.load import load_recipe
from orchestration.recipe.sizes.planner import reshard_plan, turns
from stages.model.load import load_config
from stages.parallel.layout import Layout
from stages.parallel.placement import model_state, place, train_placement
from stages.resharding.plan import adamw_bytes, memory, plan_reshard
from tests.stages.resharding.models import SMALL, moe_config

runner = CliRunner()


def plan(*arguments: str) -> tuple[int, str, str]:
    result = runner.invoke(cli.app, ["plan", "reshard", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_json_has_the_plans_figures() -> None:
    code, out, _ = plan(
        "tiny", "--train", "dp=2,tp=2", "--rollout", "dp=4,tp=1", "--bucket", "16KiB", "--json"
    )
    report = json.loads(out)
    state = model_state(load_config("tiny"))
    train = train_placement(state, Layout.for_training(dp=2, tp=2))  # as the engine lays it out
    made = plan_reshard(
        train, place(state, Layout(dp_replicate=4), names="vllm"), bucket_bytes=16 * 1024
    )
    assert code == 0
    assert (report["bytes"], report["ranks"], report["rounds"]) == (
        state.nbytes,
        4,
        len(made.rounds),
    )
    assert (report["sent"], report["received"], report["kept"]) == tuple(
        map(list, (made.sent, made.received, made.kept))
    )
    for one, figures in zip(
        report["phases"], memory(made, adamw_bytes(train, gradients=False)), strict=True
    ):
        assert one["phase"] == figures.phase.value
        assert one["live"] == list(figures.live)
        assert max(one["temporary"]) <= 2 * 16 * 1024
    generate = next(one for one in report["phases"] if one["phase"] == "generate")
    assert generate["live"] == [state.nbytes] * 4  # nothing of training is left
    assert sum(report["naive"]["redundant"]) > 0


MIXED = ("model.dtype=bfloat16", "train.precision=mixed")
RECIPES = Path(__file__).resolve().parents[3] / "recipes"


@pytest.mark.parametrize(
    "settings", [("train.dp=2",), ("train.tp=2", "sync.bucket=16KiB"), ("train.dp=2", *MIXED)]
)
def test_without_layouts_it_is_the_swap_that_a_run_of_the_recipe_makes(
    settings: tuple[str, ...],
) -> None:
    """Its figures are those that a run's events are compared with
    (tests/orchestration/run/test_colocated.py)."""
    of = load_recipe(RECIPES / "colocated.toml", settings)
    made = reshard_plan(of)
    most = turns(of)
    code, out, _ = plan(
        "colocated", *(part for text in settings for part in ("--set", text)), "--json"
    )
    report = json.loads(out)
    phases = {one["phase"]: one for one in report["phases"]}
    assert (code, report["ranks"], report["notes"]) == (0, 2, [])
    assert (report["received"], report["kept"]) == (list(made.received), list(made.kept))
    assert report["bucket_bytes"] == of.sync.bucket
    assert max(phases["generate"]["live"]) == most.generating
    assert max(phases["gather"]["live"]) == most.between
    assert max(phases["gather"]["temporary"]) == most.buckets
    assert max(phases["prefetch"]["host"]) == most.host
    assert report["dtype"] == "float32"
    assert report["rollout_dtype"] == of.model.dtype
    assert report["bytes"] == model_state(load_config("tiny"), torch.float32).nbytes


def test_the_page_shows_what_the_command_prints() -> None:
    page = (RECIPES.parent / "docs" / "engines.md").read_text(encoding="utf-8")
    found = re.search(r"^\$ asyncdock plan reshard (.*)\n((?:.*\n)*?)```$", page, re.MULTILINE)
    assert found is not None
    _, out, _ = plan(*found[1].split())
    assert [line.rstrip() for line in out.splitlines()] == found[2].splitlines()


def test_engines_of_a_separate_recipe_are_planned_as_they_are_laid_out() -> None:
    vllm = ("--set", "rollout.engine=vllm", "--set", "rollout.vllm.tensor_parallel=2")
    code, out, _ = plan("tiny", *vllm, "--train", "dp=2,tp=2", "--json")
    report = json.loads(out)
    assert (code, report["rollout"]) == (0, "dp_replicate=2,tp=2")
    assert ["launch.placement = 'separate'" in note for note in report["notes"]] == [True]
    code, out, err = plan("tiny", *vllm)
    assert (code, out) == (2, "")
    assert "--rollout: 'tp=2' has 2 ranks where --train 'one rank' has 1; they take turns" in err


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (
            "tp=4",
            "train.tp = 4: cannot share the model's num_key_value_heads = 2 evenly; use one of: 1, "
            "2",
        ),
        (
            "etp=2,tp=2,pp=2",
            "etp=2: the train engine has no expert tensor parallelism, only dp, cp, tp, pp and ep",
        ),
        ("pp=2,tp=2", None),
        ("dp_replicate=2,tp=2", None),
        ("dp=2,tp=2", None),
    ],
)
def test_a_layout_that_the_train_engine_does_not_run_is_planned_and_named(
    layout: str, expected: str | None
) -> None:
    code, out, _ = plan("tiny", "--train", layout, "--rollout", "dp=4")
    assert code == 0
    assert "naive: gather, slice, keep both" in " ".join(out.split())
    assert ("! the train engine does not run this layout: " in " ".join(out.split())) == (
        expected is not None
    )
    if expected:
        assert expected in " ".join(out.split())


def test_a_model_that_the_engine_cannot_cut_is_named_in_its_words(tmp_path: Path) -> None:
    AutoConfig.for_model("granite_swa", **SMALL).save_pretrained(tmp_path)
    of = ("tiny", "--set", f"model.source={tmp_path}", "--json", "--rollout", "dp=2")
    cut, whole = (
        json.loads(plan(*of, "--train", layout)[1])["notes"] for layout in ("tp=2", "dp=2")
    )
    assert whole == []
    assert re.fullmatch(
        r"the train engine does not run this layout: tp: .* this engine knows .*; "
        r"use tp = 1",
        cut[0],
    )


def test_the_table_fits_a_terminal_and_names_phases_and_ranks() -> None:
    sets = ("--set", "model.dtype=bfloat16", "--set", "train.precision=model")
    code, out, _ = plan("tiny", "--train", "dp=4", "--rollout", "tp=2,dp=2", *sets)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "tiny in bfloat16: 150.8 KiB" in out
    for phase in ("train", "offload state", "gather", "offload weights", "generate", "prefetch"):
        assert any(line.startswith(phase) for line in out.splitlines())
    assert [
        line.split()[0] for line in out.splitlines() if line[:1].isdecimal() and "ranks" not in line
    ] == list("0123")


def test_a_checkpoint_is_planned_without_its_weights(tmp_path: Path) -> None:
    moe_config().save_pretrained(tmp_path)
    code, out, _ = plan(
        "tiny",
        "--set",
        f"model.source={tmp_path}",
        "--train",
        "dp_replicate=2,tp=2,ep=2,ep_order=outer",
        "--rollout",
        "dp=4,ep=4",
        "--json",
    )
    report = json.loads(out)
    assert code == 0
    assert report["expert_bytes"] > 0
    assert sum(report["naive"]["redundant"]) > 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("tiny", "dp=4", "tp=2"),
            "--rollout: 'tp=2' has 2 ranks where --train 'dp=4' has 4; they take turns",
        ),
        (("tiny", "xp=4", "tp=4"), "--train xp: is no part of a layout; use dp,"),
        (
            ("tiny", "dp=4", "tp=four"),
            "--rollout tp: 'four' is no number of ranks; write for example tp=2",
        ),
        (
            ("tiny", "dp=4,ep=2", "tp=4"),
            "layout of tiny: ep: 2 for a model with no experts; use ep <= 1",
        ),
        (
            ("tiny", "pp=3", "tp=3"),
            "layout of tiny: pp: 3 stages are more than the 2 layers; use pp <= 2",
        ),
        (("mock", "dp=4", "tp=4"), "model.source: 'mock' has no parameters to lay out; use 'tiny'"),
        (
            ("tiny", "dp=4", "tp=4", "--bucket", "9"),
            "--bucket: '9' is less than 1024 bytes; use for example 4MiB",
        ),
        (
            ("tiny", "dp=4", "tp=4", "--bucket", "much"),
            "--bucket: 'much' is not a size; write a whole number",
        ),
        (
            ("tiny", "dp=4", "tp=4", "--ranks-per-node", "0"),
            "--ranks-per-node: 0 is no number of ranks; use a whole",
        ),
    ],
)
def test_wrong_input_is_refused_with_what_to_write(
    arguments: tuple[str, ...], expected: str
) -> None:
    recipe, train, rollout, *more = arguments
    code, out, err = plan(recipe, "--train", train, "--rollout", rollout, *more)
    assert (code, out) == (2, "")
    assert expected in err


def test_a_model_that_cannot_be_laid_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "num_hidden_layers": 2}')
    code, _, err = plan(
        "tiny", "--set", f"model.source={tmp_path}", "--train", "dp=2", "--rollout", "dp=2"
    )
    assert code == 2
    assert "num_attention_heads: mamba has none; use a decoder with attention" in err
    (tmp_path / "config.json").write_text("{")
    code, _, err = plan(
        "tiny", "--set", f"model.source={tmp_path}", "--train", "dp=2", "--rollout", "dp=2"
    )
    assert code == 2
    assert f"model.source: '{tmp_path}' cannot be planned" in err
