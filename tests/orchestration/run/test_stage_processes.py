"""Stages of a user in processes of their own: what they find there, what their worker takes of
them, how they end."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestration.processes.environment import of_user_code
from orchestration.processes.handles import Process
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.sandbox import user_code
from orchestration.sandbox.sandbox import NAMESPACES, Available, Sandbox, refusal
from orchestration.sandbox.user_code import import_path
from orchestration.user_stages.caller import StageProcess
from orchestration.user_stages.process import Setup
from stages.flow.declarations import StageDeclaration
from stages.flow.stage_calls import StageError
from tests.orchestration.run.test_flow import pid_of
from tests.orchestration.run.test_run import assert_nothing_left
from tests.orchestration.runs import MOCK, complete, executing, recipe
from tests.servers import REDIS, WITHOUT_REDIS, RedisServer

HERE = "tests.orchestration.run.hostile_stages"
PASSWORD = "the-password-of-the-index"
MARKED: dict[str, Any] = {"reward__functions": [{"name": f"{HERE}:marked"}]}


def with_stage(name: str, options: dict[str, Any], **changes: Any) -> Any:
    stages = [{"use": f"{HERE}:{name}", **options}]
    changes = {"launch__launcher": "process", **MARKED, "train__steps": 2, **changes}
    return recipe({**MOCK, "stages": stages}, **changes)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    if REDIS is None:
        pytest.skip(WITHOUT_REDIS)
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis", password=PASSWORD)
    server.start()
    yield server
    server.stop()


async def test_a_stage_finds_nothing_of_its_worker(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does its module, which no worker imports."""
    imports = tmp_path / "imports"
    monkeypatch.setenv("HOSTILE_IMPORTS", str(imports))
    monkeypatch.setenv("ASYNCDOCK_TOKEN", PASSWORD)
    options = {
        "file": str(tmp_path / "found"),
        "pattern": "".join(f"[{letter}]" for letter in PASSWORD),
    }
    of = with_stage("Looks", options, pipeline__index=server.url)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    found = json.loads((tmp_path / "found").read_text())
    files = []
    sockets = []
    for each in found.pop("descriptors"):
        (sockets if each.startswith("socket") else files).append(each)
    log = str(tmp_path / "run" / "logs" / "looks-0.log")
    titles = found.pop("titles")
    nothing: dict[str, Any] = {"environments": [], "variables": [], "objects": [], "mapped": []}
    assert found == {**nothing, "texts": 0, "memory": 0, "connected": 0}
    assert titles[1].startswith("asyncdock worker looks-0"), "it looked at its worker"
    assert {*files} <= {"/dev/null", log, "anon_inode:[eventpoll]", "pipe:[]", ""}, files
    assert all(each.startswith("socket AF_UNIX ''") for each in sockets), sockets
    assert "printed by a stage" in (tmp_path / "run" / "logs" / "looks-0.log").read_text()
    importers = (
        {line.partition(" ")[2] for line in imports.read_text().splitlines()}
        if imports.exists()
        else set()
    )
    assert any("asyncdock stage looks-0" in importer for importer in importers), importers
    assert not any("asyncdock worker" in importer for importer in importers), importers
    assert_nothing_left(watched.run)


@pytest.mark.parametrize(
    ("kind", "says"),
    [("pickle", "made its process send"), ("larger than its bytes", "are not its columns")],
)
async def test_what_is_sent_in_the_place_of_columns_ends_the_run_and_nothing_is_unpickled(
    kind: str, says: str, tmp_path: Path
) -> None:
    unpickled = tmp_path / "unpickled"
    of = with_stage("Sends", {"kind": kind, "file": str(unpickled)})
    _, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "failed"
    assert says in result.reason
    assert not unpickled.exists()


SAYS = {
    "pickle": "made its process send",
    "pickle in the head": "\x80\x04",
    "pickle as columns": "are not its columns",
    "larger than its bytes": "are not its columns",
    "more rows": "3 rows came for 2",
    "a list": "made its process send a list in JSON",
    "deep": r"are no JSON \(RecursionError\)",
    "drop": "takes rows, and its process dropped them",
    "endless": "1048576 are taken",
}


@pytest.mark.parametrize("kind", SAYS)
async def test_what_is_no_answer_is_refused(kind: str, tmp_path: Path) -> None:
    declared = StageDeclaration(
        "sends", "rows", {"response_ids": "int64 ragged"}, {"mark": "float32"}
    )
    unpickled = tmp_path / "unpickled"
    use = f"{HERE}:Sends"
    setup = Setup(
        use, {"kind": kind, "file": str(unpickled)}, declared, 60.0, "", import_path([use])
    )
    environment = of_user_code(os.environ, None)
    process = StageProcess(
        setup, environment=environment, log=tmp_path / "log", most=1 << 20, title="a stage"
    )
    try:
        await process.open()
        with pytest.raises(StageError, match=SAYS[kind]):
            await process.call({"response_ids": [torch.tensor([1, 2]), torch.tensor([3])]}, 2)
    finally:
        await process.close()
    assert not unpickled.exists()


async def marks(
    use: str, options: dict[str, Any], sandbox: Sandbox | None, log: Path
) -> list[float]:
    """What a stage of ``use`` makes of two rows."""
    declared = StageDeclaration("it", "rows", {"response_ids": "int64 ragged"}, {"mark": "float32"})
    setup = Setup(
        f"{HERE}:{use}", options, declared, 60.0, "tiny", import_path([f"{HERE}:{use}"]), sandbox
    )
    environment = of_user_code(os.environ, None)
    process = StageProcess(setup, environment=environment, log=log, most=1 << 20, title="a stage")
    try:
        await process.open()
        made = await process.call({"response_ids": [torch.tensor([1, 2]), torch.tensor([3])]}, 2)
    finally:
        await process.close()
    return [*made["mark"].tolist()]


@pytest.mark.skipif(bool(refusal(NAMESPACES)), reason="this machine gives no namespaces")
async def test_a_stage_in_a_sandbox_reaches_its_scratch_folder_alone(tmp_path: Path) -> None:
    (secret := tmp_path / "secret").write_text("of the user")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        options = {"secret": str(secret), "port": listening.getsockname()[1]}
        found = {
            "sandbox": await marks("Reaches", options, Sandbox(memory=4 << 30), tmp_path / "log"),
            "may read": await marks(
                "Reaches", options, Sandbox(read=(str(secret),)), tmp_path / "log"
            ),
            "network": await marks("Reaches", options, Sandbox(network=True), tmp_path / "log"),
        }
        # What is written beside a file that it may read is in memory of its own.
        assert found == {"sandbox": [0, 0], "may read": [5, 5], "network": [2, 2]}
        assert not (tmp_path / "secret.mine").exists()
        assert await marks("Reaches", options, None, tmp_path / "log") == [15, 15]


@pytest.mark.skipif(bool(refusal(NAMESPACES)), reason="this machine gives no namespaces")
async def test_a_run_with_a_stage_in_a_sandbox(tmp_path: Path) -> None:
    """The stage gets texts, so that a tokenizer was there before the sandbox."""
    (words := tmp_path / "words").write_text("")
    (tmp_path / "other").write_text("")
    for file, expected in (words, 1.0), (tmp_path / "other", 0.0):
        options = {"file": str(file), "sandbox": True, "read": [str(words)]}
        of = with_stage("Reads", options, reward__functions=[{"name": f"{HERE}:bare_mark"}])
        watched, result = await complete(
            Execution(RunFolder.create(of, tmp_path / f"run-{file.name}"))
        )
        assert result.state == "finished", result.reason
        assert {event["reward_mean"] for event in watched.of("step")} == {expected}


async def test_a_machine_without_a_sandbox_ends_the_run_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "available", lambda: Available("of policy", "of age"))
    with pytest.raises(
        StageError,
        match=r"stage 'it': no sandbox: namespaces are refused \(of "
        r"policy\)",
    ):
        await marks("Reads", {"file": ""}, Sandbox(), tmp_path / "log")


@pytest.mark.parametrize(
    ("kind", "how"), [("exit", "code 3"), ("segfault", "SIGSEGV"), ("forks", "code 3")]
)
async def test_a_stage_whose_process_dies_is_started_again(
    kind: str, how: str, tmp_path: Path
) -> None:
    of = with_stage(
        "Dies", {"kind": kind, "file": str(tmp_path / "died")}, pipeline__lease_seconds=3.0
    )
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    if (forked := tmp_path / "died.pid").exists():
        os.kill(int(forked.read_text()), signal.SIGKILL)
    assert result.state == "finished", result.reason
    (restarted,) = [event for event in watched.of("worker") if event["change"] == "restarted"]
    assert restarted["worker"] == "dies-0"
    assert "stage 'dies' ended its process" in restarted["reason"]
    assert how in restarted["reason"]
    assert_nothing_left(watched.run)


async def test_a_killed_worker_leaves_no_process_of_its_stage(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    of = with_stage("Stays", {"file": str(file)}, launch__max_restarts=0)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(file.exists)
        processes = [Process.of(int(pid)) for pid in file.read_text().split()]
        assert all(process.alive() for process in processes)
        os.kill(pid_of(watched, "stays-0"), signal.SIGKILL)
        result = await work
    assert result.state == "failed"
    for process in processes:
        await process.wait()
