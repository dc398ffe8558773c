"""Ranks find each other in rank 0's store: on one machine over loopback, on two at their addresses;
nobody else gets in."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeline.wire.handshake import ProofRefused
from stages.engines.torch.parallel.mesh import join
from stages.parallel.layout import Layout
from stages.training.rendezvous import Rendezvous, join_rendezvous
from tests.machines import two_machines
from tests.servers import self_signed

SECRET = b"of one rank group, sixteen or more"


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    met = Rendezvous("127.0.0.1", SECRET, timeout=20.0)
    yield met
    met.close()


def test_all_calls_of_a_store_reach_rank_0(rendezvous: Rendezvous) -> None:
    store = join_rendezvous(rendezvous.address, SECRET, timeout=20.0)
    store.set("a", b"\x00\xff")
    assert bytes(rendezvous.store.get("a")) == bytes(store.get("a")) == b"\x00\xff"
    assert [store.add("n", 2), rendezvous.store.add("n", 3)] == [2, 5]
    store.wait(["a", "n"])
    assert store.check(["a"])
    assert not store.check(["none"])
    assert store.delete_key("a")
    assert not rendezvous.store.check(["a"])
    assert store.own_address == rendezvous.store.own_address == "", (
        "one node: gloo's ports stay on loopback"
    )


def test_a_thread_that_waits_for_a_key_does_not_hold_up_another_one(rendezvous: Rendezvous) -> None:
    store = join_rendezvous(rendezvous.address, SECRET, timeout=20.0)
    found = []
    waiting = threading.Thread(target=lambda: found.append(bytes(store.get("late"))))
    waiting.start()
    store.set("early", b"1")  # on the same connection it would wait behind the other thread's call
    assert bytes(rendezvous.store.get("early")) == b"1"
    rendezvous.store.set("late", b"2")
    waiting.join(20)
    assert found == [b"2"]


def test_a_process_without_the_secret_is_not_let_in(rendezvous: Rendezvous) -> None:
    with pytest.raises(ProofRefused):
        join_rendezvous(rendezvous.address, b"another secret, sixteen or more", timeout=5.0)


def test_the_store_is_inside_tls_where_there_are_certificates(tmp_path: Path) -> None:
    import ssl

    files = self_signed(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files / "cert.pem", files / "key.pem")
    met = Rendezvous("127.0.0.1", SECRET, timeout=20.0, tls=server)
    try:
        tls = ssl.create_default_context(cafile=str(files / "cert.pem"))
        store = join_rendezvous(met.address, SECRET, timeout=20.0, tls=tls)
        store.set("a", b"1")
        assert bytes(met.store.get("a")) == b"1"
    finally:
        met.close()


def test_ranks_on_two_machines_join_at_their_addresses(tmp_path: Path) -> None:
    with two_machines(tmp_path) as machines:
        first = machines.start(0, __name__, "0", machines.address(0))
        assert first.stdin is not None
        assert first.stdout is not None
        address = json.loads(first.stdout.readline())
        assert address[0] == machines.address(0)
        second = machines.start(1, __name__, "1", *map(str, address))
        for process in (second, first):  # the first one has the store, and ends when its input does
            out, _ = process.communicate(timeout=120)
            assert json.loads(out) == {"sum": 3.0, "interface": "eth0"}


def rank(number: int, host: str, port: int = 0) -> None:
    """Join the other rank from this machine, and print the sum of both ranks' numbers, and gloo's
    interface."""
    if number == 0:
        met = Rendezvous("0.0.0.0", SECRET, advertise=host, timeout=60.0)
        print(json.dumps(met.address), flush=True)
        store: dist.Store = met.store
    else:
        store = join_rendezvous((host, port), SECRET, timeout=60.0)
    join(Layout.for_training(dp=2).coordinates(number), store, torch.device("cpu"), 60.0)
    total = torch.tensor([1.0 + number])
    dist.all_reduce(total)
    print(
        json.dumps({"sum": total.item(), "interface": os.environ["GLOO_SOCKET_IFNAME"]}), flush=True
    )
    if number == 0:
        sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    rank(int(sys.argv[1]), *sys.argv[2:3], *map(int, sys.argv[3:]))
