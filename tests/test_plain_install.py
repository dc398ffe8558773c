"""An environment with ``pip install .`` alone: every command, stored recipe and kind of run works
there, or names the extra.

The dependencies are those that are installed here (tests.plain): the closure of what pyproject.toml
declares.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.plain import ROOT, make_plain_environment

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.toml"))
SMALL = ("--plain", "--set=train.steps=4", "--set=train.groups_per_step=2")
RUNS = {
    "small": [
        "tiny",
        "--out=small",
        "--set=pipeline.keep_samples=1MiB",
        "--set=train.groups_per_step=8",
    ],
    "dp": ["tiny", "--out=dp", "--set=train.dp=2"],
    "tp": ["tiny", "--out=tp", "--set=train.tp=2"],
    "critic": ["ppo", "--out=critic"],
    "experts": ["moe", "--out=experts", "--set=train.ep=2"],
    "taking-turns": ["colocated", "--out=taking-turns"],
}
# Extras that the machine's `check` names for a stored recipe; the others are sound.
LACKING = {
    "calculator": {"quickstart"},
    **{
        name: {"quickstart"}
        for name in ("code", "distill", "judge", "math", "preferences", "reasoning", "tools")
    },
    "lora": {"lora", "quickstart"},
    "quickstart": {"quickstart"},
    "quickstart-vllm": {"quickstart", "vllm"},
}
EXTRA = re.compile(r"pip install 'asyncdock\[(\w+)\]'")
# Commands, after the run `small`, that work, and those that name an extra.
WORK = [
    ["plan", "run", "mock"],
    ["plan", "run", "tiny", "--costs", "small"],
    ["plan", "what-if", "small", "--set", "rollout.workers=2"],
    ["plan", "reshard", "moe", "--train", "dp=1,tp=2"],
    ["pairs", "small", "--out", "pairs.jsonl"],
    ["recipes"],
    ["recipes", "--keys", "rollout"],
    ["check", "tiny", "--graph", "flow.svg"],
]
NEED = {
    "ray": ["deploy", "a-run", "--index", "unix:///nowhere"],
    "data": ["pairs", "small", "--out", "pairs.parquet"],
    "tensorboard": ["track", "small", "--to", "tensorboard"],
    "mlflow": ["track", "small", "--to", "mlflow"],
    "wandb": ["track", "small", "--to", "wandb"],
}
# All commands in one process, which imports torch once.
EACH_COMMAND = """
import json, sys
import typer
from typer.testing import CliRunner
from api.cli.main import app

def commands(command, path=()):
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))

asked = [[*path, "--help"] for path in commands(typer.main.get_command(app))] + json.loads(sys.argv[1])
answers = {}
for arguments in asked:
    result = CliRunner().invoke(app, arguments)
    error = "" if result.exception is None or isinstance(result.exception, SystemExit) else repr(result.exception)
    answers[" ".join(arguments)] = [result.exit_code, result.output + error]
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the environment's commands."""
    return make_plain_environment(tmp_path_factory.mktemp("plain") / "environment")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of all commands, and the user's home."""
    return tmp_path_factory.mktemp("home")


def execute(command: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and output of ``command`` with an environment of a user who has installed nothing
    else."""
    passed = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "XDG_", "VIRTUAL_"))
    }
    environment = passed | {"HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def runs(commands: Path, folder: Path) -> dict[str, tuple[int, str]]:
    """Exit code and output of each of RUNS; two at a time, as most of their time is the start of
    processes."""
    with ThreadPoolExecutor(2) as pool:
        asked = [
            [str(commands / "asyncdock"), "run", *SMALL, *arguments] for arguments in RUNS.values()
        ]
        return dict(
            zip(RUNS, pool.map(lambda command: execute(command, folder), asked), strict=True)
        )


@pytest.fixture(scope="module")
def answers(
    commands: Path, folder: Path, runs: dict[str, tuple[int, str]]
) -> dict[str, tuple[int, str]]:
    """Exit code and output of ``--help`` of each command, of ``check`` of each stored recipe, of
    WORK and of NEED."""
    asked = [*(["check", name] for name in RECIPES), *WORK, *NEED.values()]
    code, output = execute(
        [str(commands / "python"), "-W", "ignore", "-c", EACH_COMMAND, json.dumps(asked)], folder
    )
    assert code == 0, output
    return {name: tuple(answer) for name, answer in json.loads(output.splitlines()[-1]).items()}


def test_no_library_of_an_extra_is_there(commands: Path, folder: Path) -> None:
    from pipeline.compat.extras import MODULES

    installed = "[name for name in names if importlib.util.find_spec(name)]"
    code = (
        f"import importlib.util, sys, api; names = sys.argv[1:]; print(api.__file__, {installed})"
    )
    names = [name for modules in MODULES.values() for name in modules]
    _, output = execute([str(commands / "python"), "-c", code, *names, "pytest"], folder)
    assert (
        output.strip()
        == f"{next(commands.parent.glob('lib/python*'))}/site-packages/api/__init__.py []"
    )


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_finishes(name: str, runs: dict[str, tuple[int, str]], folder: Path) -> None:
    code, output = runs[name]
    assert code == 0, output
    assert json.loads((folder / name / "summary.json").read_text())["steps"] == 4
    assert "reward.png: matplotlib is not installed; pip install 'asyncdock[quickstart]'" in output


def test_every_command_has_its_help(answers: dict[str, tuple[int, str]]) -> None:
    helps = {name: answer for name, answer in answers.items() if name.endswith("--help")}
    assert len(helps) > 25
    assert {
        name: text for name, (code, text) in helps.items() if code != 0 or "Usage:" not in text
    } == {}


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_stored_recipe_is_sound_or_names_the_extras(
    recipe: str, answers: dict[str, tuple[int, str]]
) -> None:
    code, output = answers[f"check {recipe}"]
    assert set(EXTRA.findall(output)) == LACKING.get(recipe, set()), output
    assert code == (2 if recipe in LACKING else 0), output


@pytest.mark.parametrize("command", WORK, ids=" ".join)
def test_a_command_works(command: list[str], answers: dict[str, tuple[int, str]]) -> None:
    code, output = answers[" ".join(command)]
    assert code == 0, output


@pytest.mark.parametrize("extra", NEED)
def test_a_command_names_the_extra_that_it_needs(
    extra: str, answers: dict[str, tuple[int, str]]
) -> None:
    code, output = answers[" ".join(NEED[extra])]
    assert code in (1, 2), output
    assert EXTRA.findall(output) == [extra], output
    assert "Traceback" not in output
