"""A run whose rollout workers are on another machine: the commands of docs/cluster.md, in
network namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from orchestration.recipe.problems import RecipeError
from orchestration.recipe.worker_kinds import remote_workers, workers_of
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.service.own_services import read_authorization
from orchestration.state.paths import WHERE
from orchestration.supervise.waiting import waiting_chain
from pipeline.index.address import split_password
from pipeline.index.client import INDEX_VARIABLE, Index
from pipeline.node import is_own
from tests.machines import ROOT, two_machines
from tests.orchestration.run.test_clocks import started
from tests.orchestration.runs import MOCK, executing, recipe
from tests.servers import self_signed

PAGE = Path(__file__).parents[3] / "docs" / "cluster.md"
REMOTE: dict[str, Any] = {
    "rollout__workers": 2,
    "launch__remote_rollouts": 1,
    "launch__launcher": "process",
}


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    file = out / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may be half written
    return [event["data"] for event in map(json.loads, lines) if event["kind"] == kind]


def until(condition: Any, seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)  # files and processes of other namespaces have nothing else to wait on


@pytest.mark.timeout(600)
def test_a_run_on_two_machines_outlives_one_host_and_ends_with_the_next(tmp_path: Path) -> None:
    """Both machines have the same host name.

    The run began on the head alone; the host has nothing of the run's folder, and reads the
    checkpoint at its URL. The index is the head's own, and all that they exchange is inside TLS.
    """
    out = tmp_path / "out"
    store = tmp_path / "store"
    store.mkdir()
    begun = asyncio.run(
        Execution(
            RunFolder.create(recipe(MOCK, train__steps=3, checkpoint__url=str(store)), out)
        ).execute()
    )
    assert begun.state == "finished", begun.reason
    with two_machines(tmp_path) as machines:
        pem = self_signed(tmp_path, machines.address(0), machines.address(1))
        keys = {
            **REMOTE,
            "pipeline__tls_certificate": pem / "cert.pem",
            "pipeline__tls_key": pem / "key.pem",
        }
        keys |= {
            "pipeline__tls_authority": pem / "cert.pem",
            "train__steps": 5000,
            "launch__max_restarts": 100,
        }
        changes = [
            part
            for key, value in keys.items()
            for part in ("--set", f"{key.replace('__', '.')}={value}")
        ]
        with (tmp_path / "head.log").open("w") as log:
            command = ("resume", str(out), "--plain", *changes)
            head = machines.start(0, "api.cli.main", *command, stdout=log, stderr=log)
            until(lambda: (out / "index.json").exists() or head.poll() is not None)
            where = json.loads((out / "index.json").read_text())
            run = where["run"]

            printed = "Other machines join with:\n"
            until(lambda: printed in (tmp_path / "head.log").read_text())
            joining = shlex.split(
                (tmp_path / "head.log").read_text().partition(printed)[2].partition("\n")[0]
            )
            program = joining.index("asyncdock")
            variables = dict(word.split("=", 1) for word in joining[:program])
            assert variables == {
                "ASYNCDOCK_INDEX": where["join"],
                "ASYNCDOCK_HOST_TOKEN": where["token"],
            }
            assert joining[program:] == ["asyncdock", "host", "--run", run]

            def host(number: int) -> Any:
                folder = str(tmp_path / f"host-{number}")
                with (tmp_path / f"host-{number}.log").open("w") as own:
                    command = (*joining[program + 1 :], "--data", folder)
                    there = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
                    return machines.start(
                        1, "api.cli.main", *command, hidden=[out], stdout=own, stderr=own, env=there
                    )

            def ready() -> int:
                found = [event for event in events(out, "worker") if event["change"] == "ready"]
                return sum(event["worker"] == "rollout-1" for event in found)

            assert not split_password(where["join"])[1]
            first = host(1)
            until(lambda: ready() == 1 and len(events(out, "step")) > 3)
            assert asyncio.run(warehouses(where["index"], run)) == 2
            pulled = list((tmp_path / "host-1" / run / "checkpoints").glob("step-*"))
            parts = [sorted(path.name for path in found.iterdir()) for found in pulled]
            assert parts == [["digests.json", "model", "run.json"]], "what its engine needs"
            first.kill()
            second = host(2)
            until(lambda: ready() == 2)
            made = len(events(out, "step"))
            until(lambda: len(events(out, "step")) > made + 3)
            asyncio.run(stop(where["index"], run))
            head.wait(60)
            second.wait(60)
        steps = [event["step"] for event in events(out, "step")]
        assert steps == list(range(4, 4 + len(steps))), (tmp_path / "head.log").read_text()
        groups = sorted(group for event in events(out, "step") for group in event["groups"])
        assert groups == list(range(12, 12 + len(groups))), "each group was trained once"
        changes = [e["change"] for e in events(out, "worker") if e["worker"] == "rollout-1"]
        assert changes.count("died") == changes.count("restarted") == 1
        assert second.returncode == 0, (tmp_path / "host-2.log").read_text()


@pytest.mark.timeout(500)
def test_cables_are_pulled_and_put_back_and_a_run_ends_without_the_machine_that_stays_away(
    tmp_path: Path,
) -> None:
    """First those of the host and of the head in turn, for less than a worker may be silent, while
    steps, publishing and checkpoints go on; then that of the host for good: the last step has one
    replica, and no host takes the other one."""
    out = tmp_path / "out"
    with two_machines(tmp_path) as machines:
        limits = {"launch__max_restarts": 100, "launch__hang_timeout": 6.0, "checkpoint__every": 2}
        # it outlasts both partitions, and a silence
        limits["train__mock"] = {"time_scale": 1.0, "step_seconds": 0.2}
        of = recipe(MOCK, **{**REMOTE, "pipeline__index": machines.url}, **limits, train__steps=300)
        (tmp_path / "recipe.json").write_text(of.to_json())
        with (tmp_path / "head.log").open("w") as log, (tmp_path / "host.log").open("w") as own:
            command = ("run", str(tmp_path / "recipe.json"), "--out", str(out), "--plain")
            head = machines.start(0, "api.cli.main", *command, stdout=log, stderr=log)
            until(lambda: (out / "index.json").exists())
            run = json.loads((out / "index.json").read_text())["run"]
            command = (
                "host",
                "--join",
                machines.url,
                "--run",
                run,
                "--data",
                str(tmp_path / "host"),
            )
            machines.start(1, "api.cli.main", *command, hidden=[out], stdout=own, stderr=own)
            until(
                lambda: (
                    [e["change"] for e in events(out, "worker") if e["worker"] == "rollout-1"][-1:]
                    == ["ready"]
                )
            )
            made = len(events(out, "step"))
            until(lambda: len(events(out, "step")) > made + 3)
            for machine in (1, 0):
                machines.unplug(machine)
                time.sleep(3.0)  # the stall itself
                machines.unplug(machine, again=True)
                made = len(events(out, "step"))
                until(lambda: len(events(out, "step")) > made + 3)  # noqa: B023
            died = [event for event in events(out, "worker") if event["change"] == "died"]
            assert died == [], "both partitions have healed"
            machines.unplug(1)
            head.wait(240)
        text = (tmp_path / "head.log").read_text()
        assert head.returncode == 0, text
        assert [event["step"] for event in events(out, "step")] == list(range(1, 301)), text
        assert sorted(group for event in events(out, "step") for group in event["groups"]) == list(
            range(1200)
        )
        changes = [
            (e["change"], e.get("reason", ""))
            for e in events(out, "worker")
            if e["worker"] == "rollout-1"
        ]
        assert [change for change, _ in changes if change in ("died", "restarted")] == [
            "died",
            "restarted",
        ]
        assert changes[-1] == ("absent", "no host has room for it")


async def test_a_host_that_was_taken_for_lost_joins_again_when_it_is_back(tmp_path: Path) -> None:
    """All of its processes are stopped for longer than a host may be silent."""
    changes = {"launch__remote_rollouts": 2, "pipeline__serve": "127.0.0.1"}
    of = recipe(MOCK, **{**REMOTE, **changes}, train__steps=100_000)
    (tmp_path / "host").mkdir()
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):

        def hosts() -> list[str]:
            """Where rollout-0 became ready."""
            return [
                event["host"]
                for event in watched.of("worker")
                if (event["worker"], event["change"]) == ("rollout-0", "ready")
            ]

        await watched.until(lambda: bool(watched.of("state")))
        where = json.loads((tmp_path / "run" / WHERE).read_text())
        joining = {INDEX_VARIABLE: where["join"], "ASYNCDOCK_HOST_TOKEN": where["token"]}
        command = ["host", "--run", where["run"], "--workers", "2"]
        host = started(command, tmp_path / "host", **joining)
        try:
            await watched.until(lambda: len(watched.of("step")) > 3)
            family = [psutil.Process(host.pid), *psutil.Process(host.pid).children(recursive=True)]
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):  # one that was ending
                    process.suspend()
            await watched.until(
                lambda: (
                    ("host", "died") in [(e["stage"], e["change"]) for e in watched.of("worker")]
                )
            )
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
            await watched.until(lambda: len(set(hosts())) == 2)
            steps = len(watched.of("step"))
            await watched.until(lambda: len(watched.of("step")) > steps + 3)
            watched.stop.set()
            result = await work
            assert await asyncio.to_thread(host.wait, 60) == 0, (tmp_path / "host/out").read_text()
        finally:
            host.kill()
            host.wait()
    assert result.state == "stopped", result.reason
    groups = [group for step in watched.of("step") for group in step["groups"]]
    assert sorted(groups) == list(range(len(groups))), "each group was trained once"


async def test_a_run_without_its_host_is_running_and_ends_with_the_workers_that_it_has(
    tmp_path: Path,
) -> None:
    """It trained all of its steps in the state "starting", and then waited for the host in
    silence."""
    changes = {"pipeline__serve": "127.0.0.1"}
    of = recipe(MOCK, **REMOTE, **changes, launch__startup_timeout=3600.0)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: bool(watched.of("step")))
        await watched.until(lambda: "running" in [state["state"] for state in watched.of("state")])
        result = await work
    assert result.state == "finished", result.reason
    assert [step["step"] for step in watched.of("step")] == list(range(1, of.train.steps + 1))
    absent = [
        (event["worker"], event["reason"])
        for event in watched.of("worker")
        if event["change"] == "absent"
    ]
    assert absent == [("rollout-1", "no host has room for it")]


async def test_a_run_whose_rollouts_are_all_on_hosts_says_that_it_waits_for_one(
    tmp_path: Path,
) -> None:
    changes = {"pipeline__serve": "127.0.0.1"}
    limits = {"launch__remote_rollouts": 2, "launch__startup_timeout": 20.0}
    async with executing(
        Execution(
            RunFolder.create(recipe(MOCK, **{**REMOTE, **limits}, **changes), tmp_path / "run")
        )
    ) as (
        watched,
        work,
    ):
        ready = {"flow-0", "update-0"}
        await watched.until(
            lambda: ready <= {e["worker"] for e in watched.of("worker") if e["change"] == "ready"}
        )
        assert watched.run.supervisor is not None
        index = watched.run.supervisor.index
        while "a host to start" not in (chain := await waiting_chain(index))[-1].on:  # noqa: ASYNC110 - until admitted
            await asyncio.sleep(0.05)
        assert (await index.state())[0] == "starting"
        assert chain[-1].text == (
            "stage rollout waits for a host to start its workers; start one with `asyncdock host`; "
            "launch.startup_timeout = 20 s"
        )
        result = await work
    assert result.state == "failed"
    assert (
        "['rollout-0', 'rollout-1'] not ready within launch.startup_timeout = 20 s" in result.reason
    )
    assert (
        "no host has started ['rollout-0', 'rollout-1']: start one with `asyncdock host`"
        in result.reason
    )
    assert not watched.of("step")


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
        (
            {"launch__remote_rollouts": 3},
            r"launch\.remote_rollouts = 3: is more than "
            r"rollout\.workers = 2",
        ),
        ({"launch__launcher": "inline"}, r"launch\.launcher = .*has one process"),
    ],
)
def test_workers_that_hosts_cannot_have_are_refused(change: dict[str, Any], wrong: str) -> None:
    with pytest.raises(RecipeError, match=wrong):
        recipe(MOCK, **{**REMOTE, **change})


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline__serve": "0.0.0.0"},
        {"pipeline__serve": "::1"},
        {"pipeline__serve": "localhost"},
        {"sync__transport": "network", "pipeline__serve": "0.0.0.0"},
        {"sync__transport": "network", "pipeline__serve": "127.0.0.1"},
    ],
    ids=lambda changes: " ".join(f"{key}={value}" for key, value in changes.items()),
)
async def test_a_run_works_with_the_addresses_that_check_accepts(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """Those of all addresses beside an index on a socket or on loopback passed `check`, and ended
    the run in `flow-0`."""
    if "::1" in changes.values() and not is_own("::1"):
        pytest.skip("this machine has no IPv6")
    result = await Execution(
        RunFolder.create(recipe(MOCK, **changes, train__steps=2), tmp_path / "run")
    ).execute()
    assert result.state == "finished", result.reason


def test_the_page_shows_the_commands() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for part in (
        "asyncdock host --run",
        "--set launch.remote_rollouts=1",
        "ASYNCDOCK_INDEX=",
        "ASYNCDOCK_HOST_TOKEN=",
    ):
        assert part in page, part


def test_a_service_runs_with_rollout_workers_on_a_host_of_another_network(tmp_path: Path) -> None:
    """``asyncdock serve`` on one machine, ``POST /v1/runs``, and ``asyncdock host`` on the other,
    which has none of the service's folders. Both reach the service's index."""
    data = tmp_path / "data"
    of = recipe(MOCK, **{**REMOTE, "launch__remote_rollouts": 2, "train__steps": 6}).model_dump(
        mode="json"
    )
    del of["pipeline"]["index"]  # the service's own
    with two_machines(tmp_path) as machines, (tmp_path / "serve.log").open("w") as log:
        options = ("--data", str(data), "--listen", "127.0.0.1:8765", "--index", machines.url)
        allowed = ("--allow-listen", "0.0.0.0")
        serve = machines.start(0, "api.cli.main", "serve", *options, *allowed, stderr=log)
        assert serve.stdout is not None
        assert serve.stdout.readline() == "AsyncDock serves http://127.0.0.1:8765\n", (
            tmp_path / "serve.log"
        ).read_text()
        headers = {"Authorization": f"Bearer {read_authorization(data)}"}
        with (
            machines.inside(0),
            httpx.Client(
                base_url="http://127.0.0.1:8765/v1", headers=headers, timeout=60
            ) as client,
        ):
            made = client.post("/runs", json={"recipe": of})
            assert made.status_code == 201, made.text
            run = made.json()["id"]
            with (tmp_path / "host.log").open("w") as own:
                command = (
                    "host",
                    "--join",
                    machines.url,
                    "--run",
                    run,
                    "--workers",
                    "2",
                    "--data",
                    str(tmp_path / "host"),
                )
                host = machines.start(
                    1, "api.cli.main", *command, hidden=[data], stdout=own, stderr=own
                )
            until(
                lambda: (
                    client.get(f"/runs/{run}").json()["state"] in ("finished", "failed", "stopped")
                )
            )
            found = client.get(f"/runs/{run}").json()
            assert found["state"] == "finished", found
        assert host.wait(60) == 0, (tmp_path / "host.log").read_text()
        out = next(data.rglob(run))
    assert sorted(group for event in events(out, "step") for group in event["groups"]) == list(
        range(24)
    )
    ready = {
        event["worker"]: event.get("host")
        for event in events(out, "worker")
        if event["change"] == "ready"
    }
    assert ready["rollout-0"] == ready["rollout-1"] is not None
    assert {event["worker"] for event in events(out, "sync") if event["version"] == 6} >= {
        "rollout-0",
        "rollout-1",
    }
