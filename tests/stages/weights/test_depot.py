"""One copy of a version on each node, sent from node to node; a node that fails costs the others a
moment."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.wire.blocking import BlockingStream
from stages.weights.published import (
    Published,
    WeightsDamaged,
    WeightsUnreachable,
    joined,
    tensors_of,
)
from stages.weights.transport import chain, depot, network
from stages.weights.transport.chain import CHANGES, WHOLE, Chain, pieces_of
from stages.weights.transport.depot import Depot
from stages.weights.transport.network import WeightSender
from stages.weights.transport.store import WeightStore, mapped
from tests.stages.weights.test_network import SECRET, TIMEOUT, nodes, same, start, weights

__all__ = ["nodes", "start"]  # fixtures
A = ("10.0.0.1", 1)
B = ("10.0.0.2", 1)
C = ("10.0.0.3", 1)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "PIECE_BYTES", 1000)


class Trainer:
    """A sender whose direct transfers are noted in ``sent`` as (first piece, last), and may be held
    at a piece."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sender = WeightSender(
            WeightStore(home / "trainer", bucket_bytes=5000),
            host="127.0.0.1",
            secret=SECRET,
            timeout=TIMEOUT,
        )
        self.sent: list[tuple[int, int]] = []
        self.hold_at = 10**9
        self.go_on = threading.Event()
        send = chain.send_pieces

        def noted(peer: Any, memory: Any, pieces: Any, first: int, **base: Any) -> None:
            self.sent.append((first, len(pieces)))
            hold = self.hold_at
            self.hold_at = 10**9

            def wait(number: int, seconds: float) -> bool:
                return number < hold or self.go_on.wait(seconds)

            send(peer, memory, pieces, first, wait, **base)

        monkeypatch.setattr(network, "send_pieces", noted)

    def publish(self, version: int) -> Published:
        return self.sender.publish(version, weights(version).items())


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path, monkeypatch)
    yield trainer
    trainer.go_on.set()
    trainer.sender.close()


def begun(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def result(work: tuple[threading.Thread, list[Any]]) -> Any:
    work[0].join(60)
    assert not work[0].is_alive(), "not in time"
    return work[1][0]


def test_each_node_gets_the_node_before_it_and_after_two_failures_the_trainer() -> None:
    order = Chain()
    assert [order.sender_to(node, "v", []) for node in (A, B, C)] == [None, A, B]
    assert order.sender_to(B, "v", []) == A, "it asks again"
    assert order.sender_to(C, "v", [B]) == A
    assert order.sender_to(C, "v", [B, A]) is None
    assert [order.sender_to(node, "w", []) for node in (C, B)] == [None, C], (
        "another version has a chain of its own"
    )
    order.forget("v")
    assert order.sender_to(B, "v", []) is None


def test_a_node_that_has_failed_sends_to_nobody_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    order = Chain()
    for node in (A, B):
        order.sender_to(node, "v", [])
    assert order.sender_to(C, "v", [B]) == A
    assert [order.sender_to(node, "w", []) for node in (A, B, C)] == [None, A, A], (
        "B is passed over"
    )
    now[0] += chain.AVOIDED_SECONDS
    assert [order.sender_to(node, "x", []) for node in (A, B, C)] == [None, A, B]


def test_a_node_that_others_cannot_reach_sends_to_none() -> None:
    order = Chain()
    assert [order.sender_to(node, "v", []) for node in (A, None, B)] == [None, A, A]


@pytest.mark.parametrize("sources", [1, 2, 3])
def test_the_pieces_of_all_sources_are_each_byte_once(sources: int, tmp_path: Path) -> None:
    published = WeightStore(tmp_path, bucket_bytes=2500).publish(1, weights(1).items())
    pieces = sorted(
        (piece for source in range(sources) for piece in pieces_of(published, source, sources)),
        key=lambda p: p.offset,
    )
    at = 0
    for piece in pieces:
        assert piece.offset == at
        assert 0 < piece.nbytes <= 1000
        at += piece.nbytes
    assert at == sum(nbytes for _, nbytes, _ in published.buckets)
    assert sum(piece.is_last for piece in pieces) == len(published.buckets)


def test_the_trainer_sends_a_version_once_and_nodes_send_it_on(
    trainer: Trainer, nodes: Callable[..., Depot]
) -> None:
    several = [nodes() for _ in range(4)]
    for version in (1, 2, 3):
        published = trainer.publish(version)
        reading = [begun(lambda node=node: same(node.read(published), version)) for node in several]  # type: ignore[misc]  # noqa: B023
        assert [result(one) for one in reading] == [True] * 4
    assert len(trainer.sent) == 3


def test_a_node_sends_on_what_has_arrived_while_the_rest_is_not_there_yet(
    trainer: Trainer, nodes: Callable[..., Depot]
) -> None:
    trainer.hold_at = 20
    published = trainer.publish(1)
    first = nodes()
    second = nodes()
    reading = [begun(lambda: same(first.read(published), 1))]
    until(lambda: pieces(first, published) == 20)
    reading.append(begun(lambda: same(second.read(published), 1)))
    until(lambda: pieces(second, published) == 20)
    assert not reading[0][1]
    trainer.go_on.set()
    assert [result(one) for one in reading] == [True, True]
    assert trainer.sent == [(0, len(pieces_of(published, 0, 1)))]


def until(condition: Callable[[], bool]) -> None:
    """Of other threads' work, which has no event of its own."""
    waiting = threading.Event()
    for _ in range(3000):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("not in time")


def pieces(node: Depot, published: Published) -> int:
    arriving = node._sendable.get(published.key())
    return 0 if arriving is None else arriving.there[0]


def receives(record: dict[str, Any], shared: Path, pipe: Connection) -> None:
    """A node of its own, in a process; it reports once some of the version is there."""
    chain.PIECE_BYTES = 1000
    node = Depot(shared, secret=SECRET, timeout=TIMEOUT)
    published = Published.from_record(record)
    reading = begun(lambda: same(node.read(published), 1))
    until(lambda: pieces(node, published) == 20)
    pipe.send("under way")
    pipe.send(result(reading))
    signal.pause()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_node_that_fails_in_the_middle_is_passed_over(
    how: signal.Signals,
    tmp_path: Path,
    trainer: Trainer,
    nodes: Callable[..., Depot],
    start: Callable[..., tuple[Any, Connection]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer sends to it, and it to two more.

    They go on where they are; what they have is not sent again.
    """
    monkeypatch.setattr(depot, "SILENT_SECONDS", 2.0)
    trainer.hold_at = 20
    published = trainer.publish(1)
    process, pipe = start(receives, published.record(), tmp_path / "first")
    assert pipe.poll(120)
    assert pipe.recv() == "under way"
    behind = [nodes(), nodes()]
    reading = []
    for node in behind:
        reading.append(begun(lambda node=node: same(node.read(published), 1)))  # type: ignore[misc]
        until(lambda node=node: pieces(node, published) == 20)  # type: ignore[misc]
    os.kill(process.pid, how)
    assert [result(one) for one in reading] == [True, True]
    assert len(trainer.sent) == 2
    assert trainer.sent[1][0] >= 15, "what was verified is kept: all but a bucket"


def test_engines_of_one_node_have_one_copy(
    trainer: Trainer, nodes: Callable[..., Depot], tmp_path: Path
) -> None:
    trainer.hold_at = 20
    published = trainer.publish(1)
    engines = [nodes("node") for _ in range(3)]
    reading = [begun(lambda engine=engine: engine.read(published)) for engine in engines]  # type: ignore[misc]
    until(lambda: any(pieces(engine, published) == 20 for engine in engines))
    trainer.go_on.set()
    found = [result(one) for one in reading]
    assert all(same(tensors, 1) for tensors in found)
    assert len(trainer.sent) == 1
    found[0]["embedding"][0] = 7.0
    assert found[1]["embedding"][0, 0] == found[2]["embedding"][0, 0] == 7.0, (
        "the memory is the same"
    )
    folder = tmp_path / "nodes" / "node" / depot.FOLDER
    assert sorted(file.name for file in folder.iterdir()) == ["lock", f"weights-{published.key()}"]


def test_an_engine_goes_on_with_what_a_dead_one_of_its_node_has_received(
    tmp_path: Path,
    trainer: Trainer,
    nodes: Callable[..., Depot],
    start: Callable[..., tuple[Any, Connection]],
) -> None:
    trainer.hold_at = 20
    published = trainer.publish(1)
    process, pipe = start(receives, published.record(), tmp_path / "nodes" / "node")
    assert pipe.poll(120)
    waiting = begun(lambda: same(nodes("node").read(published), 1))
    os.kill(process.pid, signal.SIGKILL)
    assert result(waiting)
    assert trainer.sent[1][0] >= 15


def test_an_engine_does_not_wait_for_one_of_its_node_that_is_stuck(
    trainer: Trainer, nodes: Callable[..., Depot], tmp_path: Path
) -> None:
    published = trainer.publish(1)
    stuck = tmp_path / "nodes" / "node" / depot.FOLDER / "lock"
    stuck.parent.mkdir(parents=True)
    with stuck.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert same(nodes("node", timeout=0.5).read(published), 1)


def test_a_node_keeps_two_versions_and_what_is_mapped_stays(
    trainer: Trainer, nodes: Callable[..., Depot], tmp_path: Path
) -> None:
    node = nodes("node")
    found = {version: node.read(trainer.publish(version)) for version in range(1, 5)}
    assert all(same(tensors, version) for version, tensors in found.items())
    left = {
        file.name.split("-")[1]
        for file in (tmp_path / "nodes" / "node" / depot.FOLDER).glob("weights-*")
    }
    assert left == {"3", "4"}


def test_a_copy_that_is_damaged_is_received_again(
    trainer: Trainer, nodes: Callable[..., Depot]
) -> None:
    published = trainer.publish(1)
    found = nodes("node").read(published)
    found["embedding"][3] = 7.0
    with pytest.raises(WeightsDamaged, match="does not match its checksum"):
        nodes("node").read(published)
    assert same(nodes("node").read(published), 1)


@pytest.mark.parametrize("transport", ["network", "shared_memory"])
def test_engines_on_the_trainers_node_have_one_copy_of_what_lies_there(
    transport: str, trainer: Trainer, tmp_path: Path
) -> None:
    engines = [Depot(tmp_path / "trainer", secret=SECRET) for _ in range(3)]
    for version in (3, 4):
        published = trainer.publish(version)
        published = published if transport == "network" else replace(published, source="")
        found = [engine.read(published) for engine in engines]
        assert all(same(tensors, version) for tensors in found)
        found[0]["embedding"][0] = 7.0
        assert found[1]["embedding"][0, 0] == found[2]["embedding"][0, 0] == 7.0, (
            "the memory is the same"
        )
        assert same(WeightStore(tmp_path / "trainer").read(published), version), (
            "and not the trainer's"
        )
        folder = tmp_path / "trainer" / depot.FOLDER
        assert sorted(file.name for file in folder.iterdir()) == [
            "lock",
            f"weights-{published.key()}",
        ]
    with pytest.raises(WeightsDamaged, match="does not match its checksum"):
        engines[0].read(published)
    engines[1].link(published, tmp_path / "received")
    assert same(tensors_of(mapped(tmp_path / "received"), published), 4)
    assert not trainer.sent


def test_a_version_without_room_in_shared_memory_is_no_crash(
    trainer: Trainer, nodes: Callable[..., Depot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file beyond what the memory holds would be a SIGBUS."""

    published = trainer.publish(1)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightsUnreachable, match="No space left"):
        nodes().read(published)
    with pytest.raises(OSError, match="No space left"):
        trainer.publish(2)


# ── several ranks of a trainer ──


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[WeightSender]]:
    """Three ranks on nodes of their own."""
    senders = [
        WeightSender(
            WeightStore(tmp_path / f"rank-{rank}", bucket_bytes=5000),
            host="127.0.0.1",
            secret=SECRET,
            timeout=TIMEOUT,
        )
        for rank in range(3)
    ]
    yield senders
    for sender in senders:
        sender.close()


def published_by(ranks: list[WeightSender], version: int) -> Published:
    return joined(
        [
            sender.publish(version, weights(version).items(), None, (rank, len(ranks)))
            for rank, sender in enumerate(ranks)
        ]
    )


def test_each_rank_of_a_trainer_sends_the_buckets_that_it_has_published(
    ranks: list[WeightSender], nodes: Callable[..., Depot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes in each rank's chain; what one rank has not published it does not send."""
    sent: list[int] = []
    send = chain.send_pieces

    def noted(peer: Any, memory: Any, pieces: Any, first: int, **base: Any) -> None:
        sent.append(sum(piece.nbytes for piece in pieces))
        send(peer, memory, pieces, first, **base)

    monkeypatch.setattr(network, "send_pieces", noted)
    several = [nodes(), nodes()]
    for version in (1, 2, 3):
        published = Published.from_record(
            json.loads(json.dumps(published_by(ranks, version).record()))
        )
        assert len(json.loads(published.source)) == 3
        assert [same(node.read(published), version) for node in several] == [True, True]
        assert len(sent) == 3, "each rank once"
        assert sum(sent) == sum(nbytes for _, nbytes, _ in published.buckets)
        assert max(sent) < 0.6 * sum(sent)
        sent.clear()


def test_a_rank_that_has_ended_leaves_a_version_unreachable_and_its_successor_sends_the_rest(
    ranks: list[WeightSender], nodes: Callable[..., Depot]
) -> None:
    published = published_by(ranks, 1)
    node = nodes()
    ranks[1].close()
    with pytest.raises(WeightsUnreachable):
        node.read(published)
    store = ranks[1]._store
    ranks[1] = WeightSender(store, host="127.0.0.1", secret=SECRET, timeout=TIMEOUT)
    assert same(node.read(published_by(ranks, 1)), 1)


def test_ranks_of_one_node_write_one_slot(tmp_path: Path) -> None:
    stores = [WeightStore(tmp_path, bucket_bytes=5000) for _ in range(3)]
    for version in (1, 2, 3):
        parts: list[Any] = [
            begun(partial(store.publish, version, weights(version).items(), None, (rank, 3)))
            for rank, store in enumerate(stores)
        ]
        whole = joined([result(part) for part in parts])
        assert whole == WeightStore(tmp_path / "alone", bucket_bytes=5000).publish(
            version, weights(version).items()
        )
        assert same(WeightStore(tmp_path).read(whole), version)


# ── changes alone ──


def bfloat16(version: int) -> dict[str, torch.Tensor]:
    """The weights after ``version`` small steps: the same numbers but for a few in a hundred."""
    made = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(200, 100, generator=made) for name in ("one", "other")}
    for _ in range(version):
        for tensor in weights.values():
            tensor += 2e-5 * torch.randn(tensor.shape, generator=made)
    return {name: tensor.bfloat16() for name, tensor in weights.items()}


def equal(found: dict[str, torch.Tensor], version: int) -> bool:
    return all(torch.equal(found[name], value) for name, value in bfloat16(version).items())


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What each link carries of each version: a ``kind``, whole or changes, and bytes."""
    found: list[tuple[str, int]] = []
    send = BlockingStream.send_frame

    def counted(
        self: BlockingStream, kind: int, control: bytes = b"", payload: bytes | memoryview = b""
    ) -> None:
        if kind in (WHOLE, CHANGES):
            found.append(("changes" if kind == CHANGES else "whole", len(payload)))
        send(self, kind, control, payload)

    monkeypatch.setattr(BlockingStream, "send_frame", counted)
    return found


def nbytes_of(carried: list[tuple[str, int]], kind: str) -> int:
    return sum(nbytes for name, nbytes in carried if name == kind)


def test_between_nodes_that_have_the_version_before_only_changes_travel(
    trainer: Trainer, nodes: Callable[..., Depot], carried: list[tuple[str, int]]
) -> None:
    """From the trainer and from node to node; a node that is new, or has missed a version, gets all
    bytes."""
    several = [nodes(), nodes()]
    for version in (1, 2, 3):
        published = trainer.sender.publish(version, bfloat16(version).items())
        assert [equal(node.read(published), version) for node in several] == [True, True]
        if version == 1:
            assert (nbytes_of(carried, "whole"), nbytes_of(carried, "changes")) == (
                2 * published.nbytes,
                0,
            )
        else:
            assert nbytes_of(carried, "whole") == 0
            assert 0 < nbytes_of(carried, "changes") < 0.1 * published.nbytes
        carried.clear()
    late = nodes()
    assert equal(late.read(published), 3)
    for version in (4, 5):
        published = trainer.sender.publish(version, bfloat16(version).items())
    carried.clear()
    assert equal(several[0].read(published), 5)
    assert nbytes_of(carried, "whole") == published.nbytes, "no link has version 3 at both ends"
    carried.clear()
    assert equal(several[1].read(published), 5)
    assert nbytes_of(carried, "changes") > 0, "its neighbour has it"
    assert nbytes_of(carried, "whole") == 0


def test_each_rank_sends_changes_of_its_own_part(
    ranks: list[WeightSender], nodes: Callable[..., Depot], carried: list[tuple[str, int]]
) -> None:
    node = nodes()
    for version in (1, 2):
        carried.clear()
        parts = [
            sender.publish(version, bfloat16(version).items(), None, (rank, 3))
            for rank, sender in enumerate(ranks)
        ]
        assert equal(node.read(joined(parts)), version)
    assert nbytes_of(carried, "whole") == 0
    assert nbytes_of(carried, "changes") > 0


def test_an_older_version_that_is_overwritten_meanwhile_is_no_longer_sent_from(
    trainer: Trainer, nodes: Callable[..., Depot], carried: list[tuple[str, int]]
) -> None:
    """Publishing does not wait for a node that receives changes of the version in its slot."""
    node = nodes()
    assert equal(node.read(trainer.sender.publish(1, bfloat16(1).items())), 1)
    carried.clear()
    trainer.hold_at = 20
    published = trainer.sender.publish(2, bfloat16(2).items())
    reading = begun(lambda: equal(node.read(published), 2))
    until(lambda: pieces(node, published) == 20)
    trainer.sender.publish(3, bfloat16(3).items())
    trainer.go_on.set()
    assert result(reading)
    assert nbytes_of(carried, "changes") > 0
    assert nbytes_of(carried, "whole") == sum(p.nbytes for p in pieces_of(published, 0, 1)[20:])


def test_a_damaged_older_version_is_used_once(
    trainer: Trainer, nodes: Callable[..., Depot]
) -> None:
    node = nodes()
    node.read(trainer.sender.publish(1, bfloat16(1).items()))["one"][7] = 7.0
    published = trainer.sender.publish(2, bfloat16(2).items())
    with pytest.raises(WeightsDamaged, match="does not match its checksum"):
        node.read(published)
    assert equal(node.read(published), 2)


def test_where_most_numbers_change_all_bytes_travel(
    trainer: Trainer, nodes: Callable[..., Depot], carried: list[tuple[str, int]]
) -> None:
    node = nodes()
    for version in (1, 2):
        assert same(node.read(trainer.publish(version)), version)
    assert nbytes_of(carried, "changes") == 0


# ── names for other processes ──


def test_a_name_of_the_nodes_copy_stays_and_costs_no_second_copy(
    trainer: Trainer, nodes: Callable[..., Depot], tmp_path: Path
) -> None:
    """vLLM's workers map the depot's bytes; the depot goes on to newer versions meanwhile."""
    engine = nodes("node")
    first = trainer.sender.publish(1, weights(1).items())
    path = tmp_path / "nodes" / "received"
    for _ in range(2):  # the second time it is that file already
        engine.link(first, path)
        (copy,) = (tmp_path / "nodes" / "node" / depot.FOLDER).glob("weights-*")
        assert copy.samefile(path)
        assert path.stat().st_nlink == 2
    for version in (2, 3):
        assert same(engine.read(trainer.sender.publish(version, weights(version).items())), version)
    assert path.stat().st_nlink == 1
    assert same(tensors_of(mapped(path), first), 1)
    third = trainer.sender.publish(4, weights(4).items())
    engine.link(third, path)
    assert same(tensors_of(mapped(path), third), 4)
    assert [file.name for file in path.parent.glob("received*")] == ["received"]


def test_a_damaged_version_gets_no_name(
    trainer: Trainer, nodes: Callable[..., Depot], tmp_path: Path
) -> None:
    published = trainer.sender.publish(1, weights(1).items())
    trainer.sender._store.memory(published)[7] ^= 1
    with pytest.raises(WeightsDamaged, match="checksum"):
        nodes("node").link(published, tmp_path / "nodes" / "received")
    assert not list((tmp_path / "nodes").glob("received*"))
