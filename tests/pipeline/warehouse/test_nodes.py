"""Several nodes: samples stay where they are made and travel when asked for; warehouses come, leave
and are lost.

Nodes here are docks with node names of their own, so that what is not theirs comes over real
sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from pipeline.data.arena import StaleHandle, WarehouseUnreachable
from pipeline.data.columns import Column, Schema
from pipeline.index.client import Index, IndexRefused, RunConfig, StageSpec
from pipeline.index.errors import WarehouseGone
from pipeline.warehouse import directory
from pipeline.warehouse.dock import Dock
from pipeline.wire.frames import TransferError
from tests.forked import program

SECRET = b"a secret of the run, sixteen or more"
SCHEMA = Schema(
    [
        Column.ragged("prompt", torch.int64),
        Column.ragged("response", torch.int64),
        Column.scalar("score", torch.float32),
    ]
)
STAGES = (
    StageSpec("rollout", "groups", SCHEMA.mask(["prompt"]), SCHEMA.mask(["response"])),
    StageSpec("score", "rows", SCHEMA.mask(["response"]), SCHEMA.mask(["score"])),
    StageSpec("update", "batch", SCHEMA.mask(["response", "score"]), 0),
)
ARENA = 1 << 20


class Cluster:
    def __init__(self, index: Index, home: Path) -> None:
        self.index = index
        self.home = home
        self.docks = list[Dock]()

    async def node(
        self,
        name: str,
        *,
        serve: bool = True,
        slab: int = 0,
        secret: bytes = SECRET,
        timeout: float = 3.0,
    ) -> Dock:
        dock = Dock(
            self.index,
            SCHEMA,
            worker=f"worker-{name}",
            directory=self.home / name,
            warehouse=name,
            node=name,
            secret=secret,
            slab=slab,
            wire_timeout=timeout,
        )
        await dock.join(ARENA)
        if serve:
            await dock.serve("127.0.0.1")
        self.docks.append(dock)
        return dock


@pytest.fixture
async def cluster(index: Index, tmp_path: Path) -> AsyncIterator[Cluster]:
    await index.init(RunConfig(STAGES, 2, 3, 1, 3, reach=4), {})
    cluster = Cluster(index, tmp_path)
    yield cluster
    for dock in cluster.docks:
        await dock.close()


async def admit(dock: Dock, first: int, groups: int, samples: int = 2) -> None:
    prompts = [torch.tensor([100 * n, n]) for n in range(first, first + groups)]
    await dock.admit([(n, samples) for n in range(first, first + groups)], {"prompt": prompts})


async def respond(dock: Dock, most: int) -> list[int]:
    """Claim groups and answer them; returns the groups."""
    claim = await dock.claim("rollout", most, version=0)
    assert claim is not None
    prompts = (await dock.fetch(claim, ["prompt"]))["prompt"].unbind()
    assert [prompt.tolist() for prompt in prompts] == [[100 * g, g] for g in claim.group.tolist()]
    rows = [torch.tensor([row.group, row.place, 7]) for row in claim.rows]
    made = [(0, 3)] * len(claim)
    turns = [4] * len(claim)
    await dock.commit(claim, range(len(claim)), {"response": rows}, generated=made, turns=turns)
    return sorted(set(claim.group.tolist()))


async def test_samples_lie_where_they_were_made_and_are_read_from_everywhere(
    cluster: Cluster,
) -> None:
    a = await cluster.node("a")
    b = await cluster.node("b")
    await admit(a, 0, 4)
    assert await respond(a, 1) == [0]
    assert await respond(b, 1) == [1]
    assert await respond(a, 1) == [2]
    assert await respond(b, 1) == [3]
    used = (await cluster.index.stats())["warehouses"]
    assert used["a"]["used"] > 0 < used["b"]["used"]
    for reader in (a, b):
        claim = await reader.claim("score", 4)
        assert claim is not None
        rows = await reader.fetch(claim, ["response", "prompt"])
        assert [r.tolist() for r in rows["response"].unbind()] == [
            [row.group, row.place, 7] for row in claim.rows
        ]
        assert [r.tolist() for r in rows["prompt"].unbind()] == [
            [100 * row.group, row.group] for row in claim.rows
        ]
    assert a.warehouses.server is not None
    assert a.warehouses.server.payload_sent > 0, "b reads the prompts from a"


async def test_nodes_that_start_together_find_each_other_in_any_order(cluster: Cluster) -> None:
    a = await cluster.node("a", serve=False)
    b = await cluster.node("b", serve=False)
    options = {"worker": "writer", "warehouse": "a", "node": "c", "secret": SECRET}
    writer = Dock(cluster.index, SCHEMA, directory=cluster.home, **options)  # type: ignore[arg-type]
    cluster.docks.append(writer)
    with pytest.raises(
        ConnectionError,
        match="warehouse 'a' lies on node 'a', which does not serve it; start its server",
    ):
        await admit(writer, 0, 1)
    await a.serve("127.0.0.1")
    await admit(writer, 0, 1)
    assert await respond(b, 1) == [0]
    assert a.warehouses.server is not None
    assert a.warehouses.server.payload_received > 0 < a.warehouses.server.payload_sent


async def test_near_rows_are_claimed_first_but_old_ones_elsewhere_are_not_left_behind(
    cluster: Cluster,
) -> None:
    a = await cluster.node("a")
    b = await cluster.node("b")
    await admit(a, 0, 8, samples=1)
    claims = [await a.claim("rollout", 1, version=0) for _ in range(8)]
    for group, claim in enumerate(claims):
        assert claim is not None
        dock = a if group % 2 == 0 else b
        await dock.commit(claim, [0], {"response": [torch.tensor([group])]}, generated=[(0, 1)])

    async def taken(dock: Dock) -> int:
        claim = await dock.claim("score", 1)
        assert claim is not None
        return int(claim.group[0])

    assert [await taken(b) for _ in range(3)] == [1, 3, 0], "5 is more than reach = 4 groups past 0"
    assert [await taken(b) for _ in range(2)] == [5, 2]
    assert [await taken(a) for _ in range(3)] == [4, 6, 7], "near ones first, then what there is"


async def test_rows_go_to_the_waiting_workers_of_their_own_node_first(cluster: Cluster) -> None:
    a = await cluster.node("a")
    b = await cluster.node("b")
    await admit(a, 0, 8, samples=1)
    for _ in range(4):
        held = [await a.claim("rollout", 1, version=0) for _ in range(2)]
        near = {a: asyncio.create_task(a.claim("score", 1, timeout=20))}
        near[b] = asyncio.create_task(b.claim("score", 1, timeout=20))
        await until_waiting(cluster.index, "score:1", "score:2")
        for dock, claim in zip((a, b), held, strict=True):
            assert claim is not None
            await dock.commit(claim, [0], {"response": [torch.tensor([1])]}, generated=[(0, 1)])
        for dock, claim in zip((a, b), held, strict=True):
            assert claim is not None
            found = await near[dock]
            assert found is not None
            assert found.row.tolist() == claim.row.tolist(), (
                "a worker of the other node was there first"
            )


async def until_waiting(index: Index, *topics: str) -> None:
    """Until claims that found nothing wait on all of ``topics``."""
    found = list[bytes]()
    async with asyncio.timeout(20):
        while found != [b"1"] * len(topics):
            found = await index._redis.hmget(
                index.prefix + "n", [f"idle:{topic}" for topic in topics]
            )


async def test_what_a_nodes_workers_leave_is_taken_elsewhere_after_their_headstart(
    cluster: Cluster,
) -> None:
    a = await cluster.node("a")
    b = await cluster.node("b")
    await admit(a, 0, 3, samples=1)
    assert await a.claim("score", 1) is None, "a has a worker of this stage"
    far = asyncio.create_task(b.claim("score", 3, timeout=20))
    near = asyncio.create_task(a.claim("score", 1, timeout=20))
    await until_waiting(cluster.index, "score:1", "score:2")
    claim = await a.claim("rollout", 3, version=0)
    assert claim is not None
    await a.commit(claim, range(3), {"response": [torch.tensor([1])] * 3}, generated=[(0, 1)] * 3)
    first = await near
    rest = await far
    assert first is not None
    assert rest is not None, "it was never notified of the rows that the others left"
    assert (first.row.tolist(), rest.row.tolist()) == ([0], [1, 2])


async def test_rows_of_a_node_without_workers_are_anybodys_at_once(
    index: Index, tmp_path: Path
) -> None:
    await index.init(RunConfig(STAGES, 2, 3, 1, 3, headstart=3600), {})
    cluster = Cluster(index, tmp_path)
    a = await cluster.node("a")
    b = await cluster.node("b")
    await admit(a, 0, 1)
    far = asyncio.create_task(b.claim("score", 2, timeout=20))
    assert await respond(a, 1) == [0]
    found = await far
    assert found is not None
    assert len(found) == 2
    for dock in (a, b):
        await dock.close()


async def test_batches_come_in_order_whatever_nodes_their_rows_lie_on(cluster: Cluster) -> None:
    nodes = [await cluster.node(name) for name in "abc"]
    await admit(nodes[0], 0, 6)
    for i in range(6):
        await respond(nodes[i % 3], 1)
    for node in nodes:
        while (claim := await node.claim("score", 1)) is not None:
            await node.commit(claim, [0], {"score": torch.tensor([float(claim.row[0])])})
    batch = await nodes[1].claim("update", 1)
    assert batch is not None
    rows = await nodes[1].fetch(batch, ["response", "score", "prompt"])
    assert [r.tolist() for r in rows["response"].unbind()] == [
        [0, 0, 7],
        [0, 1, 7],
        [1, 0, 7],
        [1, 1, 7],
    ]
    assert rows["score"].tolist() == [0.0, 1.0, 2.0, 3.0]


async def test_a_warehouse_leaves_and_its_samples_move(cluster: Cluster) -> None:
    a = await cluster.node("a")
    b = await cluster.node("b")
    await admit(a, 0, 4)
    await respond(a, 2)
    await respond(b, 1)
    before = (await cluster.index.stats())["warehouses"]
    assert await a.drain() == before["a"]["used"]
    after = await cluster.index.stats()
    assert set(after["warehouses"]) == {"b"}
    assert after["warehouses"]["b"]["used"] == before["a"]["used"] + before["b"]["used"]
    assert after["open"] == 4
    (cluster.home / "a" / "arena-a").unlink()
    assert await respond(b, 4) == [3]
    await admit(a, 4, 1)
    assert (await cluster.index.stats())["warehouses"]["b"]["used"] > after["warehouses"]["b"][
        "used"
    ], "a writes there now"
    claim = await b.claim("score", 8)
    assert claim is not None
    responses = (await b.fetch(claim, ["response"]))["response"].unbind()
    assert [r.tolist() for r in responses] == [[row.group, row.place, 7] for row in claim.rows]
    assert (await cluster.index.ledger())["remade"] == 0


async def test_a_lost_node_has_its_groups_made_again_and_the_ledger_shows_them(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "SILENT_SECONDS", 0.0)
    a = await cluster.node("a")
    b = await cluster.node("b")
    await admit(b, 0, 4)
    assert await respond(a, 1) == [0]
    assert await respond(b, 1) == [1]
    assert await respond(a, 1) == [2]
    held = await b.claim("score", 100)
    assert held is not None
    assert len(held) == 6
    await a.close()  # the node is gone
    with pytest.raises(
        StaleHandle, match="warehouse 'a' on node 'a' is gone; its samples are made again"
    ):
        await b.fetch(held, ["response"])
    ledger = await cluster.index.ledger()
    assert (ledger["generated"], ledger["remade"], ledger["in_flight"]) == (6, 4, 2)
    assert (ledger["remade_tokens"], ledger["in_flight_tokens"]) == (12, 6)
    assert (ledger["remade_turns"], ledger["in_flight_turns"]) == (16, 8)
    status = await cluster.index.status()
    assert sorted(status.remake) == [0, 2]
    with pytest.raises(StaleHandle, match="was released"):
        await b.commit(held, [held.group.tolist().index(0)], {"score": torch.zeros(1)})
    await b.admit([(0, 2), (2, 2)], {"prompt": [torch.tensor([0, 0]), torch.tensor([200, 2])]})
    assert await respond(b, 4) == [0, 2, 3]
    assert (await cluster.index.stats())["open"] == 4
    ledger = await cluster.index.ledger()
    assert ledger["generated"] == ledger["remade"] + ledger["in_flight"] == 12


async def test_a_reader_of_a_lost_node_waits_while_its_last_heartbeat_is_young(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not fail before it is known whether the node is lost, so its worker needs no
    restart."""
    monkeypatch.setattr(directory, "SILENT_SECONDS", 1.5)
    a = await cluster.node("a")
    b = await cluster.node("b", timeout=0.2)
    await admit(a, 0, 1)
    claim = await b.claim("rollout", 1, version=0)
    assert claim is not None
    await a.serve("127.0.0.1")  # its last heartbeat
    await a.close()
    reading = asyncio.create_task(b.fetch(claim, ["prompt"]))
    assert not (await asyncio.wait([reading], timeout=0.5))[0]
    with pytest.raises(StaleHandle, match="is gone; its samples are made again"):
        await reading
    assert list((await cluster.index.status()).remake) == [0]


async def test_a_warehouse_that_is_alive_but_cannot_be_reached_is_not_given_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network cut between two hosts: the samples are not made again, and the node that cannot
    reach them reports it."""
    monkeypatch.setattr(directory, "HEARTBEAT_SECONDS", 0.2)
    a = await cluster.node("a")
    b = await cluster.node("b")
    await admit(a, 0, 2)
    assert a.warehouses.server is not None
    # its packets are lost, while its signs of life still reach the index
    await a.warehouses.server.close()
    claim = await b.claim("rollout", 1, version=0)
    assert claim is not None
    with pytest.raises(
        WarehouseUnreachable,
        match="warehouse 'a' on node 'a' is alive, but cannot be reached from node 'b'",
    ):
        await b.fetch(claim, ["prompt"])
    assert set((await cluster.index.stats())["warehouses"]) == {"a", "b"}
    await a.serve("127.0.0.1")  # at another port, as a restarted server does
    assert [p.tolist() for p in (await b.fetch(claim, ["prompt"]))["prompt"].unbind()] == [
        [0, 0],
        [0, 0],
    ]


async def test_a_wrong_secret_is_refused_with_what_to_set(cluster: Cluster) -> None:
    a = await cluster.node("a")
    stranger = await cluster.node("b", secret=b"another secret, of sixteen or more")
    await admit(a, 0, 1)
    claim = await stranger.claim("rollout", 1, version=0)
    assert claim is not None
    with pytest.raises(TransferError, match="secret"):
        await stranger.fetch(claim, ["prompt"])


async def test_a_worker_whose_warehouse_does_not_exist_gets_an_error_that_names_those_that_do(
    cluster: Cluster,
) -> None:
    await cluster.node("a")
    lost = Dock(cluster.index, SCHEMA, worker="w", directory=cluster.home, warehouse="z")
    with pytest.raises(
        WarehouseGone,
        match=r"warehouse 'z' is not in run .*, which has \['a'\]; "
        r"join\(\) it first",
    ):
        await lost.admit([(0, 1)], {"prompt": [torch.tensor([1])]})
    with pytest.raises(IndexRefused):
        await cluster.index.announce_warehouse(9, "x", 1)


SERVER = """
import asyncio, sys
from pathlib import Path
from pipeline.warehouse.dock import Dock
from pipeline.index.client import Index
from tests.pipeline.warehouse.test_nodes import ARENA, SCHEMA, SECRET, admit, respond

async def main(url, run, home):
    names = {"worker": sys.argv[4], "warehouse": "far", "node": "far"}
    dock = Dock(Index(url, run), SCHEMA, directory=Path(home), secret=SECRET, **names)
    await dock.join(ARENA)
    if sys.argv[5] == "makes":
        await admit(dock, 0, 2)
        await respond(dock, 2)
    await dock.serve("127.0.0.1")
    print("serving", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:4]))
"""


def start_far(cluster: Cluster, name: str, does: str) -> BaseProcess:
    process, output = program(
        SERVER, cluster.index.url, cluster.index.run, str(cluster.home / "far"), name, does
    )
    with output:
        assert output.readline() == "serving\n"
    return process


async def test_a_killed_warehouse_process_finds_its_arena_again_and_loses_nothing(
    cluster: Cluster,
) -> None:
    near = await cluster.node("near")
    far = await asyncio.to_thread(start_far, cluster, "first", "makes")
    again = None
    try:
        claim = await near.claim("score", 10)
        assert claim is not None
        far.kill()
        far.join()
        again = await asyncio.to_thread(start_far, cluster, "second", "serves")
        rows = (await near.fetch(claim, ["response"]))["response"].unbind()
        assert [r.tolist() for r in rows] == [[row.group, row.place, 7] for row in claim.rows]
        assert len(claim) == 4
    finally:
        for process in (far, again):
            if process is not None:
                process.kill()
                process.join()
