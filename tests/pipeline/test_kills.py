"""What is killed, cut or restarted in the middle loses nothing: real processes, real SIGKILL, real
servers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from pipeline.data.arena import WarehouseUnreachable
from pipeline.data.columns import Column, Schema
from pipeline.index.client import Index, IndexUnreachable, LeaseLost, RunConfig, StageSpec
from pipeline.index.embedded import EmbeddedIndex
from pipeline.warehouse import directory
from pipeline.warehouse.dock import Dock
from tests.forked import program
from tests.servers import REDIS, WITHOUT_REDIS, Cable, RedisServer, self_signed

SCHEMA = Schema([Column.ragged("tokens", torch.int64), Column.scalar("score", torch.float32)])
STAGES = (
    StageSpec("score", "rows", SCHEMA.mask(["tokens"]), SCHEMA.mask(["score"])),
    StageSpec("keep", "rows", SCHEMA.mask(["score"]), 0, releases=True),
)
SECRET = b"a secret of the run, sixteen or more"

# A worker that stops at the named moment, reports it, and waits to be killed.
VICTIM = """
import asyncio, sys, time
from pathlib import Path
import torch
from pipeline.data import blocks
from pipeline.warehouse.dock import Dock
from tests.pipeline.test_kills import SCHEMA, STAGES

def here():
    print("here", flush=True)
    time.sleep(600)

async def main(url, run, home, moment):
    write = blocks.PackedRows.write_into
    async with Dock.open(url, run, SCHEMA, STAGES, worker="victim", arena=1 << 20, directory=Path(home)) as dock:
        if moment == "in a put":
            def torn(self, memory, block_id):
                memory[: len(memory) // 2] = bytes([7]) * (len(memory) // 2)
                here()
            blocks.PackedRows.write_into = torn
            await dock.put({"tokens": [torch.arange(9000)]})
        claim = await dock.claim("score", 2)
        assert len(claim) == 2
        if moment == "after the claim":
            here()
        await dock.fetch(claim, ["tokens"])
        if moment == "after its outputs are written":
            def whole(self, memory, block_id):
                write(self, memory, block_id)
                here()
            blocks.PackedRows.write_into = whole
        await dock.commit(claim, [0], {"score": torch.ones(1)})
        here()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
async def dock(index_url: str, tmp_path: Path) -> AsyncIterator[Dock]:
    run = uuid.uuid4().hex[:8]
    async with Dock.open(
        index_url, run, SCHEMA, STAGES, worker="survivor", arena=1 << 20, directory=tmp_path
    ) as dock:
        yield dock
        await dock.index.erase()


async def killed(dock: Dock, home: Path, moment: str) -> None:
    """Run the victim until the moment, kill it, and forget it in the index, as a supervisor
    does."""
    victim, output = program(VICTIM, dock.index.url, dock.index.run, str(home), moment)
    with output:
        assert await asyncio.wait_for(asyncio.to_thread(output.readline), 60) == "here\n"
    victim.kill()
    victim.join()
    await dock.index.forget_worker("victim")


@pytest.mark.parametrize(
    ("moment", "left"),
    [("after the claim", 2), ("after its outputs are written", 2), ("after its commit", 1)],
)
async def test_a_killed_consumers_rows_are_delivered_again(
    dock: Dock, tmp_path: Path, moment: str, left: int
) -> None:
    await dock.put({"tokens": [torch.tensor([1, 2]), torch.tensor([3])]})
    used = (await dock.index.stats())["warehouses"]["local"]["used"]
    await killed(dock, tmp_path, moment)
    stats = await dock.index.stats()
    assert stats["stages"]["score"] == {"ready": left, "leased": 0, "takes": "rows"}
    assert stats["stages"]["keep"]["ready"] == 2 - left, "what was committed stays committed"
    if left == 2:
        assert stats["warehouses"]["local"]["used"] == used, (
            "half-done outputs leave no bytes behind"
        )
    claim = await dock.claim("score", 10)
    assert claim is not None
    tokens = (await dock.fetch(claim, ["tokens"]))["tokens"].unbind()
    assert [row.tolist() for row in tokens] == [[1, 2], [3]][2 - left :]
    await dock.commit(claim, range(left), {"score": torch.zeros(left)})
    kept = await dock.claim("keep", 10)
    assert kept is not None
    assert len(kept) == 2
    await dock.commit(kept, [0, 1], None)
    assert (await dock.index.stats())["rows"] == 0


async def test_a_put_that_was_torn_shows_nothing_and_gives_its_bytes_back(
    dock: Dock, tmp_path: Path
) -> None:
    before = await dock.index.stats()
    await killed(dock, tmp_path, "in a put")
    assert await dock.index.stats() == before
    assert await dock.claim("score", 1) is None
    await dock.put({"tokens": [torch.arange(95_000)]})  # most of the arena
    claim = await dock.claim("score", 1)
    assert claim is not None
    assert torch.equal((await dock.fetch(claim, ["tokens"]))["tokens"][0], torch.arange(95_000))


async def test_a_worker_that_was_only_slow_finds_its_commit_refused_and_goes_on(dock: Dock) -> None:
    await dock.put({"tokens": [torch.tensor([1])]})
    claim = await dock.claim("score", 1)
    assert claim is not None
    await dock.index.forget_worker("survivor", ended=False)  # the supervisor took it for dead
    with pytest.raises(LeaseLost, match="no longer held"):
        await dock.commit(claim, [0], {"score": torch.zeros(1)})
    again = await dock.claim("score", 1)
    assert again is not None
    await dock.commit(again, [0], {"score": torch.zeros(1)})
    await asyncio.gather(*[dock.put({"tokens": [torch.tensor([n])]}) for n in range(20)])
    assert (await dock.index.stats())["stages"]["score"]["ready"] == 20


async def test_a_worker_that_was_only_slow_writes_over_nobodys_bytes(dock: Dock) -> None:
    """It holds a slab open: nobody else may have those bytes until it is known to have ended."""
    other, new = (
        Dock(dock.index, SCHEMA, worker=worker, directory=dock.folder)
        for worker in ("other", "new")
    )

    async def through(*rows: torch.Tensor) -> None:
        claim = await other.claim("score", 10)
        assert claim is not None
        tokens = (await other.fetch(claim, ["tokens"]))["tokens"].unbind()
        assert [row.tolist() for row in tokens] == [row.tolist() for row in rows]
        await other.commit(claim, range(len(rows)), {"score": torch.zeros(len(rows))})
        kept = await other.claim("keep", 10)
        assert kept is not None
        await other.commit(kept, range(len(rows)), None)

    first, second, third = torch.tensor([1]), torch.arange(200), torch.full((150,), -1)
    await dock.put({"tokens": [first]})
    await through(first)  # no row points to the slab
    await dock.index.forget_worker("survivor", ended=False)
    await new.put({"tokens": [second]})
    await dock.put({"tokens": [third]})
    await through(second, third)
    for ended in ("survivor", "other", "new"):
        await dock.index.forget_worker(ended)
    assert (await dock.index.stats())["warehouses"]["local"]["used"] == 0


@pytest.mark.parametrize("server", ["valkey", "redis"])
async def test_a_killed_index_comes_back_with_all_that_it_acknowledged(
    tmp_path: Path, server: str
) -> None:
    """Killed again and again under load: every put that returned is there, once, with its bytes."""
    if server == "redis" and REDIS is None:
        pytest.skip(WITHOUT_REDIS)
    home = tmp_path / "index"
    home.mkdir()
    valkey = EmbeddedIndex(home, tmp_path / "index.sock")
    redis = RedisServer(home, password="tests-only")
    started: EmbeddedIndex | RedisServer = valkey if server == "valkey" else redis
    started.start()
    acknowledged: list[int] = []
    try:
        async with Dock.open(
            started.url,
            "run",
            SCHEMA,
            STAGES,
            worker="w",
            arena=1 << 22,
            directory=tmp_path / "arena",
        ) as dock:
            reached = {goal: asyncio.Event() for goal in (40, 100, 170)}

            async def produce(source: int) -> None:
                for number in range(source, 240, 4):
                    await dock.put({"tokens": [torch.tensor([number, number])]})
                    acknowledged.append(number)
                    if len(acknowledged) in reached:
                        reached[len(acknowledged)].set()

            async with asyncio.TaskGroup() as tasks:
                for source in range(4):
                    tasks.create_task(produce(source))
                for goal in reached.values():
                    await goal.wait()
                    if isinstance(started, RedisServer):
                        started.stop(kill=True)
                    else:
                        assert started.pid is not None
                        os.kill(started.pid, signal.SIGKILL)
                    await asyncio.to_thread(started.start)
            found: list[int] = []
            while (claim := await dock.claim("score", 7)) is not None:
                rows = (await dock.fetch(claim, ["tokens"]))["tokens"].unbind()
                assert all(row[0] == row[1] for row in rows)
                found += [int(row[0]) for row in rows]
                await dock.commit(claim, range(len(claim)), {"score": torch.zeros(len(claim))})
            assert sorted(found) == list(range(240))
    finally:
        started.stop()


async def test_a_cut_to_the_index_is_waited_out_or_raised(index_url: str, tmp_path: Path) -> None:
    """Answers that are lost on the way are asked for again, and given, without anything being done
    twice."""
    url = urlsplit(index_url)
    target = (url.hostname, url.port) if url.port else url.path
    async with Cable(target) as cable:  # type: ignore[arg-type]
        password = f":{url.password}@" if url.password else ""
        run = uuid.uuid4().hex[:8]
        index = Index(f"redis://{password}127.0.0.1:{cable.port}", run, timeout=3.0)
        dock = Dock(index, SCHEMA, worker="w", directory=tmp_path)
        await index.init(RunConfig(STAGES), {})
        await dock.join(1 << 20)
        for ways in (("back",), ("there",), ()):
            before = (await index.stats())["rows"]
            cable.cut(*ways)
            put = asyncio.create_task(dock.put({"tokens": [torch.tensor([1])]}))
            assert not (await asyncio.wait([put], timeout=0.3))[0]
            cable.mend()
            await put
            assert (await index.stats())["rows"] == before + 1
        cable.cut()
        with pytest.raises(IndexUnreachable, match="no answer for 3 s"):
            await index.stats()
        cable.mend()
        assert (await index.stats())["rows"] == 3
        await index.erase()
        await index.close()


@pytest.mark.parametrize(
    "ways", [("there",), ("back",), ()], ids=["requests lost", "answers lost", "both"]
)
async def test_a_cut_between_two_nodes_is_raised_within_the_deadline_and_nothing_is_lost(
    index: Index, tmp_path: Path, ways: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "HEARTBEAT_SECONDS", 0.2)
    await index.init(RunConfig(STAGES), {})
    docks = [
        Dock(
            index,
            SCHEMA,
            worker=n,
            directory=tmp_path / n,
            warehouse=n,
            node=n,
            secret=SECRET,
            slab=0,
            wire_timeout=1.5,
        )
        for n in ("a", "b")
    ]
    a, b = docks
    try:
        await a.join(1 << 20)
        await b.join(1 << 20)
        _, port = await a.serve("127.0.0.1")
        async with Cable(("127.0.0.1", port)) as cable:
            assert a.warehouses._heartbeat is not None
            a.warehouses._heartbeat.cancel()
            await index.announce_warehouse(1, "127.0.0.1", cable.port)
            a.warehouses._heartbeat = asyncio.create_task(
                a.warehouses._beat(1, "127.0.0.1", cable.port)
            )
            await b.warehouses.enter()
            await a.put({"tokens": [torch.arange(n) for n in (3, 0, 5)]})
            claim = await b.claim("score", 3)
            assert claim is not None
            cable.cut(*ways)
            with pytest.raises(
                WarehouseUnreachable, match="is alive, but cannot be reached from node 'b'"
            ):
                await b.fetch(claim, ["tokens"])
            cable.mend()
            rows = (await b.fetch(claim, ["tokens"]))["tokens"].unbind()
            assert [row.tolist() for row in rows] == [[0, 1, 2], [], [0, 1, 2, 3, 4]]
    finally:
        for dock in docks:
            await dock.close()


@pytest.mark.skipif(REDIS is None, reason=WITHOUT_REDIS)
async def test_an_index_behind_a_password_and_tls(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, password="right", certificate=self_signed(tmp_path))
    server.start()
    try:
        async with Dock.open(
            server.url, "r", SCHEMA, STAGES, worker="w", arena=1 << 20, directory=tmp_path
        ) as dock:
            await dock.put({"tokens": [torch.tensor([1])]})
            claim = await dock.claim("score", 1)
            assert claim is not None
            assert claim.row.tolist() == [0]
        wrong = Index(server.url.replace("right", "wrong"), "r", timeout=15.0)
        with pytest.raises(Exception, match="password"):
            await wrong.stats()
        await wrong.close()
        unknown = Index(f"rediss://:right@localhost:{server.port}", "r", timeout=1.0)
        with pytest.raises(IndexUnreachable, match="certificate") as caught:
            await unknown.stats()
        assert "right" not in str(caught.value)
        await unknown.close()
    finally:
        server.stop()


async def test_many_workers_that_die_at_random_deliver_every_row_exactly_once(
    dock: Dock, tmp_path: Path
) -> None:
    """Consumers are cancelled in the middle of whatever they do; what they had comes back, and
    nothing comes twice."""
    rng = random.Random(0)
    done = list[int]()
    await dock.put({"tokens": [torch.tensor([n]) for n in range(300)]})

    async def consume(name: str) -> None:
        killed_dock = Dock(dock.index, SCHEMA, worker=name, directory=tmp_path)
        while (claim := await killed_dock.claim("score", rng.randint(1, 20))) is not None:
            rows = (await killed_dock.fetch(claim, ["tokens"]))["tokens"].values().tolist()
            await asyncio.sleep(rng.random() * 0.01)
            half = len(claim) // 2
            for positions in (range(half), range(half, len(claim))):
                await killed_dock.commit(claim, positions, {"score": torch.zeros(len(positions))})
                done.extend(rows[i] for i in positions)

    for life in range(200):
        names = [f"{life}-{i}" for i in range(3)]
        consumers = [asyncio.create_task(consume(name)) for name in names]
        finished, running = await asyncio.wait(consumers, timeout=rng.random() * 0.05)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for task in finished:
            task.result()
        for name in names:
            await dock.index.forget_worker(name)
        if (await dock.index.stats())["stages"]["keep"]["ready"] == 300:
            break
    kept = await dock.claim("keep", 1000)
    assert kept is not None
    assert sorted((await dock.fetch(kept, ["tokens"]))["tokens"].values().tolist()) == list(
        range(300)
    )
    assert len(done) == len(set(done)), "a row was committed twice"
