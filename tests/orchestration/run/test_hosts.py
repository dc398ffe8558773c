"""A run whose rollout workers are on another machine: the commands of docs/two-machines.md, in network namespaces."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from orchestration.recipe.problems import RecipeError
from orchestration.run.kinds import remote_workers, workers_of
from pipeline.index.client import Index
from tests.machines import two_machines
from tests.orchestration.runs import MOCK, recipe

PAGE = Path(__file__).parents[3] / "docs" / "two-machines.md"
REMOTE: dict[str, Any] = {
    "rollout__workers": 2,
    "launch__remote_rollouts": 1,
    "launch__launcher": "process",
    "pipeline__index": "redis://a.server",
    "pipeline__serve": "0.0.0.0",
    "sync__transport": "collective",
    "sync__serve": "0.0.0.0",
}


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    file = out / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may be half written
    return [event["data"] for event in map(json.loads, lines) if event["kind"] == kind]


def until(condition: Any, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)  # files and processes of other namespaces have nothing else to wait on


def test_a_run_on_two_machines_outlives_one_host_and_ends_with_the_next(tmp_path: Path) -> None:
    """Both machines have the same host name. The host has nothing of the run's folder."""
    out = tmp_path / "out"
    with two_machines(tmp_path) as machines:
        of = recipe(MOCK, **{**REMOTE, "pipeline__index": machines.url}, train__steps=5000, launch__max_restarts=100)
        (tmp_path / "recipe.json").write_text(of.to_json())
        with (tmp_path / "head.log").open("w") as log:
            head = machines.start(
                0,
                "api.cli.main",
                "run",
                str(tmp_path / "recipe.json"),
                "--out",
                str(out),
                "--plain",
                stdout=log,
                stderr=log,
            )
            until(lambda: (out / "index.json").exists())
            run = json.loads((out / "index.json").read_text())["run"]

            def host(number: int) -> Any:
                folder = str(tmp_path / f"host-{number}")
                with (tmp_path / f"host-{number}.log").open("w") as own:
                    command = ("host", "--join", machines.url, "--run", run, "--data", folder)
                    return machines.start(1, "api.cli.main", *command, hidden=[out], stdout=own, stderr=own)

            def ready() -> int:
                found = [event for event in events(out, "worker") if event["change"] == "ready"]
                return sum(event["worker"] == "rollout-1" for event in found)

            first = host(1)
            until(lambda: ready() == 1 and len(events(out, "step")) > 3)
            assert asyncio.run(warehouses(machines.near, run)) == 2
            first.kill()
            second = host(2)
            until(lambda: ready() == 2)
            made = len(events(out, "step"))
            until(lambda: len(events(out, "step")) > made + 3)
            asyncio.run(stop(machines.near, run))
            head.wait(60)
            second.wait(60)
        steps = [event["step"] for event in events(out, "step")]
        assert steps == list(range(len(steps))), (tmp_path / "head.log").read_text()
        groups = sorted(group for event in events(out, "step") for group in event["groups"])
        assert groups == list(range(len(groups))), "each group was trained once"
        changes = [e["change"] for e in events(out, "worker") if e["worker"] == "rollout-1"]
        assert changes.count("died") == changes.count("restarted") == 1
        assert second.returncode == 0, (tmp_path / "host-2.log").read_text()


async def warehouses(url: str, run: str) -> int:
    async with Index(url, run) as index:
        return len({record.host for record in await index.warehouses()})


async def stop(url: str, run: str) -> None:
    async with Index(url, run) as index:
        await index.transition(["running"], "stopping")


def test_the_last_rollout_workers_are_remote() -> None:
    of = recipe(MOCK, **REMOTE)
    assert remote_workers(of) == {("rollout", 1)} < set(workers_of(of))
    assert remote_workers(recipe(MOCK)) == set()


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"launch__remote_rollouts": 3}, r"launch\.remote_rollouts = 3: is more than rollout\.workers = 2"),
        ({"launch__launcher": "inline"}, r"launch\.launcher = .*has one process"),
        ({"pipeline__index": "embedded"}, r"pipeline\.index = .*is on this machine alone"),
        ({"pipeline__serve": ""}, r"pipeline\.serve = .*is empty, but other machines start workers"),
        ({"sync__transport": "shared_memory"}, r"sync\.transport = .*is the memory of one machine"),
        ({"sync__serve": "127.0.0.1"}, r"sync\.serve = .*is reached from this machine alone"),
    ],
)
def test_what_other_machines_cannot_reach_is_refused(change: dict[str, Any], wrong: str) -> None:
    with pytest.raises(RecipeError, match=wrong):
        recipe(MOCK, **{**REMOTE, **change})


def test_the_page_shows_the_commands() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for part in ("asyncdock host --run", "remote_rollouts = 1", "ASYNCDOCK_INDEX", 'transport = "collective"'):
        assert part in page, part
