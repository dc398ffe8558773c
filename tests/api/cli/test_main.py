"""The command asyncdock: what it says, what it refuses, and its exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from api.cli import local_run
from api.cli import main as cli
from api.schemas.runs import CheckedRecipe
from orchestration.recipe.loading.load import parse_recipe
from orchestration.recipe.sizes.planner import plan
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from tests.api import scripted

ROOT = Path(__file__).resolve().parents[3]
runner = CliRunner()


def asyncdock(*arguments: str) -> tuple[int, str, str]:
    result = runner.invoke(cli.app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


# --- recipes and check
# ------------------------------------------------------------------------------------------------


def test_recipes_are_listed_with_what_they_do() -> None:
    code, out, _ = asyncdock("recipes")
    assert code == 0
    for name in ("quickstart", "tiny", "mock"):
        line = next(line for line in out.splitlines() if line.startswith(name))
        assert len(line.split(maxsplit=1)[1]) > 10


def test_recipes_as_json_name_the_files_that_they_are() -> None:
    code, out, err = asyncdock("recipes", "--json")
    listed = {each["name"]: each for each in json.loads(out)}
    assert (code, err) == (0, "")
    assert listed["mock"]["path"] == str(ROOT / "recipes" / "mock.toml")
    assert (
        listed["mock"]["description"]
        == tomllib.loads((ROOT / "recipes" / "mock.toml").read_text())["description"]
    )
    assert asyncdock("check", listed["tiny"]["path"])[0] == 0


def test_the_keys_of_a_recipe_are_listed_with_their_meanings() -> None:
    code, out, _ = asyncdock("recipes", "--keys", "rollout.vllm", "--json")
    keys = json.loads(out)
    assert (code, keys[0]["key"], keys[0]["unit"]) == (0, "rollout.vllm.max_model_len", "tokens")
    assert all(key["key"].startswith("rollout.vllm.") and key["meaning"] for key in keys)
    code, out, _ = asyncdock("recipes", "--keys")
    assert code == 0
    assert (
        "train.steps  whole number ≥ 1, in steps; required\n    Optimizer steps of the whole run.\n"
        in out
    )
    assert all(
        key in out
        for key in (
            "train.steps",
            "pipeline.staleness",
            "prompts.source",
            "algorithm.options.kl_coef",
        )
    )
    assert asyncdock("recipes", "--keys", "rolout")[::2] == (
        2,
        "error: recipes: 'rolout' is no section of a recipe; did you mean 'rollout'?\n",
    )
    assert asyncdock("recipes", "train")[0] == 2


@pytest.mark.parametrize("name", ["quickstart", "tiny", "mock"])
def test_every_recipe_of_the_package_is_sound(name: str) -> None:
    code, out, err = asyncdock("check", name)
    assert (code, err) == (0, "")
    for word in ("staleness bound", "window", "in flight", "arena"):
        assert word in out


def test_check_prints_the_derived_numbers() -> None:
    sets = [
        "train.groups_per_step=5",
        "pipeline.staleness=3",
        "algorithm.group_size=4",
        "pipeline.window=6",
    ]
    code, out, _ = asyncdock("check", "mock", *(f"--set={text}" for text in sets))
    assert code == 0
    text = " ".join(out.split())
    assert "η = 3; the oldest that can occur is 3" in text
    assert "S = 2 steps" in text
    assert (
        "correction = truncate, proximal = interpolated, correction_level = token; with η = 3"
        in text
    )
    assert "5 groups, 20 samples" in text
    assert "≤ 15 groups, 60 samples" in text


def test_check_as_json_is_what_the_service_answers() -> None:
    """The recipe, which can be given back as it is, and its derived numbers; nothing of a wrong
    one."""
    code, out, err = asyncdock("check", "mock", "--set", "train.groups_per_step=5", "--json")
    checked = CheckedRecipe.model_validate_json(out)
    assert (code, err) == (0, "")
    assert asdict(checked.plan) == json.loads(out)["plan"]
    recipe = parse_recipe(checked.recipe)
    assert (recipe.train.groups_per_step, plan(recipe)) == (5, checked.plan)
    code, out, err = asyncdock("check", "mock", "--set", "train.steps=0", "--json")
    assert (code, out) == (2, "")
    assert "train.steps = 0" in err


def test_check_prints_the_memory_of_a_model() -> None:
    _, out, _ = asyncdock("check", "quickstart")
    assert "134,515,008 weights in float32" in out
    assert "2.004 GiB for weights, gradients and optimizer" in " ".join(out.split())
    *_, out, _ = asyncdock("check", "quickstart", "--set", "train.dp=2")
    assert "1.002 GiB for weights, gradients and optimizer on each of 2 ranks" in " ".join(
        out.split()
    )


def test_all_problems_are_reported_at_once_with_their_fixes() -> None:
    sets = [
        "train.stepz=3",
        "rollout.temperature=0",
        "pipeline.window=9",
        "model.dtype=float16",
        "nonsense",
    ]
    code, out, err = asyncdock("check", "mock", *(f"--set={text}" for text in sets))
    assert (code, out) == (2, "")
    assert "5 problems" in err
    for text in (
        "did you mean 'steps'?",
        "rollout.temperature = 0",
        "pipeline.window = 9",
        "did you mean 'bfloat16'?",
    ):
        assert text in err
    assert "is not key=value" in err


def test_run_refuses_a_wrong_recipe_before_anything_is_made(tmp_path: Path) -> None:
    code, _, err = asyncdock(
        "run", "mock", "--set", "train.steps=0", "--out", str(tmp_path / "out")
    )
    assert code == 2
    assert "train.steps = 0: is out of range; use a value >= 1" in err
    assert not (tmp_path / "out").exists()


def test_an_unknown_recipe_is_suggested_one() -> None:
    code, _, err = asyncdock("check", "quikstart")
    assert code == 2
    assert "did you mean 'quickstart'?" in err
    code, _, err = asyncdock("run", "somewhere/else.toml")
    assert code == 2
    assert "one of: " in err
    assert "tiny" in err


def test_a_recipe_of_ones_own_is_found_by_path_and_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    text = (ROOT / "recipes" / "mock.toml").read_text().replace('name = "mock"', 'name = "mine"')
    (tmp_path / "recipes" / "mine.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert asyncdock("check", "recipes/mine.toml")[0] == 0
    assert asyncdock("check", "mine")[0] == 0
    assert "mine" in asyncdock("recipes")[1]


def test_a_reward_where_the_caller_stands_can_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reward_here.py").write_text(
        "def short(completions, **_):\n    return [-len(c) for c in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    arguments = ["check", "mock", "--set", "reward.functions=[{name='reward_here:short'}]"]
    monkeypatch.setattr(sys, "argv", ["asyncdock", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert "mock: sound" in capsys.readouterr().out


# --- wrong input
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [["run"], ["run", "mock", "--wat"], ["check"], ["walk"], ["resume"], ["check", "mock", "tiny"]],
)
def test_wrong_usage_exits_with_two(arguments: list[str]) -> None:
    code, out, err = asyncdock(*arguments)
    assert code == 2
    assert "Usage" in out + err


def test_a_folder_that_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("keep")
    code, _, err = asyncdock("run", "mock", "--out", str(tmp_path))
    assert code == 2
    assert "not empty" in err
    assert os.listdir(tmp_path) == ["precious.txt"]


@pytest.mark.parametrize("command", [("run",), ("sweep", "--over", "seed=0,1")])
def test_a_folder_that_cannot_be_written_is_named(command: tuple[str, ...]) -> None:
    """/proc has no room, and is written by nobody: no key of the recipe is to blame."""
    name, *options = command
    code, _, err = asyncdock(name, "mock", *options, "--out", "/proc/x")
    assert code == 2
    assert "error: --out = '/proc/x': cannot be written (" in err
    assert "; give a folder with room and permission" in err
    assert "train.steps" not in err


def test_resume_refuses_a_folder_without_a_run(tmp_path: Path) -> None:
    code, _, err = asyncdock("resume", str(tmp_path))
    assert code == 2
    assert "recipe.json" in err


def test_the_version_is_printed() -> None:
    code, out, _ = asyncdock("--version")
    assert code == 0
    assert out.startswith("asyncdock 0.")


# --- showing a run
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "reason", "code"),
    [
        ("finished", "", 0),
        ("failed", "update-0: out of memory", 1),
        ("stopped", "stopped by request", 130),
    ],
)
def test_the_exit_code_says_how_the_run_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str, reason: str, code: int
) -> None:
    made = scripted.ScriptedRun(tmp_path / "out", scripted.events(ending, reason))
    assert local_run.show_run(made, json=False, plain=True) == code
    out = capsys.readouterr().out
    assert f"scripted: {ending}" in out
    assert reason in out
    assert ("asyncdock resume" in out) == (ending != "finished")
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["state"] == ending


def test_json_puts_events_alone_on_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = scripted.ScriptedRun(tmp_path, scripted.events())
    assert local_run.show_run(made, json=True, plain=False) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["id"], line["kind"]) for line in lines] == [
        (event.id, event.kind) for event in scripted.events()
    ]


async def test_the_live_view_draws_the_whole_run(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=40)
    made = scripted.ScriptedRun(tmp_path, scripted.events())
    outcome = await local_run.watch_run(made, console, json=False, plain=False)
    assert outcome is not None
    assert "step 8/8" in out.getvalue()


async def test_a_view_that_breaks_does_not_end_the_run(tmp_path: Path) -> None:
    broken = [scripted.event(0, "step", step="not a number"), *scripted.events()]
    console = Console(file=io.StringIO(), width=100)
    outcome = await local_run.watch_run(
        scripted.ScriptedRun(tmp_path, broken), console, json=False, plain=True
    )
    assert outcome is not None
    assert outcome.state == "finished"
    assert "The view of the run failed: TypeError" in console.file.getvalue()  # type: ignore[attr-defined]


async def test_the_first_interrupt_stops_cleanly(tmp_path: Path) -> None:
    made = scripted.ScriptedRun(tmp_path, scripted.events(), endless=True)
    console = Console(file=io.StringIO(), width=100)
    async with asyncio.timeout(10):
        showing = asyncio.create_task(local_run.watch_run(made, console, json=False, plain=True))
        await made.waiting.wait()
        os.kill(os.getpid(), signal.SIGINT)
        outcome = await showing
    assert outcome is not None
    assert outcome.state == "stopped"
    assert "Ctrl-C once more" in console.file.getvalue()  # type: ignore[attr-defined]


async def test_the_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    made = scripted.ScriptedRun(tmp_path, scripted.events(), deaf=True)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    async with asyncio.timeout(10):
        task = asyncio.create_task(local_run.execute(made, _nothing, say))
        await made.waiting.wait()
        os.kill(os.getpid(), signal.SIGINT)
        assert await task is None
    assert len(lines) == 2


async def _nothing() -> None:
    pass


# --- for real
# --------------------------------------------------------------------------------------------------


def test_a_real_run_interrupted_stops_cleanly_and_can_be_resumed(tmp_path: Path) -> None:
    """In a process of its own: Ctrl-C after two steps exits with 130, leaves no process, and the
    run goes on."""
    out = tmp_path / "run"
    sets = ["train.steps=6", "checkpoint.every=1", "rollout.mock={median_tokens=8,time_scale=0.5}"]
    command = [sys.executable, "-m", "api.cli.main", "run", "mock", "--plain", "--out", str(out)]
    command += [f"--set={text}" for text in sets]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    watched = psutil.Process(process.pid)
    try:
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if line.startswith("step 2/"):
                break
        children = watched.children(recursive=True)
        assert children
        # as a terminal does: every process of the run gets it
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 130, "".join(seen) + rest
        assert "Stopping cleanly" in rest
        assert "mock: stopped" in rest
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive
    finally:
        for left in [*watched.children(recursive=True)] if process.poll() is None else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.kill()
        process.wait()
    resumed = Execution(RunFolder.resume(out))
    assert resumed.folder.start is not None
    assert 1 <= resumed.folder.start.version < 6
