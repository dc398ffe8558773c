"""Runs whose environment is a program that asks the policy by its URL: real processes and kills."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import string
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestration.state.documents import SESSIONS
from pipeline.compat.extras import is_installed
from stages.samples.sample_log import FOLDER
from stages.samples.trajectory_export import trajectories
from stages.tasks.guess import Guess
from tests.orchestration.run.test_run import (
    assert_each_sample_once,
    assert_equal,
    assert_nothing_left,
    synchronous,
    trained,
)
from tests.orchestration.run.test_trajectories import (
    GAMES,
    GUESS,
    environments_of,
    kill,
    run_of,
)
from tests.orchestration.runs import Watched, complete, executing, recipe
from tests.stages.trajectories import harnesses

Player = Callable[[dict[str, Any], httpx.AsyncClient], Awaitable[None]]
HARNESSES = Path(harnesses.__file__).parent
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + '<eos>' }}"
    "{% else %}{{ '<unk>' + m.content }}{% endif %}{% endfor %}"
)


def chat(tmp_path: Path, **changes: Any) -> Any:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    prompts = {**GUESS["prompts"], "chat_template": str(template)}
    environment = {"use": f"{GAMES}:chat", "max_turns": 3, "max_tokens": 24}
    return recipe({**GUESS, "prompts": prompts, "environment": environment}, **changes)


@pytest.mark.parametrize("launcher", ["inline", "process"])
@pytest.mark.parametrize("bound", [0, 1])
async def test_a_program_is_trained(launcher: str, bound: int, tmp_path: Path) -> None:
    of = chat(tmp_path, pipeline__staleness=bound, launch__launcher=launcher)
    watched, result = await complete(run_of(of, tmp_path / "run"))
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    counts = environments_of(watched)
    assert counts["branches"] == 0
    endings = {name for name in counts if name.startswith("ended_")}
    assert {"ended_done"} <= endings <= {"ended_done", "ended_truncated"}
    assert counts["turns"] > counts["ended_done"]
    rewards = [step["reward_mean"] for step in watched.of("step")]
    assert 0 < sum(rewards) < len(rewards)
    assert_nothing_left(watched.run)


def forgetful(tmp_path: Path, **changes: Any) -> Any:
    return chat(
        tmp_path,
        environment__use=f"{GAMES}:forgets",
        environment__max_turns=5,
        environment__max_tokens=40,
        **changes,
    )


@pytest.mark.parametrize("launcher", ["inline", "process"])
async def test_with_bound_zero_branches_are_those_of_the_plain_loop_bit_for_bit(
    launcher: str, tmp_path: Path
) -> None:
    of = forgetful(tmp_path, pipeline__staleness=0, launch__launcher=launcher)
    expected, weights = await synchronous(of)
    watched, result = await complete(run_of(of, tmp_path / "run"))
    assert result.state == "finished", result.reason
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    assert_equal(trained(of, result), weights)
    assert_each_sample_once(of, watched)
    counts = environments_of(watched)
    assert counts["branches"] > counts["ended_done"] / 2
    gaps = [step["gap_max"] for step in watched.of("step")]
    assert max(gaps) < 1e-4, "the trainer gives each token the context that it was generated in"


@pytest.mark.parametrize(("program", "metrics"), [("chat", set()), ("anew", {"branches"})])
async def test_a_program_that_goes_back_at_every_turn_is_an_alarm(
    program: str, metrics: set[str], tmp_path: Path
) -> None:
    of = chat(
        tmp_path,
        environment__use=f"{GAMES}:{program}",
        environment__max_tokens=40,
        launch__launcher="inline",
        rollout__stop=[*string.digits, *string.ascii_letters],  # no turn is cut
    )
    watched, result = await complete(run_of(of, tmp_path / "run"))
    assert result.state == "finished", result.reason
    alarms = watched.of("alarm")
    assert {alarm["metric"] for alarm in alarms} - {"equal_groups"} == metrics
    assert [alarm["value"] for alarm in alarms if alarm["metric"] == "branches"] == [1.0] * len(
        metrics
    )


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("gspo", {"kl_coef": 0.1}), ("ppo", {"critic": "own", "kl_reward": 0.1}), ("dpo", {})],
)
async def test_branches_are_trained_by_algorithms_that_take_whole_sequences(
    algorithm: str, options: dict[str, Any], tmp_path: Path
) -> None:
    of = forgetful(
        tmp_path,
        algorithm__name=algorithm,
        algorithm__options=options,
        train__steps=3,
        train__learning_rate=1e-12,
    )
    watched, result = await complete(run_of(of, tmp_path / "run"))
    assert result.state == "finished", result.reason
    assert len(watched.of("step")) == 3
    if (
        algorithm != "dpo"
    ):  # of one set of weights, with keys of earlier turns, engines hardly differ
        assert 0 < max(step["gap_max"] for step in watched.of("step")) < 1e-4


@pytest.mark.parametrize("victim", ["rollout-0", "environment-0"])
async def test_each_trajectory_with_branches_is_trained_once_whatever_is_killed(
    victim: str, tmp_path: Path
) -> None:
    of = forgetful(tmp_path, train__steps=8, environment__on_error="zero")
    async with executing(run_of(of, tmp_path / "run")) as (watched, work):
        for steps in (1, 3, 5):
            await watched.until(lambda steps=steps: len(watched.of("step")) >= steps)  # type: ignore[misc]
            kill(watched, victim)
        result = await work
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    assert_nothing_left(watched.run)


@pytest.mark.parametrize("victim", ["rollout-0", "environment-0"])
async def test_each_trajectory_of_a_program_is_trained_once_whatever_is_killed(
    victim: str, tmp_path: Path
) -> None:
    of = chat(tmp_path, train__steps=8, environment__on_error="zero")
    async with executing(run_of(of, tmp_path / "run")) as (watched, work):
        for steps in (1, 3, 5):
            await watched.until(lambda steps=steps: len(watched.of("step")) >= steps)  # type: ignore[misc]
            kill(watched, victim)
        result = await work
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    assert_nothing_left(watched.run)


async def test_a_program_in_the_sandbox_reaches_its_session(tmp_path: Path) -> None:
    of = chat(tmp_path, environment__sandbox=True, train__steps=2)
    watched, result = await complete(run_of(of, tmp_path / "run"))
    assert result.state == "finished", result.reason
    assert len(watched.of("step")) == 2


async def play(session: dict[str, Any], http: httpx.AsyncClient) -> None:
    """The game, by a program that knows nothing of us but its URL and key."""
    game = Guess()
    game.reset(session["row"]["answer"])
    messages = [{"role": "user", "content": session["row"]["prompt"]}]
    headers = {"Authorization": f"Bearer {session['api_key']}"}

    async def post(path: str, body: dict[str, Any]) -> Any:
        answer = await http.post(f"{session['base_url']}/{path}", json=body, headers=headers)
        return answer.raise_for_status().json()

    await post("reward", {"reward": 0})
    try:
        for _ in range(3):
            answer = await post("chat/completions", {"messages": messages})
            message = answer["choices"][0]["message"]
            hint, reward, done = game.step(message["content"])
            if done:
                await post("reward", {"reward": reward})
                break
            messages += [message, {"role": "user", "content": hint}]
    finally:
        await post("end", {})


async def play_by(command: Sequence[str], session: dict[str, Any], http: httpx.AsyncClient) -> None:
    """The same by the process ``command``, which is told two variables and prints a digit last."""
    variables = {"OPENAI_BASE_URL": session["base_url"], "OPENAI_API_KEY": session["api_key"]}
    program, *arguments = command
    process = await asyncio.create_subprocess_exec(
        *program.split(),
        session["row"]["prompt"],
        *arguments,
        env={**os.environ, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    reward = float(printed.decode().strip().endswith(str(session["row"]["answer"])))
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    for path, body in (("reward", {"reward": reward}), ("end", {})):
        await http.post(f"{session['base_url']}/{path}", json=body, headers=headers)


async def play_all(watched: Watched, play: Player = play, at_once: int = 8) -> None:
    """Take trajectories and play them, several at once, for ever."""
    while watched.run.supervisor is None:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    index = watched.run.supervisor.index
    async with httpx.AsyncClient(timeout=None) as http:

        async def player() -> None:
            while True:
                address = await SESSIONS.get(index)
                if address is None:
                    await asyncio.sleep(0.1)
                    continue
                headers = {"Authorization": f"Bearer {address['key']}"}
                try:
                    answer = await http.post(address["url"], json={"wait": 1.0}, headers=headers)
                    if session := answer.json()["session"]:
                        await play(session, http)
                except httpx.HTTPError:  # the worker was killed, or a limit has ended the session
                    await asyncio.sleep(0.05)

        await asyncio.gather(*(player() for _ in range(at_once)))


@pytest.mark.parametrize("victim", ["", "rollout-0", "environment-0"])
async def test_programs_outside_play_the_trajectories(victim: str, tmp_path: Path) -> None:
    of = chat(
        tmp_path,
        environment__use="sessions",
        environment__on_error="zero",
        environment__trajectory_timeout=60.0,
        train__steps=6,
    )
    async with executing(run_of(of, tmp_path / "run")) as (watched, work):
        players = asyncio.create_task(play_all(watched))
        if victim:
            await watched.until(lambda: len(watched.of("step")) >= 2)
            kill(watched, victim)
        result = await work
        players.cancel()
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    rewards = [step["reward_mean"] for step in watched.of("step")]
    assert 0 < sum(rewards) < len(rewards)
    assert_nothing_left(watched.run)


@pytest.mark.parametrize(
    ("launcher", "victim"), [("inline", ""), ("process", ""), ("process", "environment-0")]
)
async def test_classes_programs_and_programs_outside_in_one_run(
    launcher: str, victim: str, tmp_path: Path
) -> None:
    uses = {"class": "guess", "program": f"{GAMES}:chat", "outside": "sessions"}
    rows = [
        {"prompt": "1-7?", "answer": answer, "environment": name}
        for answer in range(1, 8)
        for name in uses
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    of = chat(
        tmp_path,
        environment__use=uses,
        environment__on_error="zero",
        environment__trajectory_timeout=60.0,
        prompts__source="jsonl",
        prompts__path=str(path),
        prompts__task=None,
        launch__launcher=launcher,
        train__steps=6,
    )
    async with executing(run_of(of, tmp_path / "run")) as (watched, work):
        players = asyncio.create_task(play_all(watched))
        if victim:
            await watched.until(lambda: len(watched.of("step")) >= 2)
            kill(watched, victim)
        result = await work
        players.cancel()
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    counts = environments_of(watched)
    assert counts["open"] == counts.get("ended_failed", 0) == 0
    seen = {each["fields"]["environment"]: each for each in trajectories(tmp_path / "run" / FOLDER)}
    assert {*seen} == {*uses}, "rows of all environments were trained"
    lengths = {name: len(each["prompt_ids"]) for name, each in seen.items()}
    assert lengths == {"class": 5, "program": 1, "outside": 1}, "programs write their prompts"
    assert_nothing_left(watched.run)


@pytest.mark.parametrize(
    ("command", "steps"),
    [
        pytest.param(
            [f"bash {HARNESSES / 'loop.sh'}"],
            4,
            marks=pytest.mark.skipif(
                not (shutil.which("curl") and shutil.which("jq")), reason="no curl, or no jq"
            ),
        ),
        pytest.param(
            [f"{sys.executable} {HARNESSES / 'code_agent.py'}", "short", "appending"],
            2,
            marks=pytest.mark.skipif(
                not is_installed("smolagents"), reason="smolagents is not installed"
            ),
        ),
    ],
    ids=["curl", "smolagents"],
)
async def test_a_run_is_trained_by_programs_that_know_nothing_of_it_but_two_variables(
    command: list[str], steps: int, tmp_path: Path
) -> None:
    of = chat(
        tmp_path,
        environment__use="sessions",
        environment__on_error="zero",
        environment__max_tokens=480,
        train__steps=steps,
        train__groups_per_step=2,
        algorithm__group_size=2,
    )
    async with executing(run_of(of, tmp_path / "run")) as (watched, work):
        players = asyncio.create_task(play_all(watched, partial(play_by, command), at_once=2))
        result = await work
        players.cancel()
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    counts = environments_of(watched)
    assert "ended_failed" not in counts
    assert counts["turns"] >= 2 * steps
    assert_nothing_left(watched.run)
