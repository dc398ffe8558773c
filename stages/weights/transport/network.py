"""Weight sync over the network, the trainer's side: sends published versions, and says which node
sends them to which. Each rank of a trainer sends the buckets that it has published.

    node A (its depot)                             trainer
    connect, both prove the run's secret ────────▶ a thread for this one request
    request v ───────────────────────────────────▶ the chain of v: nobody before A
        ◀── have it ── piece 0 ── piece 1 … ────── out of the memory that v was published into, beside training
    node B: request v ───────────────────────────▶ the chain of v: A before B
        ◀── have it, from A ────────────────────── B connects to A, with the same proof

Bytes travel on the proven connections themselves (``pipeline.wire``), from host memory to host
memory. A connection serves one request: when one end dies the other gets an error, at once or after
a timeout, and asks again.
"""

from __future__ import annotations

import json
import os
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import structlog
import torch

from pipeline.node import node_id
from pipeline.wire.blocking import BlockingServer, BlockingStream
from stages.weights.published import Probe, Published
from stages.weights.transport.chain import SERVICE, Chain, pieces_of, send_pieces
from stages.weights.transport.depot import STALL_SECONDS, Depot
from stages.weights.transport.store import WeightStore

log = structlog.get_logger()

_CREDENTIALS = "credentials.json"


class WeightSender:
    """Publishes into ``store`` as the store itself does, and sends what lies there to nodes that
    ask.

    ``host`` is the address that it listens on, and by which nodes reach this process unless
    ``advertise`` is another one; ``secret`` the run's, which a node must prove to know; ``tls``
    wraps the connections; ``timeout``: seconds for which it waits for the other end at each piece.
    Raises ``OSError`` where ``host`` is no address of this machine.
    """

    def __init__(
        self,
        store: WeightStore,
        *,
        host: str,
        secret: bytes,
        advertise: str = "",
        tls: ssl.SSLContext | None = None,
        timeout: float = STALL_SECONDS,
    ) -> None:
        self._store = store
        self._timeout = timeout
        self._offered: dict[int, Published] = {}  # by slot
        self._part = (0, 1)  # of the buckets that this process publishes
        self._sending: Counter[int] = Counter()  # requests that read a slot
        self._turn = threading.Condition()
        self._chain = Chain()
        self._server = BlockingServer(host, secret, SERVICE, self._answer, timeout=timeout, tls=tls)
        store.directory.mkdir(parents=True, exist_ok=True)
        self.source = json.dumps(
            [[advertise or host, self._server.address[1], node_id(store.directory)]]
        )

    def publish(
        self,
        version: int,
        weights: Iterable[tuple[str, torch.Tensor]],
        probe: Probe | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> Published:
        """See :meth:`WeightStore.publish`.

        It waits while the bytes that it would overwrite are being sent.
        """
        slot = self._store.slot(version)
        with self._turn:
            # no new request reads this slot
            if (replaced := self._offered.pop(slot, None)) is not None:
                self._chain.forget(replaced.key(*part))
            self._turn.wait_for(lambda: not self._sending[slot], self._timeout)
        published = replace(self._store.publish(version, weights, probe, part), source=self.source)
        with self._turn:
            self._offered[slot], self._part = published, part
        return published

    def close(self) -> None:
        """Take no more requests; one under way ends with the process."""
        self._server.close()
        self._store.close()

    def _answer(self, node: BlockingStream) -> None:
        try:
            request = node.receive_message()
            key = str(request["key"])
            first = int(request["first"])
            serves = request["serves"] and (str(request["serves"][0]), int(request["serves"][1]))
            failed = [(str(host), int(port)) for host, port in request["failed"]]
            with self._reading(key) as published:
                if published is None:
                    node.send_message({"have": False})
                    return
                with self._turn:
                    sender = self._chain.sender_to(serves, key, failed)
                node.send_message({"have": True, "from": sender})
                if sender is None:
                    pieces = pieces_of(published, *self._part)
                    base = self._base(str(request["base"]), published)
                    send_pieces(node, self._store.memory(published), pieces, first, base=base)
        except (
            Exception
        ) as error:  # most likely the node's process has ended; if not, it requests again
            log.warning("weights not sent", reason=f"{type(error).__name__}: {error}")

    def _base(self, key: str, published: Published) -> Callable[[], np.ndarray | None]:
        """Returns what gives the bytes of an older version that is as long, until they are
        overwritten: publishing does not wait for those who send changes of it."""
        base = self._find(key)
        if base is None or base.nbytes != published.nbytes:
            return lambda: None
        memory = self._store.memory(base)
        return lambda: memory if self._offered.get(base.slot) is base else None

    def _find(self, key: str) -> Published | None:
        with self._turn:
            return next(
                (one for one in self._offered.values() if one.key(*self._part) == key), None
            )

    @contextmanager
    def _reading(self, key: str) -> Iterator[Published | None]:
        with self._turn:
            published = self._find(key)
            if published is not None:
                self._sending[published.slot] += 1
        try:
            yield published
        finally:
            if published is not None:
                with self._turn:
                    self._sending[published.slot] -= 1
                    self._turn.notify_all()


@dataclass(frozen=True)
class Credentials:
    """What a process of another library (vLLM's worker) needs to receive weights: a file that only
    the run's user can read.
    ``shared``: the folder with the node's depot; ``tls``: the files of certificate, key and
    authority (None: no TLS)."""

    secret: bytes
    shared: Path
    tls: tuple[str, str, str] | None = None

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _CREDENTIALS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(
                {"secret": self.secret.decode(), "shared": str(self.shared), "tls": self.tls}, file
            )

    @classmethod
    def read(cls, folder: Path) -> Credentials:
        found = json.loads((folder / _CREDENTIALS).read_text())
        return cls(
            found["secret"].encode(), Path(found["shared"]), found["tls"] and tuple(found["tls"])
        )

    def depot(self) -> Depot:
        tls = None
        if self.tls is not None:
            certificate, key, authority = self.tls
            tls = (
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
                ssl.create_default_context(cafile=authority),
            )
            tls[0].load_cert_chain(certificate, key)
        return Depot(self.shared, secret=self.secret, tls=tls)
