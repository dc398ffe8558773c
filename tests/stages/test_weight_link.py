"""A published version over torch.distributed: what was published, or a word about why not; nothing waits for the dead."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from stages import weight_link
from stages.weight_link import WeightReceiver, WeightSender
from stages.weight_sync import Published, WeightsDamaged, WeightStore, WeightsUnreachable

CPU = torch.device("cpu")
TIMEOUT = 20.0


def weights(version: int) -> dict[str, torch.Tensor]:
    """Of several dtypes, a scalar and an empty one among them; more than two of the buckets used here."""
    made = torch.Generator().manual_seed(version)
    return {
        "embedding": torch.randn(300, 17, generator=made),
        "norm": torch.randn(17, generator=made).bfloat16(),
        "count": torch.tensor(version),
        "nothing": torch.empty(0, 4),
        "head": torch.randn(40, 55, generator=made),
    }


def same(found: dict[str, torch.Tensor], version: int) -> bool:
    expected = weights(version)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[WeightSender]:
    sender = WeightSender(WeightStore(tmp_path, bucket_bytes=5000), CPU, host="127.0.0.1", timeout=TIMEOUT)
    yield sender
    sender.close()


@pytest.fixture
def receiver() -> WeightReceiver:
    return WeightReceiver(CPU, timeout=TIMEOUT)


def test_what_arrives_is_what_was_published(sender: WeightSender, receiver: WeightReceiver) -> None:
    for version in (4, 5):
        published = sender.publish(version, weights(version).items())
        record = Published.from_record(json.loads(json.dumps(published.record())))
        assert record == published
        assert len(published.buckets) > 3
        assert same(receiver.read(record), version)


def test_several_engines_are_sent_to_at_once_and_the_older_version_is_still_there(
    sender: WeightSender, receiver: WeightReceiver
) -> None:
    both = [sender.publish(version, weights(version).items()) for version in (1, 2)]
    found: list[bool] = []

    def read(published: Published) -> None:
        found.append(same(WeightReceiver(CPU, timeout=TIMEOUT).read(published), published.version))

    threads = [threading.Thread(target=read, args=(both[i % 2],)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 6


def test_a_version_that_was_overwritten_is_refused(sender: WeightSender, receiver: WeightReceiver) -> None:
    first = sender.publish(1, weights(1).items())
    newest = [sender.publish(version, weights(version).items()) for version in (2, 3)][-1]
    with pytest.raises(WeightsDamaged, match=r"version 1: the trainer has them no more; take the newest"):
        receiver.read(first)
    assert same(receiver.read(newest), 3)


def test_a_byte_that_changes_on_the_way_is_found(
    sender: WeightSender, receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = sender.publish(1, weights(1).items())
    memory = sender._store.memory(published.slot, published.nbytes)
    memory[published.buckets[2][0]] ^= 1
    with pytest.raises(WeightsDamaged, match=r"version 1: bucket 2 .* does not match its checksum"):
        receiver.read(published)
    memory[published.buckets[2][0]] ^= 1
    assert same(receiver.read(published), 1), "the request that broke off has left nothing behind"


def test_a_bucket_that_is_left_out_is_found(sender: WeightSender, receiver: WeightReceiver) -> None:
    published = sender.publish(1, weights(1).items())
    with pytest.raises(WeightsDamaged, match="in no bucket"):
        receiver.read(replace(published, buckets=published.buckets[:1] + published.buckets[2:]))


def test_weights_that_nobody_sends_are_unreachable(tmp_path: Path, receiver: WeightReceiver) -> None:
    published = WeightStore(tmp_path).publish(1, weights(1).items())
    with pytest.raises(WeightsUnreachable, match=r"published for one node alone; set sync.transport"):
        receiver.read(published)


def test_an_address_of_another_machine_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"[Aa]ssign"):
        WeightSender(WeightStore(tmp_path), CPU, host="192.0.2.1", timeout=1)


def test_only_the_given_address_listens(sender: WeightSender) -> None:
    _, port, _ = json.loads(sender.source)
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    ]
    assert listening == [f"0100007F:{port:04X}"]


def test_a_slot_is_not_overwritten_while_it_is_sent(
    sender: WeightSender, receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 3 goes where version 1 lies, and waits until that has been sent. It is too large for the buffers between two
    ends, so that it is not sent at once."""
    large = {"large": torch.full((2**26,), 1, dtype=torch.uint8)}
    first = sender.publish(1, large.items())
    under_way, go_on = threading.Event(), threading.Event()
    verify = weight_link.verify

    def slowly(*arguments: Any) -> None:
        under_way.set()
        assert go_on.wait(TIMEOUT)
        verify(*arguments)

    monkeypatch.setattr(weight_link, "verify", slowly)
    found: list[dict[str, torch.Tensor]] = []
    reading = threading.Thread(target=lambda: found.append(receiver.read(first)))
    reading.start()
    assert under_way.wait(TIMEOUT)
    assert sender._sending == {first.slot: 1}
    publishing = threading.Thread(target=lambda: sender.publish(3, weights(3).items()))
    publishing.start()
    publishing.join(0.5)
    assert publishing.is_alive()
    go_on.set()
    reading.join()
    publishing.join()
    assert torch.equal(found[0]["large"], large["large"])


# ── processes that are killed ──


def publishes(directory: Path, large: int, pipe: Connection) -> None:
    """Version 1, and ``large`` bytes more that are too many to lie in the buffers between two processes."""
    sender = WeightSender(WeightStore(directory, bucket_bytes=5000 + large // 8), CPU, host="127.0.0.1")
    tensors = weights(1) | ({"large": torch.zeros(large, dtype=torch.uint8)} if large else {})
    pipe.send(sender.publish(1, tensors.items()).record())
    signal.pause()


def asks(record: dict[str, Any], pipe: Connection) -> None:
    """Receive, and wait at the second bucket for ever."""

    def stop(*_: Any) -> None:
        pipe.send("under way")
        signal.pause()

    weight_link.verify = stop  # type: ignore[assignment]
    WeightReceiver(CPU, timeout=TIMEOUT).read(Published.from_record(record))


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Any, Connection]]]:
    started: list[Any] = []

    def start(act: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
        mine, other = get_context("spawn").Pipe()
        started.append(get_context("spawn").Process(target=act, args=(*arguments, other), daemon=True))
        started[-1].start()
        return started[-1], mine

    yield start
    for process in started:
        process.kill()
        process.join()


def test_a_trainer_that_has_died_is_unreachable_and_found_out_soon(
    tmp_path: Path, start: Callable[..., tuple[Any, Connection]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_link, "CONNECT_SECONDS", 1.0)
    trainer, pipe = start(publishes, tmp_path, 0)
    published = Published.from_record(pipe.recv())
    receiver = WeightReceiver(CPU, timeout=TIMEOUT)
    assert same(receiver.read(published), 1)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.join()
    began = time.monotonic()
    with pytest.raises(WeightsUnreachable, match="version 1: not received from the trainer at"):
        receiver.read(published)
    assert time.monotonic() - began < 60, "torch alone would go on trying for five minutes"


def test_a_trainer_that_dies_in_the_middle_is_noticed(
    tmp_path: Path, start: Callable[..., tuple[Any, Connection]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, pipe = start(publishes, tmp_path, 2**26)
    published = Published.from_record(pipe.recv())

    def kill(*_: Any) -> None:
        if trainer.is_alive():
            os.kill(trainer.pid, signal.SIGKILL)
            trainer.join()

    monkeypatch.setattr(weight_link, "verify", kill)  # after the first bucket
    began = time.monotonic()
    with pytest.raises(WeightsUnreachable):
        WeightReceiver(CPU, timeout=5.0).read(published)
    assert time.monotonic() - began < 30


def test_an_engine_that_dies_in_the_middle_costs_the_others_nothing(
    sender: WeightSender, receiver: WeightReceiver, start: Callable[..., tuple[Any, Connection]]
) -> None:
    published = sender.publish(1, weights(1).items())
    engine, pipe = start(asks, published.record())
    assert pipe.recv() == "under way"
    os.kill(engine.pid, signal.SIGKILL)
    engine.join()
    assert same(receiver.read(published), 1)
    with sender._turn:
        assert sender._turn.wait_for(lambda: not sender._sending[published.slot], TIMEOUT), "it is waited for no longer"


def test_an_engine_that_never_joins_is_given_up(tmp_path: Path) -> None:
    """It asked and is gone, or asked nonsense: its request ends, with the timeout at the latest; others are served."""
    sender = WeightSender(WeightStore(tmp_path), CPU, host="127.0.0.1", timeout=1.0)
    try:
        published = sender.publish(1, weights(1).items())
        store = weight_link._connect(sender.source, timedelta(seconds=5))
        store.queue_push("asked", json.dumps(["nobody", 1, "cpu"]))
        store.queue_push("asked", "what nobody can read")
        assert same(WeightReceiver(CPU, timeout=TIMEOUT).read(published), 1)
        for thread in threading.enumerate():
            if thread.name == "weights-sent":
                thread.join(TIMEOUT)
                assert not thread.is_alive()
    finally:
        sender.close()
