"""Habits of people at the command, and what they see: each test does what the person did."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from api.cli import local_run
from api.cli import main as cli
from api.telemetry.progress import Progress
from api.terminal import live as terminal
from orchestration.recipe.loading.load import load_recipe
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from tests.api import scripted

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
name = "mine"
[model]
source = "mock"
[prompts]
source = "jsonl"
path = "data/p.jsonl"
max_prompt_tokens = 64
[rollout]
engine = "mock"
max_rows = 32
max_tokens = 8
[reward]
functions = [{ name = "habits_reward:half" }]
[algorithm]
group_size = 4
[train]
engine = "mock"
steps = 2
groups_per_step = 2
[checkpoint]
every = 1
[launch]
launcher = "inline"
"""
MODULES = {
    "habits_reward": """
def half(prompts, **_):
    return [0.5] * len(prompts)

def broken(prompts, **_):
    rewards = []
    return rewards[len(prompts)]
""",
    "habits_algorithm": """
from stages.algorithms.policy_gradient.grpo import GRPO

class Loss(GRPO):
    def loss(self, tokens):
        return {}["missing"]

class Credit(GRPO):
    def credit(self, group):
        return self.helper(group)

    def helper(self, group):
        raise ValueError("by; my helper")

class Finish(GRPO):
    def finish(self, metrics):
        return 1 / 0

class Arguments(GRPO):
    def loss(self):
        pass

class Nothing(GRPO):
    def loss(self, tokens):
        pass

class Rows(GRPO):
    def credit(self, group):
        return {"advantage": group["reward"].tolist()}

class Infinite(GRPO):
    def credit(self, group):
        return {"advantage": group["reward"] + float("inf")}

class Texts(GRPO):
    def finish(self, metrics):
        return {"kl": "much"}

class Made(GRPO):
    def __init__(self, **options):
        raise RuntimeError("cannot be made")

class Foreign:
    def credit(self, group): ...
    def loss(self, tokens): ...
""",
    "habits_missing": "import habits_not_there\n",
    "habits_syntax": "x = 1\ny = (\n",
    "habits_division": "def f(): return 1 / 0\nf()\n",
    "habits_exit": "import sys\nsys.exit(3)\n",
}


@pytest.fixture
def person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a recipe and modules of a person's own, where the command is given."""
    # longer than the 80 columns that a pipe is taken for
    home = tmp_path / ("a folder with a long name " * 5).strip()
    (home / "data").mkdir(parents=True)
    (home / "mine.toml").write_text(RECIPE)
    (home / "data" / "p.jsonl").write_text(
        "".join(f'{{"prompt": "{letter}="}}\n' for letter in "abcd")
    )
    for name, text in MODULES.items():
        (home / f"{name}.py").write_text(text)
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [*sys.path, str(home)])
    # all is inline here
    monkeypatch.setattr(local_run, "fork_server", lambda: contextlib.nullcontext(None))
    yield home
    for name in MODULES:
        sys.modules.pop(name, None)


def asyncdock(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


# --- a failure
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected", "line"),
    [
        ("Loss", "raised KeyError('missing') in loss", 6),
        ("Credit", "raised ValueError('by; my helper') in credit", 13),
        ("Finish", "raised ZeroDivisionError('division by zero') in finish", 17),
        (
            "Arguments",
            "raised TypeError('Arguments.loss() takes 1 positional argument but 2 were "
            "given') in loss",
            20,
        ),
        ("Nothing", "returned None from loss", 24),
        ("Rows", "returned [0.5, 0.5, 0.5, 0.5] from credit", 28),
        ("Infinite", "returned a tensor of float32 [4] from credit", 32),
        ("Texts", "returned {'kl': 'much'} from finish", 36),
    ],
)
def test_a_failing_algorithm_names_itself_the_method_and_the_line(
    person: Path, name: str, expected: str, line: int
) -> None:
    code, out, _ = asyncdock(
        "run", "mine.toml", "--out", "out", f"--set=algorithm.name=habits_algorithm:{name}"
    )
    assert code == 1
    assert out.count(expected) == 1, "the reason stands once"
    (reason,) = [text for text in out.splitlines() if expected in text]
    assert f"algorithm 'habits_algorithm:{name}' {expected}" in reason
    assert f"({person / 'habits_algorithm.py'}, line {line})" in reason
    assert "restarted" not in out, "no restart mends it"
    assert f"Go on with: asyncdock resume {person / 'out'}" in out.splitlines()


def test_a_failure_of_a_worker_process_stands_once_with_its_log(person: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "api.cli.main",
        "run",
        "mine.toml",
        "--out",
        "out",
        "--set=launch.launcher=process",
    ]
    command += ["--set=algorithm.name=habits_algorithm:Loss"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 1
    reason = "algorithm 'habits_algorithm:Loss' raised KeyError('missing') in loss"
    assert (ended.stdout + ended.stderr).count(reason) == 1
    log = person / "out" / "logs" / "update-0.log"
    assert f"  log: {log}" in ended.stdout.splitlines()
    assert "Traceback" in log.read_text()


def test_a_failing_reward_names_its_line(person: Path) -> None:
    broken = "--set=reward.functions=[{name='habits_reward:broken'}]"
    code, out, _ = asyncdock("run", "mine.toml", "--out", "out", broken)
    assert code == 1
    (reason,) = [text for text in out.splitlines() if "IndexError" in text]
    assert (
        "reward 'habits_reward:broken' raised IndexError('list index out of range') at prompt"
        in reason
    )
    assert f"({person / 'habits_reward.py'}, line 7); it failed for " in reason


def test_a_worker_that_fails_is_named_with_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = {"stage": "update", "worker": "update-0", "pid": 7}
    reason = "KeyError: 'x'"
    death = scripted.event(29, "worker", **worker, change="died", reason=reason)
    script = [
        *scripted.events()[:-1],
        death,
        scripted.event(30, "state", state="failed", reason=f"update-0: {reason}"),
    ]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "update-0.log").touch()
    run = scripted.ScriptedRun(tmp_path, script, failed="update-0")
    assert local_run.show_run(run, json=False, plain=True) == 1
    out = capsys.readouterr().out
    assert out.count(reason) == 1
    assert f"  log: {tmp_path / 'logs' / 'update-0.log'}" in out.splitlines()
    assert "worker rollout-0 died: ended by signal 9\nworker rollout-0 restarted\n" in out, (
        "what it did not fail of"
    )


@pytest.mark.parametrize("width", [60, 80, 150])
def test_the_live_view_shows_the_reason_whole_and_once(width: int) -> None:
    reason = "update-0: KeyError: " + " ".join(f"word{n}" for n in range(60))
    worker = {"stage": "update", "worker": "update-0", "pid": 7}
    progress = Progress("scripted", scripted.STEPS, scripted.BOUND)
    death = scripted.event(29, "worker", **worker, change="died", reason=reason.partition(": ")[2])
    for event in [
        *scripted.events()[:-1],
        death,
        scripted.event(30, "state", state="failed", reason=reason),
    ]:
        progress.apply(event)
    console = Console(width=width, height=60, record=True, file=io.StringIO(), force_terminal=True)
    console.print(terminal.LiveView(progress, console).render())
    words = console.export_text().split()
    for n in range(60):
        assert words.count(f"word{n}") == 1


@pytest.mark.parametrize(
    "key", ["reward.functions=[{{name='{}'}}]", "algorithm.name={}", "rollout.engine={}"]
)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "habits_missing:f",
            "No module named 'habits_not_there'\") ({}/habits_missing.py, line 1); correct "
            "habits_missing",
        ),
        ("habits_syntax:f", "SyntaxError: '(' was never closed ({}/habits_syntax.py, line 2)"),
        (
            "habits_division:f",
            "ZeroDivisionError('division by zero') ({}/habits_division.py, line 1)",
        ),
        ("habits_exit:f", "SystemExit(3) ({}/habits_exit.py, line 2)"),
        (
            "habits_nowhere:f",
            "No module named 'habits_nowhere'\"); put its directory on PYTHONPATH",
        ),
        (
            "habits_reward:hlaf",
            "habits_reward has no attribute 'hlaf'; did you mean 'habits_reward:half'?",
        ),
    ],
)
def test_a_module_that_cannot_be_imported(person: Path, key: str, name: str, expected: str) -> None:
    code, out, err = asyncdock("check", "mine.toml", f"--set={key.format(name)}")
    assert (code, out) == (2, "")
    assert expected.format(person) in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "Made",
            "RuntimeError('cannot be made') was raised ({}/habits_algorithm.py, line 41); "
            "correct its code",
        ),
        (
            "Foreign",
            "is not an algorithm; derive its class from stages.algorithms.Algorithm",
        ),
    ],
)
def test_check_finds_an_algorithm_that_cannot_be_made(
    person: Path, name: str, expected: str
) -> None:
    code, _, err = asyncdock("check", "mine.toml", f"--set=algorithm.name=habits_algorithm:{name}")
    assert code == 2
    assert expected.format(person) in err


# --- paths and folders
# --------------------------------------------------------------------------------------------------


def test_a_run_can_be_begun_again_and_resumed_from_any_folder(
    person: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asyncdock("run", "mine.toml", "--out", "out", "--set=train.steps=1")[0] == 0
    run = person / "out"
    assert json.loads((run / "recipe.json").read_text())["prompts"]["path"] == str(
        person / "data" / "p.jsonl"
    )

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part != str(person)])
    sys.modules.pop("habits_reward", None)
    code, _, _ = asyncdock("run", str(run / "recipe.json"), "--out", "again", "--set=train.steps=1")
    assert code == 0
    assert (elsewhere / "again" / "summary.json").is_file()
    assert (
        load_recipe(elsewhere / "again" / "recipe.json").to_json()
        == (run / "recipe.json").read_text()
    )
    assert Path.cwd() == elsewhere

    recipe = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps(recipe | {"train": recipe["train"] | {"steps": 2}}))
    sys.modules.pop("habits_reward", None)
    assert asyncdock("resume", os.path.relpath(run))[0] == 0
    code, _, err = asyncdock("resume", str(run / "recipe.json"))
    assert code == 2
    assert "has made 2 of 2 steps" in err
    assert asyncdock("check", str(run / "recipe.json"))[0] == 0


def test_the_folder_of_a_run_is_no_recipe(person: Path) -> None:
    Execution(RunFolder.create(load_recipe("mine.toml"), Path("out")))
    code, _, err = asyncdock("run", "out")
    assert code == 2
    assert (
        "continue it with `asyncdock resume out`, or start a run like it with `asyncdock run "
        "out/recipe.json`" in err
    )
    for text, expected in (
        ("[1]", "it holds a list"),
        ("{", "is not a recipe in JSON"),
        ("{}", "model: is missing"),
    ):
        Path("other.json").write_text(text)
        code, _, err = asyncdock("check", "other.json")
        assert code == 2
        assert expected in err


def test_paths_are_whole_in_a_pipe(person: Path) -> None:
    code, out, _ = asyncdock("run", "mine.toml", "--out", "out", "--set=train.steps=1")
    assert code == 0
    lines = out.splitlines()
    out_dir = person / "out"
    assert f"  model: {out_dir / 'checkpoints' / 'step-00000001' / 'model'}" in lines
    for name in ("summary.json", "metrics.jsonl"):
        assert f"  {out_dir / name}" in lines
    names = [each["name"] for each in json.loads(asyncdock("recipes", "--json")[1])]
    assert [line.split()[0] for line in asyncdock("recipes")[1].splitlines()] == names, (
        "a line for each"
    )


# --- short runs
# --------------------------------------------------------------------------------------------------


def test_equal_rewards_are_reported_at_the_end(person: Path) -> None:
    _, out, _ = asyncdock("run", "mine.toml", "--out", "out")
    assert "Every reward was 0.5, in all 2 steps: there was nothing to learn from" in out
    assert " 0 tokens/s" not in out
    _, out, _ = asyncdock(
        "run", "mine.toml", "--out", "two", "--set=reward.functions=[{name='brevity'}]"
    )
    assert "nothing to learn" not in out


def test_a_short_run_has_a_rate(person: Path) -> None:
    """All of its responses are made before its second step."""
    progress = Progress("short", 2, 1)
    for event in (
        scripted.event(8, "state", state="running", reason=""),
        scripted.step(0, tokens_generated=600),
        scripted.step(1, tokens_generated=600),
    ):
        progress.apply(event)
    assert progress.tokens_per_second == pytest.approx(600 / 4)
    _, out, _ = asyncdock("run", "mine.toml", "--out", "out", "--set=train.steps=1")
    (speed,) = re.findall(r"([\d,]+) tokens/s, [\d,]+ a device \(2\)", out)
    assert float(speed.replace(",", "")) > 0


def test_a_recipe_made_shorter_than_its_warm_up(person: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "quickstart.toml", ["train.steps=1"])
    assert (recipe.train.steps, recipe.train.warmup_steps) == (1, 1)
    code, _, err = asyncdock(
        "check", "mine.toml", "--set=train.steps=1", "--set=train.warmup_steps=2"
    )
    assert code == 2
    assert "train.warmup_steps = 2: is more than train.steps = 1" in err


def test_json_keeps_the_reason_on_both_streams(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run: Any = scripted.ScriptedRun(tmp_path, scripted.events("failed", "update-0: no memory"))
    local_run.show_run(run, json=True, plain=False)
    printed = capsys.readouterr()
    assert "update-0: no memory" in printed.out
    assert printed.err.count("update-0: no memory") == 1
