"""Servers and engines that are killed: what was acknowledged is answered, to the same bits."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from orchestration.calls.bases import describe_bases
from orchestration.calls.interface import Busy, Failed
from orchestration.calls.journal import JournalDamaged
from orchestration.calls.service import TORCH_ENTRY, open_service
from orchestration.processes.handles import Process
from pipeline.locks import Locked
from stages.calls.interface import CallRefused, ModelOptions
from stages.model.load import tiny_model, tiny_tokenizer
from tests.orchestration.calls.services import (
    ENTRY,
    SECONDS,
    Client,
    datum,
    files_of_at_most,
    prompt,
    small_service,
)
from tests.orchestration.calls.small_engine import KILLING_TOKEN, NO_MEMORY

CALLS = 60
KILLS = 10
DEADLINE = 300.0


class Driver:
    """Runs the driver until it is killed, again and again, at most ``most_kills`` times. ``lines``:
    what it said of answers."""

    def __init__(self, folder: Path, most_kills: int = KILLS, **settings: Any) -> None:
        self.most_kills = most_kills
        self.settings = {
            "folder": str(folder / "data"),
            "entry": ENTRY,
            "engine_options": {"folder": str(folder)},
            "base": "small",
            "calls": CALLS,
            "acknowledged": 0,
            "session": "",
            **settings,
        }
        self.lines = list[str]()
        self._under: list[Process] = []  # that it had at the last kill
        self.output = ""
        self.kills = 0

    async def run(self, chance: random.Random | None = None) -> bool:
        """Run it to its end, or by ``chance`` until it is killed; a process under it is killed too,
        now and then. Returns whether it came to its end."""
        self.lines.clear()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.orchestration.calls.driver", json.dumps(self.settings)),
            stdout=PIPE,
            stderr=STDOUT,
        )
        assert process.stdout is not None
        until_kill = 0 if chance is None else chance.randrange(1, 12)
        try:
            async with asyncio.timeout(DEADLINE):
                async for raw in process.stdout:
                    line = raw.decode().rstrip()
                    self.output += line + "\n"
                    self._read(line)
                    until_kill -= line.startswith(("acknowledged", "answer"))
                    if chance is not None and until_kill == 0 and self.kills < self.most_kills:
                        await asyncio.sleep(chance.random() / 50)  # anywhere in what follows
                        self._kill(process.pid, chance)
                        until_kill = chance.randrange(1, 12)
                code = await process.wait()
                assert code in (0, -signal.SIGKILL), self.output
                return code == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await all_ended(self._under)

    def _read(self, line: str) -> None:
        match line.split():
            case ["session", session]:
                self.settings["session"] = session
            case ["acknowledged", number]:
                self.settings["acknowledged"] = int(number) + 1
            case ["answer" | "sample" | "weights" | "steps" | "checkpoints", *_]:
                self.lines.append(line)

    def _kill(self, server: int, chance: random.Random) -> None:
        self.kills += 1
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended just now
            self._under = started_by(server)
            os.kill(chance.choice([server, *(p.pid for p in self._under)]), signal.SIGKILL)


def started_by(pid: int) -> list[Process]:
    """Return the processes under ``pid``: engines, each before its ranks."""
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [each for child in children for each in (Process.of(child), *started_by(child))]


async def all_ended(processes: Sequence[Process]) -> None:
    async with asyncio.timeout(DEADLINE):
        await asyncio.gather(*(process.wait() for process in processes))


async def undisturbed(folder: Path, **settings: Any) -> list[str]:
    driver = Driver(folder, **settings)
    os.mkdir(folder)
    assert await driver.run(), driver.output
    return driver.lines


async def killed(folder: Path, seed: int, *, kills: int = KILLS, **settings: Any) -> list[str]:
    chance = random.Random(seed)
    driver = Driver(folder, kills, **settings)
    os.mkdir(folder)
    while not await driver.run(chance):
        pass
    assert "ALARM" not in driver.output
    return driver.lines


@pytest.mark.parametrize("seed", range(6))
async def test_servers_and_engines_that_are_killed_anywhere_change_no_bit(
    tmp_path: Path, seed: int
) -> None:
    expected = await undisturbed(tmp_path / "undisturbed")
    assert len([line for line in expected if line.startswith("answer")]) == CALLS
    (steps,) = (line.split() for line in expected if line.startswith("steps"))
    assert len(steps) == 1 + CALLS * 3 // 10 - CALLS // 30, "after a load one has no gradients"
    assert await killed(tmp_path / "killed", seed) == expected


async def test_so_it_is_with_a_model_of_torch(tmp_path: Path) -> None:
    torch: dict[str, Any] = {
        "entry": TORCH_ENTRY,
        "base": "tiny",
        "engine_options": {"threads": 1, "device": "cpu", "max_rows": 4},
        "calls": 30,
    }
    expected = await undisturbed(tmp_path / "undisturbed", **torch)
    assert await killed(tmp_path / "killed", 1, **torch) == expected


PROCESS = b"orchestration.calls.engines.process"


def engine_of(server: int) -> int:
    """Return the process of the one engine that ``server`` has."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    (engine,) = (
        child for child in children if PROCESS in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    return int(engine)


async def test_samples_that_an_engine_takes_with_it_are_made_again(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        sampler = (await client.done(await client.snapshot(0)))["sampling_session_id"]
        before = await client.sampled(sampler, 0)
        asked = await service.sample("ann", sampler, 1, prompt(hundredths=50))
        await client.train(datum(1))
        await client.done(await client.step())  # the engine has the sample, and goes on with it
        os.kill(engine_of(os.getpid()), signal.SIGKILL)
        again = await client.done(asked)
        assert again.sequences[0].tokens.tolist() == before.sequences[0].tokens.tolist()


async def test_a_sampler_keeps_the_weights_of_a_checkpoint_that_is_deleted(tmp_path: Path) -> None:
    """An engine that has ended, and the next server, have them again."""

    async def tokens(client: Client, seq: int) -> list[int]:
        output = await client.sampled(f"{client.session_id}:sample:0", seq, seed=1)
        return output.sequences[0].tokens.tolist()  # type: ignore[no-any-return]

    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        path = (await client.done(await client.save("a")))["path"]
        await service.open_sampler("ann", client.session_id, 0, base=None, path=path)
        before = await tokens(client, 0)
        await service.delete_checkpoint("ann", path)
        os.kill(engine_of(os.getpid()), signal.SIGKILL)
        assert await tokens(client, 1) == before
    async with small_service(tmp_path) as service:
        client.service = service
        assert await tokens(client, 2) == before
        await service.finish_session("ann", client.session_id, "success")
        left = os.listdir(tmp_path / "sessions" / client.session_id)
    assert "samplers" not in left, "nobody needs them any more"


async def test_a_sampler_of_a_silent_session_needs_its_checkpoint_again(tmp_path: Path) -> None:
    async with small_service(tmp_path, silent_seconds=0.1) as service:
        client = await Client.create(service)
        sampler = f"{client.session_id}:sample:0"
        (path, other) = [
            (await client.done(await client.save(name)))["path"] for name in ("a", "b")
        ]
        await service.open_sampler("ann", client.session_id, 0, base=None, path=path)
        weights = tmp_path / "sessions" / client.session_id / "samplers" / "0"

        async def silence() -> None:
            async with asyncio.timeout(SECONDS):
                while weights.exists():  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

        await silence()
        await client.sampled(sampler, 0)
        await silence()
        await service.delete_checkpoint("ann", path)
        failure = await client.failure(await service.sample("ann", sampler, 1, prompt()))
        assert f"{path} was deleted" in failure
        assert "open a sampler on a checkpoint that is there" in failure
        await service.open_sampler("ann", client.session_id, 1, base=None, path=other)


async def test_a_rebuilt_model_that_answers_otherwise_is_an_alarm(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with small_service(tmp_path, drifts=True) as service:
            client = await Client.create(service)
            await client.done(await client.train(datum(1)))
            os.kill(engine_of(os.getpid()), signal.SIGKILL)
            await client.done(await client.step())
    alarms = [entry for entry in logs if entry["event"].startswith("ALARM")]
    assert [entry["request"] for entry in alarms] == [f"{client.model_id}:1"]


async def test_a_call_that_ends_the_engine_each_time_fails_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    async with small_service(tmp_path, attempts=2) as service:
        client = await Client.create(service)
        neighbour = await Client.create(service, owner="bob")
        await neighbour.train(datum(1))
        deadly = await client.train(datum(KILLING_TOKEN))
        step = await client.step()
        failed = await client.result(deadly)
        assert isinstance(failed, Failed)
        assert not failed.by_client
        assert "the engine has ended 2 times during this call" in failed.message
        assert "forward_backward, has failed" in await client.failure(step)
        await client.train(datum(1))
        await client.done(await client.step())
        metrics = await neighbour.done(await neighbour.step())
        assert metrics == await client.done(f"{client.model_id}:4")  # of the same data


async def test_a_model_whose_files_are_damaged_fails_all_calls_at_once_with_the_reason(
    tmp_path: Path,
) -> None:
    source = tmp_path / "model"
    tiny_model(0).save_pretrained(source)
    tiny_tokenizer().save_pretrained(source)
    bases = describe_bases([f"small={source}"], tmp_path, {})
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    data = tmp_path / "data"
    async with open_service(data, bases, engine_options={"device": "cpu"}) as service:
        session = await service.open_session("ann", tags=[], metadata={})
        sampler = await service.open_sampler("ann", session, 0, base="small", path=None)
        created = await service.create_model("ann", session, 0, "small", ModelOptions(), {})
        client = Client(service, session, 0, "ann")
        requests = [created, await client.train(datum(1)), await client.step()]
        requests.append(await service.sample("ann", sampler.sampler_id, 0, prompt()))
        for request in requests:
            result = await service.result("ann", request.request_id, SECONDS)
            assert isinstance(result, Failed)
            assert not result.by_client
            assert not result.again
            assert "the engine of 'small' does not start: SafetensorError" in result.message
        with pytest.raises(CallRefused, match="does not start: SafetensorError"):
            await service.create_model("ann", session, 1, "small", ModelOptions(), {})
    assert (data / "engine-0.log").read_text().count("the engine cannot start") == 1


async def test_an_engine_that_has_no_memory_is_started_until_there_is_some(tmp_path: Path) -> None:
    (tmp_path / NO_MEMORY).write_text("2")
    with capture_logs() as logs:
        async with small_service(tmp_path) as service:
            client = await Client.create(service)
            await client.done(await client.train(datum(1)))
    ends = [entry["reason"] for entry in logs if entry["event"] == "an engine has ended"]
    assert ends == ["MemoryError: no room for the weights"] * 2


async def test_after_some_starts_calls_fail_and_later_ones_are_to_be_tried_again(
    tmp_path: Path,
) -> None:
    (tmp_path / NO_MEMORY).write_text("99")
    async with small_service(tmp_path, restarts=1) as service:
        session = await service.open_session("ann", tags=[], metadata={})
        sampler = await service.open_sampler("ann", session, 0, base="small", path=None)
        created = await service.create_model("ann", session, 0, "small", ModelOptions(), {})
        asked = await service.sample("ann", sampler.sampler_id, 0, prompt())
        reason = "does not start: MemoryError: no room for the weights"
        for request, again in ((created, False), (asked, True)):
            result = await service.result("ann", request.request_id, SECONDS)
            assert isinstance(result, Failed)
            assert result.again == again
            assert reason in result.message
        with pytest.raises(Busy, match=reason):
            await service.create_model("ann", session, 1, "small", ModelOptions(), {})


async def test_a_full_disk_refuses_calls_whole_and_the_service_goes_on(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        await client.done(await client.train(datum(1)))
        with files_of_at_most(20_000), pytest.raises(Busy, match="free room there"):
            await client.train(datum(*range(5000)))
        await client.done(await client.train(datum(*range(5000)), seq=2))
        await client.done(await client.step())
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        engine = engine_of(os.getpid())
        limits = resource.prlimit(engine, resource.RLIMIT_FSIZE, (10, hard))
        before = await client.logprobs()
        assert "File too large" in await client.failure(await client.save("a"))
        assert await service.checkpoints("ann") == []
        assert await client.logprobs() == before
        resource.prlimit(engine, resource.RLIMIT_FSIZE, limits)
        await client.done(await client.save("a"))
    assert os.listdir(tmp_path / "checkpoints" / "partial") == []


async def test_an_answer_for_which_there_is_no_room_waits_for_it(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        journal = tmp_path / "sessions" / client.session_id / "train.0" / "journal"
        size = os.path.getsize(journal)  # noqa: ASYNC240
        with files_of_at_most(size + 14_000):
            request = await client.train(datum(*range(1000)))  # 12,000 bytes, its answer 4,000
            assert await service.result("ann", request.request_id, 1.0) is None
            with pytest.raises(Busy):
                await client.train(datum(*range(1000)))
        await client.done(request)


async def test_a_damaged_journal_is_named_and_a_torn_one_goes_on(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        for _ in range(3):
            await client.train(datum(1))
            await client.done(await client.step())
        said = await client.logprobs()
    journal = tmp_path / "sessions" / client.session_id / "train.0" / "journal"
    content = bytearray(journal.read_bytes())
    journal.write_bytes(content + content[16:40])
    async with small_service(tmp_path) as service:
        again = Client(service, client.session_id, 0, "ann")
        again.seq = client.seq
        assert await again.logprobs() == said
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 255
    journal.write_bytes(content)
    with pytest.raises(JournalDamaged, match=rf"{journal}: offset \d+ cannot be read"):
        async with small_service(tmp_path):
            pass


async def test_the_engine_ends_with_its_server(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.orchestration.calls.driver", json.dumps(driver.settings)),
        stdout=PIPE,
    )
    assert process.stdout is not None
    while not (await process.stdout.readline()).startswith(b"acknowledged"):
        pass
    engine = Process.of(engine_of(process.pid))
    process.kill()
    async with asyncio.timeout(SECONDS):
        await process.wait()
        await engine.wait()


async def test_two_services_do_not_share_a_folder(tmp_path: Path) -> None:
    async with small_service(tmp_path):
        with pytest.raises(Locked, match="give another folder"):
            async with small_service(tmp_path):
                pass
