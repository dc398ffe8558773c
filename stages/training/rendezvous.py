"""The rendezvous of a rank group: a store in rank 0's process, which the other ranks reach wherever
they run.

    rank 0: a store ◀── served at an address that the rank group's log has ◀── rank r: a connection for each calling thread

Both ends of a connection prove that they know the run's secret
(:mod:`pipeline.wire`), inside TLS where the recipe has certificates. The log also
orders: rank r connects when rank 0 listens.
"""

from __future__ import annotations

import ipaddress
import ssl
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, Store

from pipeline.wire.blocking import BlockingServer, BlockingStream, connect
from pipeline.wire.frames import TransferError
from stages.weights.transport.depot import CONNECT_SECONDS

# for which the store waits for a rank's next call: another group is made much later
IDLE_SECONDS = 14 * 86400.0
SERVICE = b"ranks"
MARGIN_SECONDS = 5.0  # for which a rank waits for the store's answer beyond the store's own timeout


class RanksStore(Store):
    """The store of rank 0 (:func:`serve_store`) in the process of another rank.

    Each thread has a proven connection of its own: a call may wait for a key that a rank sets after
    a call of another thread.
    """

    own_address = ""

    def __init__(self, connected: Callable[[], BlockingStream]) -> None:
        super().__init__()
        self._connected = connected
        self._own = threading.local()

    def _ask(self, do: str, *arguments: Any) -> Any:
        if not hasattr(self._own, "peer"):
            self._own.peer = self._connected()
        self._own.peer.send_message([do, *arguments])
        answer = self._own.peer.receive_message()
        if "wrong" in answer:
            raise RuntimeError(f"the rendezvous failed at the trainer: {answer['wrong']}")
        return answer["is"]

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", key, bytes(value) if isinstance(value, bytes | bytearray) else value)

    def get(self, key: str) -> bytes:
        return bytes(self._ask("get", key))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))


def serve_store(peer: BlockingStream, store: Store) -> None:
    """Answer the calls of a :class:`RanksStore` out of ``store`` until the other end hangs up."""
    try:
        while True:
            do, *arguments = peer.receive_message()
            if do not in ("set", "get", "add", "check", "wait", "delete_key"):
                raise ConnectionError(f"the engine requested from the rendezvous {do!r}")
            try:
                peer.send_message({"is": getattr(store, do)(*arguments)})
            except RuntimeError as error:  # torch's: a key did not come in time
                peer.send_message({"wrong": str(error)[:1000]})
    except (OSError, TransferError, ValueError, TypeError):
        return


class HeldStore(HashStore):
    """The store in rank 0's process.

    ``own_address``: the address by which this process reaches the others ("": they are on this
    node).
    """

    own_address = ""


class Rendezvous:
    """Rank 0's end: :attr:`store`, served on ``host`` at :attr:`address`.

    ``advertise``: the address by which other nodes reach it (default: ``host``); ``timeout``:
    seconds for which a rank waits for the others. Raises OSError where ``host`` is no address of
    this machine.
    """

    def __init__(
        self,
        host: str,
        secret: bytes,
        *,
        advertise: str = "",
        timeout: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.store = HeldStore()
        self.store.set_timeout(timedelta(seconds=timeout))
        self._server = BlockingServer(
            host,
            secret,
            SERVICE,
            lambda peer: serve_store(peer, self.store),
            timeout=IDLE_SECONDS,
            tls=tls,
        )
        self.address = (advertise or host, self._server.address[1])
        self.store.own_address = _beyond_this_node(self.address[0])

    def close(self) -> None:
        self._server.close()


def join_rendezvous(
    address: tuple[str, int], secret: bytes, *, timeout: float, tls: ssl.SSLContext | None = None
) -> RanksStore:
    """Return the store at ``address`` of a :class:`Rendezvous`.

    Raises OSError when nothing there knows ``secret``.
    """
    options: dict[str, Any] = {
        "connecting": CONNECT_SECONDS,
        "timeout": timeout + MARGIN_SECONDS,
        "tls": tls,
    }
    first = connect(address, secret, SERVICE, **options)
    store = RanksStore(lambda: connect(address, secret, SERVICE, **options))
    store.own_address = _beyond_this_node(first.own_address)
    first.close()
    return store


def _beyond_this_node(address: str) -> str:
    return "" if ipaddress.ip_address(address.partition("%")[0]).is_loopback else address
