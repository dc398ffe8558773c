"""``asyncdock env try``: what a person sees of an environment before any run."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli import main as cli
from benchmarks.runs.synchronous import synchronous_run
from orchestration.recipe.loading.load import load_recipe
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from tests.api.served import SECONDS, environment
from tests.orchestration.runs import complete

runner = CliRunner()
GAMES = "tests.stages.trajectories.games"
RECIPE = Path(__file__).parents[3] / "recipes" / "guess.toml"
ROW = ("--row", '{"prompt": "1-7?", "answer": 3}')


def env_try(*arguments: str) -> tuple[int, str, str]:
    result = runner.invoke(cli.app, ["env", "try", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def records(*arguments: str) -> list[dict[str, Any]]:
    code, out, errors = env_try(*arguments, "--json")
    assert code == 0, errors
    return [json.loads(line) for line in out.splitlines()]


def trained_rows() -> list[dict[str, Any]]:
    """The rows of the recipe's first step, by the plain loop."""

    async def rows() -> list[dict[str, Any]]:
        [step] = [step async for step in synchronous_run(load_recipe(RECIPE, ["train.steps=1"]))]
        names = ("prompt_ids", "response_ids", "loss_mask", "turn_starts", "turn_reward", "reward")
        columns = {name: [row.tolist() for row in step.batch[name].unbind()] for name in names}
        return [{name: columns[name][at] for name in names} for at in range(len(step.batch))]

    return asyncio.run(rows())


def test_its_parts_are_the_row_that_a_run_trains_on() -> None:
    """That of the first trajectory of the prompt's group."""
    rows = trained_rows()
    for number in range(8):
        row = rows[number * 16]
        prompt, *parts, end = records("guess", "--prompt", str(number))
        assert prompt["token_ids"] == row["prompt_ids"]
        assert [token for part in parts for token in part["token_ids"]] == row["response_ids"]
        mask = [part["trained"] for part in parts for _ in part["token_ids"]]
        assert mask == row["loss_mask"]
        rewards = [part["reward"] for part in parts if "reward" in part]
        assert (rewards, end["reward"]) == (row["turn_reward"], row["reward"])
        assert end["turns"] == len(row["turn_starts"])
        assert (end["tokens"], end["trained_tokens"]) == (len(mask), sum(mask))
        for part in parts:
            assert "".join(part["pieces"]) == part["text"]
            assert len(part["pieces"]) == len(part["token_ids"])


def test_an_environment_without_a_recipe_takes_a_model_and_a_row() -> None:
    _, opened, turn, answered, end = records(
        "guess", "--set", "environment.max_turns=1", *ROW, "--greedy"
    )
    assert (opened["kind"], turn["kind"]) == ("environment", "turn")
    assert end["ending"] in ("turns", "done", "truncated")
    assert end["functions"] == {"environment": answered["reward"]}
    text = env_try(f"{GAMES}:Replayed", "--model", "tiny", "--row", '{"prompt": "1+2="}')[1]
    first, prompt, _, hint, turn_line, *_, last = text.splitlines()
    assert (first, prompt) == ("prompt · tokens 4 · masked", "  1+2=")
    assert re.fullmatch(r"  \d0", hint)
    assert turn_line.startswith("turn · tokens 64 · trained · truncated True · seconds ")
    assert last.startswith("end · truncated: the turn was cut at rollout.max_tokens · turns 1 ")


def test_a_recipe_lends_its_prompts_to_another_environment() -> None:
    *_, end = records(f"{GAMES}:Judged", "--model", str(RECIPE), "--set", "environment.max_turns=2")
    assert (end["ending"], end["reward"]) in (
        ("turns", 2.0),
        ("truncated", 1.0),
        ("truncated", 2.0),
    )


async def test_a_checkpoint_is_evaluated_as_the_run_has_evaluated_its_version(
    tmp_path: Path,
) -> None:
    overrides = (
        *("prompts.held_out=0.7", "environment.use='tests.orchestration.run.games:Near'"),
        *("evaluate.sampling='rollout'", "evaluate.samples=7"),
    )
    training = ("evaluate.every=2", "evaluate.prompts=7", "train.steps=2", "launch.launcher=inline")
    run = Execution(RunFolder.create(load_recipe(RECIPE, [*overrides, *training]), tmp_path))
    watched, result = await complete(run)
    assert result.checkpoint is not None
    options = [part for override in overrides for part in ("--set", override)]
    evaluate = ("guess", *options, "--model", str(result.checkpoint.model), "--held-out", "7")
    [evaluation] = await asyncio.to_thread(records, *evaluate)
    event = watched.of("evaluation")[-1]
    assert event["version"] == 2
    for name in ("count", "reward_mean", "samples", "tokens"):
        assert evaluation[name] == event[name], name
    assert evaluation["model"] == str(result.checkpoint.model)
    _, out, _ = await asyncio.to_thread(env_try, *evaluate)
    assert out.startswith("evaluation · model ")
    assert out.count("    environment: ") == str(event["samples"]).count("environment: ")


@pytest.mark.parametrize("sandbox", ["false", "true"])
def test_what_fails_is_shown_with_its_line(sandbox: str) -> None:
    row = '{"prompt": "1+2=", "fails": true}'
    code, out, errors = env_try(
        *(f"{GAMES}:Replayed", "--model", "tiny", "--row", row),
        *("--set", f"environment.sandbox={sandbox}"),
    )
    assert code == 1
    assert out.startswith("prompt")
    assert "Replayed.reset raised RuntimeError('not today') (" in errors
    assert re.search(r"games.py, line \d+\)\n$", errors)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("my_env:Sums",), "give --model, and the row by --row"),
        (("my_env:Sums", "--model", "tiny", *ROW), "my_env:Sums: 1 problem\n  environment.use = "),
        (("guess", "--held-out", "3"), "holds nothing out; add --set prompts.held_out=0.1"),
        (("guess", "--row", "[1]"), "--row: '[1]' is no JSON object ("),
        (("guess", "--row", '{"answer": 3}'), "--row has no column 'prompt'"),
        (("tiny",), "tiny.toml has none to be tried; give a class or a program"),
        (("guess", "--set", 'environment.use="sessions"'), "prompts.chat_template: "),
        (("guess", "--model", "nowhere"), 'model.source = "nowhere": is neither'),
    ],
)
def test_what_is_wrong_is_named(arguments: tuple[str, ...], says: str) -> None:
    code, _, errors = env_try(*arguments)
    assert (code, says in errors) == (2, True), errors


def test_no_line_is_wider_than_the_terminal() -> None:
    terminal, screen = os.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
    own = {name: value for name, value in environment().items() if name != "COLUMNS"}
    row = json.dumps({"prompt": "1+2=" * 20})
    command = [sys.executable, "-m", "api.cli.main", "env", "try", f"{GAMES}:Replayed"]
    command += ["--model", "tiny", "--row", row]
    subprocess.run(command, stdout=screen, check=True, timeout=SECONDS, env=own)
    os.close(screen)
    out = b""
    while chunk := read(terminal):
        out += chunk
    os.close(terminal)
    lines = re.sub(r"\x1b\[[\d;]*m", "", out.decode()).splitlines()
    assert max(map(len, lines)) <= 30
    assert "\x1b[2m" in out.decode(), "what is masked is pale"


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # nobody writes to it any more
        return b""
