"""A sweep in a service's queue: its runs outlive its process, and none is submitted twice."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.client import SyncClient
from tests.api.cli.results.test_sweep_kills import start, until
from tests.api.served import Served

SETS = ("--set", "train.steps=30", "--set", "rollout.mock.time_scale=0.05")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    service = Served(tmp_path_factory.mktemp("service") / "data", "--runs", "2")
    service.start()
    yield service
    service.end()


def states(out: Path) -> list[str]:
    if not (out / "sweep.json").exists():
        return []
    return [run["state"] for run in json.loads((out / "sweep.json").read_bytes())["runs"]]


def test_a_sweep_that_is_killed_finds_its_runs_again(served: Served, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    arguments = ["mock", "--over", "seed=0..3", *SETS, "--out", str(out), "--server", served.url]
    sweep = start(out, *arguments)
    until(lambda: states(out).count("running") == 4, sweep)
    until(
        lambda: all(run["id"] for run in json.loads((out / "sweep.json").read_bytes())["runs"]),
        sweep,
    )
    sweep.kill()
    sweep.communicate()
    document = json.loads((out / "sweep.json").read_bytes())
    ids = [run["id"] for run in document["runs"]]
    document["runs"][2]["id"] = ""  # as a kill between the submission and its note leaves it
    (out / "sweep.json").write_text(json.dumps(document))

    sweep = start(out, str(out))
    output, _ = sweep.communicate(timeout=300)
    assert sweep.returncode == 0, output
    document = json.loads((out / "sweep.json").read_bytes())
    assert [run["state"] for run in document["runs"]] == ["finished"] * 4
    assert [run["id"] for run in document["runs"]] == ids
    with SyncClient(served.url) as client:
        runs = list(client.runs())
    assert sorted(run.id for run in runs) == sorted(ids), "each run once"


def test_an_interrupt_stops_the_runs_of_the_service_and_the_folder_goes_on(
    served: Served, tmp_path: Path
) -> None:
    out = tmp_path / "sweep"
    arguments = ["mock", "--over", "seed=10..11", *SETS, "--out", str(out), "--server", served.url]
    sweep = start(out, *arguments, "--set", "train.steps=2000")
    with SyncClient(served.url) as client:

        def begun() -> bool:
            runs = [run for run in client.runs() if run.recipe["train"]["steps"] == 2000]
            return len(runs) == 2 and all(run.steps_done for run in runs)

        until(begun, sweep)
        sweep.send_signal(signal.SIGINT)
        output, _ = sweep.communicate(timeout=300)
        assert sweep.returncode == 130, output
        assert f"Go on with: asyncdock sweep {out}" in output
        document = json.loads((out / "sweep.json").read_bytes())
        assert [run["state"] for run in document["runs"]] == ["stopped"] * 2
        ids = [run["id"] for run in document["runs"]]
        assert [client.run(run).state for run in ids] == ["stopped"] * 2
        for run in ids:
            client.delete(run)
    sweep = start(out, str(out))
    output, _ = sweep.communicate(timeout=300)
    assert sweep.returncode == 1, output
    assert "failed: " in output, "a run that was deleted there"


def test_what_the_service_refuses_is_said_before_the_first_run(
    served: Served, tmp_path: Path
) -> None:
    out = tmp_path / "sweep"
    over = ["--over", "seed=20..21", "--over", "reward.functions=[{name='nobody:knows'}]"]
    sweep = start(out, "mock", *over, "--out", str(out), "--server", served.url)
    output, _ = sweep.communicate(timeout=300)
    assert sweep.returncode == 2, output
    assert "reward.functions" in output
    assert "[every run]" in output
    assert not out.exists()
