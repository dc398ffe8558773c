"""``asyncdock runs``: what it prints, what it says of every way to go wrong, and its exit codes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from api.cli import local_run
from api.cli import main as cli
from api.cli.common.exit_codes import BAD_INPUT, FAILED, FINISHED, INTERRUPTED, NO_SERVICE
from api.cli.service import asking
from api.cli.service import runs as runs_cli
from api.client import Client
from api.client.credentials import KeyringError, find_token, forget, keyring_file, remember
from tests.api import scripted
from tests.api.faulty import RUN, Event, Service, Stream, busy, lost, problem, run_view, served

ROOT = Path(__file__).resolve().parents[4]
NOWHERE = "http://127.0.0.1:9"  # the discard port, on which no process listens
SCRIPT = [
    Event(f"{1000 + at}-0", event.kind, {"time": event.time, **event.data})
    for at, event in enumerate(scripted.events())
]
runner = CliRunner()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person without tokens, and little patience."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("ASYNCDOCK_TOKEN", raising=False)
    monkeypatch.delenv("ASYNCDOCK_SERVER", raising=False)
    monkeypatch.setattr(asking, "PATIENCE", 0.3)
    return tmp_path


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with served(Service(SCRIPT)) as service:
        monkeypatch.setenv("ASYNCDOCK_SERVER", service.url)
        yield service


def asyncdock(*arguments: str, input: str | None = None) -> tuple[int, str, str]:
    result = runner.invoke(cli.app, list(arguments), input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


# --- what goes well
# --------------------------------------------------------------------------------------------------


def test_runs_are_listed(service: Service) -> None:
    service.runs += [
        run_view("waiting-1", state="created", position=2, started=None, reward=None, steps_done=0)
    ]
    code, out, err = asyncdock("runs", "list")
    assert (code, err) == (FINISHED, "")
    lines = out.splitlines()
    assert re.match(rf"{RUN} +running +3/8 +0.500 ", lines[1])
    assert re.match(r"waiting-1 +queued 2 +0/8 +– ", lines[2])
    code, out, _ = asyncdock("runs", "list", "--json", "--state", "created")
    assert [(run["id"], run["position"]) for run in json.loads(out)] == [("waiting-1", 2)]
    assert service.requests[-1].query["state"] == "created"


def test_an_empty_list_of_runs_is_reported(service: Service) -> None:
    service.runs.clear()
    assert asyncdock("runs", "list")[2].startswith("No runs at http://127.0.0.1:")
    assert "with these filters" in asyncdock("runs", "list", "--state", "failed")[2]
    assert asyncdock("runs", "list", "--json")[1] == "[]\n"


def test_one_run_is_shown(service: Service) -> None:
    service.runs[0] |= {"state": "failed", "reason": "update-0: [out of] memory"}
    code, out, _ = asyncdock("runs", "show", RUN)
    assert code == FINISHED
    for text in (RUN, "failed: update-0: [out of] memory", "3 of 8", "by ada", "attempt 1"):
        assert text in " ".join(out.split())
    shown = json.loads(asyncdock("runs", "show", RUN, "--json")[1])
    assert shown == service.runs[0] | {"notes": "", "tags": []}


def test_a_recipe_of_the_service_is_started_with_overrides(service: Service) -> None:
    sets = [
        "--set",
        "train.steps=5",
        "--set",
        "name=mine",
        "--set",
        "rollout.mock={time_scale=0.5}",
    ]
    code, out, err = asyncdock("runs", "start", "mock", *sets)
    assert (code, out) == (FINISHED, "scripted-0\n")
    assert "number 1 in the queue" in err
    assert "asyncdock runs watch scripted-0" in err
    overrides = {"train.steps": 5, "name": "mine", "rollout.mock": {"time_scale": 0.5}}
    assert service.bodies == [{"recipe_name": "mock", "overrides": overrides}]
    submitted = json.loads(asyncdock("runs", "start", "mock", "--key", "k", "--json")[1])
    assert json.loads(asyncdock("runs", "start", "mock", "--key", "k", "--json")[1]) == submitted


def test_a_container_advises_what_its_host_has(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCDOCK_COMMAND", "docker compose run --rm demo asyncdock")
    err = asyncdock("runs", "start", "mock")[2]
    assert err.endswith("Watch it: docker compose run --rm demo asyncdock runs watch scripted-0\n")
    err = asyncdock("runs", "show", "unknown")[2]
    assert "`docker compose run --rm demo asyncdock runs list`" in err


def test_a_recipe_here_is_sent_whole(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('[model]\nsource = "mock"\n')
    assert asyncdock("runs", "start", str(path), "--set", "train.steps=5")[0] == FINISHED
    assert service.bodies == [
        {"recipe": {"name": "own", "model": {"source": "mock"}, "train": {"steps": 5}}}
    ]


@pytest.mark.parametrize(
    ("command", "state"),
    [("pause", "paused"), ("resume", "running"), ("stop", "stopping")],
)
def test_a_command_changes_the_state_of_a_run(service: Service, command: str, state: str) -> None:
    code, _, err = asyncdock("runs", command, RUN)
    assert (code, err) == (FINISHED, f"{RUN}: {state}\n")
    assert json.loads(asyncdock("runs", command, RUN, "--json")[1])["state"] == state
    assert service.requests[0].method == "POST"


def test_a_request_says_what_was_asked_for(service: Service) -> None:
    code, _, err = asyncdock("runs", "checkpoint", RUN)
    folder = service.runs[0]["folder"]
    assert err == (
        f"{RUN}: running; step 3 is done, a checkpoint of the next comes to {folder}/checkpoints\n"
    )
    assert asyncdock("runs", "scale", RUN, "rollout=3")[2] == (
        f"{RUN}: running; rollout workers from 1 to 3\n"
    )
    assert asyncdock("runs", "scale", RUN, "rollout=2")[2] == (
        f"{RUN}: running; rollout workers from 3 to 2\n"
    )
    assert json.loads(asyncdock("runs", "scale", RUN, "rollout=2", "--json")[1])["id"] == RUN
    code, _, err = asyncdock("runs", "checkpoint", RUN, "--wait")
    assert (code, err) == (
        FINISHED,
        f"{RUN}: running; checkpoint of step 5 in {folder}/checkpoints/step-00000005\n",
    )
    saved = json.loads(asyncdock("runs", "checkpoint", RUN, "--wait", "--json")[1])["checkpoint"]
    assert saved["version"] == 6


def test_a_run_is_resumed_with_other_keys(service: Service) -> None:
    sets = ("--set", "train.steps=9", "--set", "name=other")
    assert asyncdock("runs", "resume", RUN, *sets) == (FINISHED, "", f"{RUN}: running\n")
    assert service.bodies == [{"overrides": {"train.steps": 9, "name": "other"}}]
    code, _, err = asyncdock("runs", "resume", RUN, "--set", "train.steps")
    assert (code, err) == (
        2,
        "error: --set = 'train.steps': is not key=value; write for example --set train.steps=10\n",
    )


def test_stop_can_wait_for_the_end(service: Service) -> None:
    service.ended = "stopped"
    code, _, err = asyncdock("runs", "stop", RUN, "--wait")
    assert (code, err) == (FINISHED, f"{RUN}: stopped\n")


def test_logs_and_samples(service: Service) -> None:
    assert asyncdock("runs", "logs", RUN) == (FINISHED, "one\ntwo\n", "")
    assert json.loads(asyncdock("runs", "logs", RUN, "--json", "--worker", "rollout-0")[1])[
        "lines"
    ] == ["one", "two"]
    assert service.requests[-1].query == {"worker": "rollout-0", "lines": "200"}
    assert asyncdock("samples", RUN)[2].startswith("No samples: the run has trained no step yet")
    sample = {
        "group": 12,
        "place": 3,
        "step": 5,
        "prompt": "[b]=",
        "response": "[bbb]",
        "reward": 0.75,
        "rewards": {},
    }
    sample |= {
        "advantage": -1.5,
        "tokens": 6,
        "versions": [[4, 2], [5, 4]],
        "staleness": 1,
        "truncated": True,
    }
    service.samples = [sample | {"place": place} for place in range(12)]
    code, out, _ = asyncdock(
        "samples", RUN, "--step", "5", "--reward-min", "0.5", "--where", "length>3", "--limit", "11"
    )
    assert code == FINISHED
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["place"] for row in rows] == [*range(11)]
    assert (rows[0]["prompt"], rows[0]["response"]) == ("[b]=", "[bbb]")
    asked = service.requests[-1].query
    wanted = {"step": "5", "reward_min": "0.5", "where": "length>3"}
    assert {name: asked[name] for name in wanted} == wanted
    assert asked.keys() - wanted.keys() <= {"limit", "after", "case", "best", "worst"}
    assert len(asyncdock("samples", RUN, "--json")[1].splitlines()) == 10


def test_a_run_is_deleted_when_that_is_meant(service: Service) -> None:
    code, _, err = asyncdock("runs", "delete", RUN)
    assert (code, len(service.runs)) == (BAD_INPUT, 1)
    assert "add --yes" in err
    assert asyncdock("runs", "delete", RUN, "--yes") == (FINISHED, "", f"Removed {RUN}.\n")
    assert service.runs == []


# --- watching
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "expected"), [("finished", FINISHED), ("failed", FAILED), ("stopped", INTERRUPTED)]
)
def test_the_exit_code_says_how_the_watched_run_ended(
    service: Service, state: str, expected: int
) -> None:
    service.ended = state
    code, out, err = asyncdock("runs", "watch", RUN)
    assert code == expected
    assert f"{RUN}: {state}" in out
    assert ("asyncdock runs logs" in err) == (state == "failed")


def test_a_run_looks_as_it_does_where_it_runs(
    service: Service, tmp_path: Path, capsys: Any
) -> None:
    local_run.show_run(
        scripted.ScriptedRun(tmp_path / "out", scripted.events()), json=False, plain=True
    )
    here = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("step", "run", "eval", "worker"))
    ]
    assert len(here) > 10
    there = asyncdock("runs", "watch", RUN)[1].splitlines()
    assert there[: len(here)] == here


def test_watch_prints_events_as_json_alone(service: Service) -> None:
    service.streams.append(Stream(events=5, again=1, half=30))
    code, out, _ = asyncdock("runs", "watch", RUN, "--json")
    assert code == FINISHED
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["id"], line["kind"]) for line in lines] == [
        (event.id, event.kind) for event in SCRIPT
    ]


async def test_the_live_view_shows_it_all_and_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=110, height=40)
    async with asyncio.timeout(20), Service(SCRIPT) as service, Client(service.url) as client:
        service.runs[0]["position"] = 3
        view = await runs_cli.watch_run(client, RUN, console, json=False, plain=False, say=[])
    assert view.state == "finished"
    assert "step 8/8" in out.getvalue()


def test_a_started_run_can_be_watched_at_once(service: Service) -> None:
    code, out, err = asyncdock("runs", "start", "mock", "--watch", "--plain")
    assert code == FINISHED
    assert "step 8/8" in out
    assert err.startswith("Started scripted-0\n")
    assert "number 1 in the queue" in out


def test_a_lost_service_is_reported_while_a_run_is_watched(service: Service) -> None:
    service.streams.append(Stream(events=5))
    service.faults.extend([None, None, lost, busy(503, "0")])
    code, out, _ = asyncdock("runs", "watch", RUN)
    assert code == FINISHED
    assert f"{service.url} cannot be reached: " in out
    assert "trying again in" in out
    assert out.count("step 8/8") == 1


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "api.cli.main", *arguments]


def test_ctrl_c_leaves_the_run_alone_and_says_so(service: Service, tmp_path: Path) -> None:
    service.hold = asyncio.Event()
    process = subprocess.Popen(
        command("runs", "watch", RUN),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 8/8"):
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == INTERRUPTED
    assert err.splitlines()[-1].startswith(
        f"The run goes on. Watch it again: asyncdock runs watch {RUN} "
    )
    assert "Traceback" not in err
    assert {request.method for request in service.requests} == {"GET"}


# --- what goes wrong
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, BAD_INPUT),
        (401, NO_SERVICE),
        (403, NO_SERVICE),
        (404, BAD_INPUT),
        (409, FAILED),
        (413, BAD_INPUT),
        (422, BAD_INPUT),
        (429, NO_SERVICE),
        (500, NO_SERVICE),
        (503, NO_SERVICE),
    ],
)
def test_each_refusal_has_its_exit_code(service: Service, status: int, expected: int) -> None:
    wrong = [
        {"field": "train.steps", "value": 0, "wrong": "is out of range", "fix": "use a value >= 1"}
    ]
    service.faults = deque([lambda request: problem(status, "refused", errors=wrong)] * 99)
    code, out, err = asyncdock("runs", "start", "mock")
    assert (code, out) == (expected, "")
    assert "error: " in err
    assert (
        "needs a token" if status == 401 else "train.steps = 0: is out of range; use a value >= 1"
    ) in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["show", "x"],
        ["start", "mock"],
        ["stop", "x"],
        ["pause", "x"],
        ["resume", "x"],
        ["checkpoint", "x"],
        ["watch", "x"],
        ["logs", "x"],
        ["delete", "x", "--yes"],
    ],
)
def test_an_unreachable_service_is_reported_with_a_fix(arguments: list[str]) -> None:
    code, out, err = asyncdock("runs", *arguments, "--server", NOWHERE)
    assert (code, out) == (NO_SERVICE, "")
    assert (
        f"error: {NOWHERE} cannot be reached: Connection refused; start a service with `asyncdock "
        f"serve`" in err
    )
    assert "Traceback" not in err


def test_a_name_that_does_not_resolve_is_reported() -> None:
    code, _, err = asyncdock("runs", "list", "--server", "http://dock.invalid")
    assert code == NO_SERVICE
    assert "http://dock.invalid cannot be reached" in err
    assert "--server" in err


def test_an_invalid_address_is_reported() -> None:
    code, _, err = asyncdock("runs", "list", "--server", "localhost:8765")
    assert code == BAD_INPUT
    assert (
        "server = 'localhost:8765': is not the address of a service; write it as http://HOST:PORT"
        in err
    )


@pytest.mark.parametrize("name", ["show", "stop", "watch", "logs", "delete"])
def test_an_unknown_run_is_suggested_one(service: Service, name: str) -> None:
    code, _, err = asyncdock("runs", name, RUN[:-1] + "x", *(["--yes"] if name == "delete" else []))
    assert code == BAD_INPUT
    assert f'error: run = "{RUN[:-1]}x": There is no such run; did you mean {RUN}?' in err
    assert (
        "give an id from `asyncdock runs list`, or the folder of a run"
        in (asyncdock("runs", "show", "zzz")[2])
    )


def test_folders_near_are_suggested_too(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a service answers or not."""
    monkeypatch.chdir(tmp_path)
    for run in ("runs/letters-7", "other"):
        Path(run).mkdir(parents=True)
        (Path(run) / "recipe.json").write_text("{}")
    for server in (service.url, NOWHERE):
        err = asyncdock("runs", "show", "leters-7", "--server", server)[2]
        assert "did you mean runs/letters-7?" in err
        assert "give the folder of a run, such as other" in (
            asyncdock("runs", "logs", "zzz", "--server", server)[2].replace("or the", "give the")
        )
    err = asyncdock("runs", "show", "runs")[2]
    assert err.startswith("error: run: runs has no recipe.json; ")
    assert "or the folder of a run, such as other" in err


def test_a_request_that_the_state_forbids_is_reported(service: Service) -> None:
    service.runs[0]["state"] = "finished"
    code, _, err = asyncdock("runs", "pause", RUN)
    assert (code, err) == (FAILED, "error: The run is finished; start another one\n")


def test_a_recipe_that_is_wrong_here_is_not_sent(service: Service, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("= 3")
    assert asyncdock("runs", "start", str(tmp_path / "bad.toml"))[0] == BAD_INPUT
    code, _, err = asyncdock("runs", "start", str(tmp_path / "none.toml"))
    assert code == BAD_INPUT
    assert "none.toml" in err
    code, _, err = asyncdock("runs", "start", "mock", "--set", "steps")
    assert code == BAD_INPUT
    assert "'steps': is not key=value; write for example --set train.steps=10" in err
    assert service.requests == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["runs"],
        ["runs", "lst"],
        ["runs", "list", "--wat"],
        ["runs", "list", "--limit", "0"],
        ["runs", "show"],
        ["runs", "logs", "x", "--lines", "many"],
        ["runs", "start"],
    ],
)
def test_wrong_usage_exits_with_two(arguments: list[str]) -> None:
    code, out, err = asyncdock(*arguments)
    assert code == BAD_INPUT
    assert "Usage" in out + err


def test_each_command_says_what_it_does() -> None:
    for name in [
        command.name or command.callback.__name__
        for command in runs_cli.runs_app.registered_commands
    ]:  # type: ignore[union-attr]
        code, out, _ = asyncdock("runs", name, "--help")
        assert code == FINISHED
        if name != "disk":  # of this machine alone
            assert "--server" in out
            assert "ASYNCDOCK_SERVER" in out
        assert "--json" in out


# --- tokens
# --------------------------------------------------------------------------------------------------


def test_login_keeps_a_token_that_works(service: Service) -> None:
    service.token = "adock_good"
    code, _, err = asyncdock("runs", "list")
    assert code == NO_SERVICE
    assert f"{service.url} needs a token" in err
    assert f"asyncdock login --server {service.url}" in err
    assert asyncdock("login", input="adock_wrong\n")[0] == NO_SERVICE
    assert not keyring_file().exists()
    code, out, err = asyncdock("login", input="adock_good\n")
    assert code == FINISHED
    assert str(keyring_file()) in err
    assert "adock_good" not in out + err
    assert stat.S_IMODE(keyring_file().stat().st_mode) == 0o600
    assert asyncdock("runs", "list")[0] == FINISHED
    assert asyncdock("logout")[0] == FINISHED
    assert asyncdock("runs", "list")[0] == NO_SERVICE
    assert asyncdock("login", input="\n")[0] == BAD_INPUT


def test_each_service_gets_its_own_token(service: Service) -> None:
    with served(Service(SCRIPT)) as other:
        service.token = "adock_one"
        other.token = "adock_two"
        for each in (service, other):
            assert asyncdock("login", "--server", each.url, input=each.token + "\n")[0] == FINISHED
        for each in (service, other):
            assert asyncdock("runs", "list", "--server", each.url + "/")[0] == FINISHED
            assert {request.headers["Authorization"] for request in each.requests} == {
                f"Bearer {each.token}"
            }


def test_a_refused_token_is_reported_with_its_source(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.token = "adock_good"
    remember(service.url, "adock_old")
    code, _, err = asyncdock("runs", "list")
    assert code == NO_SERVICE
    assert "does not accept the token that `asyncdock login` kept" in err
    monkeypatch.setenv("ASYNCDOCK_TOKEN", "adock_env")
    _, _, err = asyncdock("runs", "list")
    assert "does not accept the token in ASYNCDOCK_TOKEN" in err
    assert "adock_env" not in err
    monkeypatch.setenv("ASYNCDOCK_TOKEN", "adock_good")
    assert asyncdock("runs", "list")[0] == FINISHED


def test_a_keyring_that_others_can_read_is_refused(service: Service) -> None:
    remember(service.url, "adock_good")
    keyring_file().chmod(0o640)
    code, _, err = asyncdock("runs", "list")
    assert code == BAD_INPUT
    assert "mode 640" in err
    assert "chmod 600" in err
    assert "adock_good" not in err
    assert service.requests == []
    assert asyncdock("login", input="adock_x\n")[0] == BAD_INPUT
    assert asyncdock("logout")[0] == BAD_INPUT


def test_a_broken_keyring_is_reported_without_its_tokens(service: Service) -> None:
    remember(service.url, "adock_good")
    keyring_file().write_text('{"x": "adock_secret"')
    code, _, err = asyncdock("runs", "list")
    assert code == BAD_INPUT
    assert str(keyring_file()) in err
    assert "adock_secret" not in err
    keyring_file().write_text("[]")
    with pytest.raises(KeyringError, match="no table of tokens"):
        find_token(service.url)


def test_addresses_of_one_service_are_one_key() -> None:
    remember("https://Dock.example/", "adock_1")
    assert find_token("https://dock.example:443") == "adock_1"
    assert find_token("http://dock.example") is None
    remember("https://dock.example", "adock_2")
    assert list(json.loads(keyring_file().read_text()).values()) == ["adock_2"]
    assert forget("https://dock.example")
    assert not forget("https://dock.example")


# --- completion
# --------------------------------------------------------------------------------------------------


def completed(words: str) -> list[str]:
    """What bash offers after ``words``."""
    asked = {
        "_ASYNCDOCK_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    result = runner.invoke(cli.app, [], env=asked, prog_name="asyncdock")
    assert result.stderr == ""
    return sorted(result.stdout.split())


def test_runs_recipes_and_commands_are_completed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    service.runs.append(run_view("other-1"))
    assert completed("asyncdock runs show ") == ["other-1", RUN]
    assert completed("asyncdock runs stop oth") == ["other-1"]
    assert completed("asyncdock runs start mo") == ["mock"]
    assert completed("asyncdock runs che") == ["checkpoint"]
    assert completed("asyncdock run qui") == ["quickstart", "quickstart-vllm"]
    assert completed("asyncdock check recipes/ti") == ["recipes/tiny.toml"]
    assert completed(f"asyncdock runs show --server {NOWHERE} ") == []
    service.token = "adock_good"
    assert completed("asyncdock runs show ") == []


def test_completion_is_installed_by_the_command_itself() -> None:
    asked = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        command("--show-completion", "bash"),
        env=os.environ | asked | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert "_ASYNCDOCK_COMPLETE=complete_bash" in done.stdout


# --- start-up
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["runs", "list"],
        ["samples", RUN],
        ["runs", "watch", RUN],
        ["runs", "start", "mock"],
    ],
)
def test_no_command_that_only_asks_imports_torch(service: Service, arguments: list[str]) -> None:
    code = f"""
import atexit, sys
sys.argv = ["asyncdock", *{arguments!r}]
heavy = ("torch", "transformers", "tensordict", "redis")
atexit.register(lambda: print("IMPORTED", *[name for name in heavy if name in sys.modules]))
from api.cli.main import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "IMPORTED"
