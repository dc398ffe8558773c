"""A published version from the trainer to an engine: what was published, or a word about why not;
nothing waits for the dead, and nothing is given to a stranger."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.wire.blocking import connect
from pipeline.wire.handshake import (
    ANSWER,
    HELLO,
    MAGIC,
    UNPROVEN,
    VERSION,
    ClientHandshake,
)
from stages.weights.published import Published, WeightsDamaged, WeightsUnreachable
from stages.weights.transport import depot as weight_link
from stages.weights.transport.depot import Depot
from stages.weights.transport.network import Credentials, WeightSender
from stages.weights.transport.store import WeightStore
from tests.forked import forks
from tests.pipeline.wire.served import certificate

TIMEOUT = 20.0
SECRET = b"the secret of this run"


def weights(version: int) -> dict[str, torch.Tensor]:
    """Of several dtypes, a scalar and an empty one among them; more than two of the buckets used
    here."""
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
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[WeightSender]:
    sender = WeightSender(
        WeightStore(tmp_path, bucket_bytes=5000), host="127.0.0.1", secret=SECRET, timeout=TIMEOUT
    )
    yield sender
    sender.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Depot]]:
    """Makes depots of engines on nodes with other shared memory than the trainer's: each on a node
    of its own, unless ``node`` names one."""
    made: list[Depot] = []

    def make(node: str = "", **options: Any) -> Depot:
        shared = tmp_path / "nodes" / (node or f"node-{len(made)}")
        shared.mkdir(parents=True, exist_ok=True)
        made.append(Depot(shared, **{"secret": SECRET, "timeout": TIMEOUT, **options}))
        return made[-1]

    yield make
    for depot in made:
        depot.close()


@pytest.fixture
def receiver(nodes: Callable[..., Depot]) -> Depot:
    return nodes()


def test_what_arrives_is_what_was_published(sender: WeightSender, receiver: Depot) -> None:
    for version in (4, 5):
        published = sender.publish(version, weights(version).items())
        record = Published.from_record(json.loads(json.dumps(published.record())))
        assert record == published
        assert len(published.buckets) > 3
        assert same(receiver.read(record), version)


def test_several_engines_are_sent_to_at_once_and_the_older_version_is_still_there(
    sender: WeightSender, nodes: Callable[..., Depot]
) -> None:
    both = [sender.publish(version, weights(version).items()) for version in (1, 2)]
    found: list[bool] = []

    def read(published: Published) -> None:
        found.append(same(nodes().read(published), published.version))

    threads = [threading.Thread(target=read, args=(both[i % 2],)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 6


def test_a_version_that_was_overwritten_is_refused(sender: WeightSender, receiver: Depot) -> None:
    first = sender.publish(1, weights(1).items())
    newest = [sender.publish(version, weights(version).items()) for version in (2, 3)][-1]
    with pytest.raises(
        WeightsDamaged,
        match=r"version 1: the trainer has them no more; take the "
        r"newest",
    ):
        receiver.read(first)
    assert same(receiver.read(newest), 3)


def test_a_byte_that_changes_on_the_way_is_found(
    sender: WeightSender, receiver: Depot, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = sender.publish(1, weights(1).items())
    memory = sender._store.memory(published)
    memory[published.buckets[2][0]] ^= 1
    with pytest.raises(WeightsDamaged, match=r"version 1: bucket 2 .* does not match its checksum"):
        receiver.read(published)
    memory[published.buckets[2][0]] ^= 1
    assert same(receiver.read(published), 1), "the request that broke off has left nothing behind"


def test_a_bucket_that_is_left_out_is_found(sender: WeightSender, receiver: Depot) -> None:
    published = sender.publish(1, weights(1).items())
    with pytest.raises(WeightsDamaged, match="in no bucket"):
        receiver.read(replace(published, buckets=published.buckets[:1] + published.buckets[2:]))


def test_weights_without_a_sender_are_unreachable(tmp_path: Path, receiver: Depot) -> None:
    published = WeightStore(tmp_path).publish(1, weights(1).items())
    with pytest.raises(
        WeightsUnreachable,
        match=r"published for one node alone; set "
        r"sync.transport",
    ):
        receiver.read(published)


def test_an_address_of_another_machine_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"[Aa]ssign"):
        WeightSender(WeightStore(tmp_path), host="192.0.2.1", secret=SECRET, timeout=1)


def test_only_the_given_address_listens(sender: WeightSender) -> None:
    ((_, port, _),) = json.loads(sender.source)
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    ]
    assert listening == [f"0100007F:{port:04X}"]


def test_a_slot_is_not_overwritten_while_it_is_sent(
    sender: WeightSender, receiver: Depot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 3 goes where version 1 lies, and waits until that has been sent.

    It is too large for the buffers between two ends, so that it is not sent at once.
    """
    large = {"large": torch.full((2**26,), 1, dtype=torch.uint8)}
    first = sender.publish(1, large.items())
    under_way = threading.Event()
    go_on = threading.Event()
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
    """Version 1, and ``large`` bytes more that are too many to lie in the buffers between two
    processes."""
    sender = WeightSender(
        WeightStore(directory, bucket_bytes=5000 + large // 8), host="127.0.0.1", secret=SECRET
    )
    tensors = weights(1) | ({"large": torch.zeros(large, dtype=torch.uint8)} if large else {})
    pipe.send(sender.publish(1, tensors.items()).record())
    signal.pause()


def asks(record: dict[str, Any], shared: Path, pipe: Connection) -> None:
    """Receive, and wait at the second bucket for ever."""

    def stop(*_: Any) -> None:
        pipe.send("under way")
        signal.pause()

    weight_link.verify = stop  # type: ignore[assignment]
    Depot(shared, secret=SECRET, timeout=TIMEOUT).read(Published.from_record(record))


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Any, Connection]]]:
    started: list[Any] = []

    def start(act: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
        own, other = forks().Pipe()
        started.append(forks().Process(target=act, args=(*arguments, other), daemon=True))
        started[-1].start()
        return started[-1], own

    yield start
    for process in started:
        process.kill()
        process.join()


def test_a_trainer_that_has_died_is_unreachable_and_found_out_soon(
    tmp_path: Path,
    nodes: Callable[..., Depot],
    start: Callable[..., tuple[Any, Connection]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_link, "CONNECT_SECONDS", 1.0)
    trainer, pipe = start(publishes, tmp_path, 0)
    published = Published.from_record(pipe.recv())
    receiver = nodes()
    assert same(receiver.read(published), 1)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.join()
    began = time.monotonic()
    with pytest.raises(WeightsUnreachable, match="version 1: not received from the trainer at"):
        nodes().read(published)
    assert time.monotonic() - began < 60
    assert same(receiver.read(published), 1), "its node has a copy"


def test_a_trainer_that_dies_in_the_middle_is_noticed(
    tmp_path: Path,
    nodes: Callable[..., Depot],
    start: Callable[..., tuple[Any, Connection]],
    monkeypatch: pytest.MonkeyPatch,
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
        nodes(timeout=5.0).read(published)
    assert time.monotonic() - began < 30


def test_an_engine_that_dies_in_the_middle_costs_the_others_nothing(
    sender: WeightSender,
    receiver: Depot,
    tmp_path: Path,
    start: Callable[..., tuple[Any, Connection]],
) -> None:
    published = sender.publish(1, weights(1).items())
    engine, pipe = start(asks, published.record(), tmp_path / "another node")
    assert pipe.recv() == "under way"
    os.kill(engine.pid, signal.SIGKILL)
    engine.join()
    assert same(receiver.read(published), 1)
    with sender._turn:
        assert sender._turn.wait_for(lambda: not sender._sending[published.slot], TIMEOUT), (
            "it is waited for no longer"
        )


def test_an_engine_that_asks_nothing_or_nonsense_is_given_up(
    tmp_path: Path, nodes: Callable[..., Depot]
) -> None:
    """Its request ends, with the timeout at the latest; others are served."""
    sender = WeightSender(WeightStore(tmp_path), host="127.0.0.1", secret=SECRET, timeout=1.0)
    try:
        published = sender.publish(1, weights(1).items())
        nonsense = (
            {"key": published.key()},
            {
                "key": published.key(),
                "source": 7,
                "first": 0,
                "base": "",
                "serves": None,
                "failed": [],
            },
            {"key": published.key(), "source": 0, "first": 0, "serves": "here", "failed": [None]},
            ["set", "a"],
            {"key": "99-0", "source": 0, "first": 0, "serves": None, "failed": []},
            7,
        )
        for message in (None, *nonsense):
            peer = connect(address(sender), SECRET, b"weights", connecting=5.0, timeout=5.0)
            if message is not None:
                peer.send_message(message)
        assert same(nodes().read(published), 1)
        assert_all_answered()
    finally:
        sender.close()


def assert_all_answered() -> None:
    for thread in threading.enumerate():
        if thread.name == "weights-sent":
            thread.join(TIMEOUT)
            assert not thread.is_alive()


def address(sender: WeightSender) -> tuple[str, int]:
    ((host, port, _),) = json.loads(sender.source)
    return host, port


# ── strangers ──


def test_an_engine_without_the_runs_secret_gets_nothing(
    sender: WeightSender, receiver: Depot, nodes: Callable[..., Depot]
) -> None:
    """Any client that reached the port could download the weights."""
    published = sender.publish(1, weights(1).items())
    with pytest.raises(WeightsUnreachable, match="another secret"):
        nodes(secret=b"a secret of another run").read(published)
    with pytest.raises(WeightsUnreachable, match="16 bytes or more"):
        nodes(secret=b"").read(published)
    assert same(receiver.read(published), 1)


def test_a_trainer_that_does_not_know_the_secret_is_not_believed(
    receiver: Depot, tmp_path: Path
) -> None:
    """One that answers at the trainer's address, with a wrong proof or with the engine's own, sends
    it no weights."""
    published = WeightStore(tmp_path).publish(1, weights(1).items())
    for answer in (b"\0" * 32, None, b"HTTP/1.1 200 OK"):
        with socket.create_server(("127.0.0.1", 0)) as listening:

            def answer_one(
                listening: socket.socket = listening, answer: bytes | None = answer
            ) -> None:
                sock, _ = listening.accept()
                with sock:
                    sock.sendall(HELLO.pack(MAGIC, VERSION, b"weights", b"\1" * 32))
                    request = sock.recv(ANSWER.size, socket.MSG_WAITALL)
                    sock.sendall(request[32:] if answer is None else answer.ljust(32))

            thread = threading.Thread(target=answer_one)
            thread.start()
            source = json.dumps([[*listening.getsockname()[:2], "a node"]])
            with pytest.raises(WeightsUnreachable, match="does not prove that it knows"):
                receiver.read(replace(published, source=source))
            thread.join()


@pytest.mark.parametrize(
    "message",
    [b"", b"\0", b"\x00" * 64, bytes(range(64)), b"\xff" * (1 << 20), b"GET / HTTP/1.1\r\n\r\n"],
    ids=range(6),
)
def test_no_message_of_a_stranger_stops_the_trainer(
    message: bytes, sender: WeightSender, receiver: Depot
) -> None:
    """One message to the rendezvous ended the run: it was taken for the end of all requests."""
    published = sender.publish(1, weights(1).items())
    # it may have hung up before
    with socket.create_connection(address(sender)) as stranger, suppress(OSError):
        stranger.sendall(message)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(TIMEOUT)
        hello = stranger.recv(HELLO.size, socket.MSG_WAITALL)
        assert not stranger.recv(1), "it was answered more than a hello"
        assert hello[:4] == MAGIC
    assert same(receiver.read(published), 1)


def test_a_proof_is_good_for_one_connection(sender: WeightSender) -> None:
    """Who has seen an engine's proof cannot use it: each hello has a nonce of its own."""
    hellos = []
    for _ in range(2):
        with socket.create_connection(address(sender)) as sock:
            hellos.append(sock.recv(HELLO.size, socket.MSG_WAITALL))
            if len(hellos) == 1:
                answer = ClientHandshake(SECRET, b"weights", "").answer(hellos[0])
            sock.sendall(answer)
            sock.settimeout(TIMEOUT)
            assert bool(sock.recv(32, socket.MSG_WAITALL)) == (len(hellos) == 1)
    assert hellos[0] != hellos[1]


def test_unproven_connections_keep_no_engine_out(sender: WeightSender, receiver: Depot) -> None:
    """More of them than are kept: the oldest are dropped, at the latest when their time is over."""
    published = sender.publish(1, weights(1).items())
    unproven = [socket.create_connection(address(sender)) for _ in range(3 * UNPROVEN)]
    try:
        assert same(receiver.read(published), 1)
        with sender._server._turn:
            assert len(sender._server._unproven) <= UNPROVEN
    finally:
        for one in unproven:
            one.close()


def test_a_certificate_makes_it_a_connection_by_tls(
    tmp_path: Path, nodes: Callable[..., Depot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_link, "CONNECT_SECONDS", 0.5)
    with certificate(tmp_path) as (server, client):
        assert_read_over_tls(tmp_path, nodes, server, client)


def assert_read_over_tls(
    tmp_path: Path, nodes: Callable[..., Depot], server: ssl.SSLContext, client: ssl.SSLContext
) -> None:
    store = WeightStore(tmp_path, bucket_bytes=5000)
    sender = WeightSender(store, host="127.0.0.1", secret=SECRET, tls=server, timeout=TIMEOUT)
    try:
        published = sender.publish(1, weights(1).items())
        assert same(nodes(tls=(server, client)).read(published), 1)
        with pytest.raises(WeightsUnreachable):
            nodes(timeout=1.0).read(published)
    finally:
        sender.close()


def test_credentials_are_for_the_runs_user_alone(tmp_path: Path, sender: WeightSender) -> None:
    Credentials(SECRET, tmp_path / "node").write(tmp_path / "engine")
    (file,) = (tmp_path / "engine").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    published = sender.publish(1, weights(1).items())
    assert same(Credentials.read(tmp_path / "engine").depot().read(published), 1)
