"""Weight sync between separate devices: a published version by torch.distributed, from the trainer to an engine that asks.

    engine                                         trainer, rank 0
    ask for v ─────────── TCPStore ──────────────▶ a thread for this one request
        ◀── have it? ── bucket 0 ── bucket 1 … ─── out of the memory that v was published into, beside training
        └─▶ host memory beside generation, each bucket's checksum against the record in the index

Both ends join a group of two of the devices' own backend (nccl, hccl; gloo between CPUs, and between devices of different
kinds). It lives for one request: an end whose other end dies has an error at once, or after ``timeout`` where the backend
does not notice (gloo in the middle of a message), and nothing is left of it for the next. Buckets are in flight two at a
time, and on a device they take no more memory than that.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import structlog
import torch
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore

from stages import device as devices
from stages.weight_sync import (
    Probe,
    Published,
    WeightsDamaged,
    WeightStore,
    WeightsUnreachable,
    tensors_of,
    verify,
)

log = structlog.get_logger()

CONNECT_SECONDS = 5.0  # a trainer that is gone is found out in as long
STALL_SECONDS = 30.0  # for which one end waits for the other
IN_FLIGHT = 2  # buckets
_ASKED, _END = "asked", b"end"
_CPU = torch.device("cpu")


class WeightSender:
    """Publishes into ``store`` as the store itself does, and sends what lies there to engines that ask.

    ``device`` is the trainer's; ``host`` the address under which engines reach this process, and the one that it listens on;
    ``timeout``: seconds for which it waits for the other end at each bucket. Raises ``OSError`` where ``host`` is no address
    of this machine.
    """

    def __init__(self, store: WeightStore, device: torch.device, *, host: str, timeout: float = STALL_SECONDS) -> None:
        self._store, self._device, self._timeout = store, device, timedelta(seconds=timeout)
        self._server, port = rendezvous(host, self._timeout)
        self.source = json.dumps([host, port, device.type])
        self._offered: dict[int, Published] = {}  # by slot
        self._sending: Counter[int] = Counter()  # requests that read a slot
        self._turn = threading.Condition()
        self._doorman = threading.Thread(target=self._answer, name="weights-asked", daemon=True)
        self._doorman.start()

    def publish(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], probe: Probe | None = None
    ) -> Published:
        """See :meth:`WeightStore.publish`. It waits while the bytes that it would overwrite are being sent."""
        slot = self._store.slot(version)
        with self._turn:
            self._offered.pop(slot, None)  # nobody begins with it any more
            self._turn.wait_for(lambda: not self._sending[slot], self._timeout.total_seconds())
        published = replace(self._store.publish(version, weights, probe), source=self.source)
        with self._turn:
            self._offered[slot] = published
        return published

    def close(self) -> None:
        """Take no more requests; one under way ends with the process."""
        with suppress(RuntimeError):  # the rendezvous failed, and its thread has ended
            _connect(self.source).queue_push(_ASKED, _END)
        self._doorman.join()
        del self._server
        self._store.close()

    def _answer(self) -> None:
        door = _connect(self.source, timedelta(days=10_000))
        while (asked := door.queue_pop(_ASKED)) != _END:
            threading.Thread(target=self._send, args=(asked,), name="weights-sent", daemon=True).start()

    def _send(self, asked: bytes) -> None:
        try:
            group, version, kind = json.loads(asked)
            devices.use(self._device)
            store, common = _connect(self.source), self._common(kind)
            with closing(_Line(common, store, group, 0, self._timeout)) as line, self._reading(version) as published:
                line.move([torch.tensor([int(published is not None)])])
                if published is not None:
                    line.move(_buckets(self._store.memory(published.slot, published.nbytes), published))
        except Exception as error:  # the engine's process has ended, most likely; if not, it asks again
            log.warning("weights not sent", asked=asked.decode(errors="replace"), reason=str(error))

    def _common(self, kind: str) -> torch.device:
        return self._device if kind == self._device.type else _CPU

    @contextmanager
    def _reading(self, version: int) -> Iterator[Published | None]:
        with self._turn:
            published = next((one for one in self._offered.values() if one.version == version), None)
            if published is not None:
                self._sending[published.slot] += 1
        try:
            yield published
        finally:
            if published is not None:
                with self._turn:
                    self._sending[published.slot] -= 1
                    self._turn.notify_all()


class WeightReceiver:
    """Asks a :class:`WeightSender` for published versions. ``device``: the engine's; ``timeout``: seconds for which it waits
    for the other end at each bucket."""

    def __init__(self, device: torch.device, *, timeout: float = STALL_SECONDS) -> None:
        self._device, self._timeout = device, timedelta(seconds=timeout)

    def read(self, published: Published) -> dict[str, torch.Tensor]:
        """As :meth:`WeightStore.read`: a private, verified copy in host memory, by parameter name."""
        memory = np.empty(published.nbytes, np.uint8)
        self.receive(published, memory)
        return tensors_of(memory, published)

    def receive(self, published: Published, memory: np.ndarray) -> None:
        """Fill ``memory``, uint8 [``published.nbytes``]. Raises ``WeightsDamaged`` for bytes that are not those that were
        published, and ``WeightsUnreachable``."""
        published.check()
        try:
            self._receive(published, memory)
        except RuntimeError as error:
            if isinstance(error, WeightsDamaged):
                raise
            wrong = f"weights of version {published.version}: not received from the trainer at {published.source!r}"
            raise WeightsUnreachable(f"{wrong}: {error}") from error

    def _receive(self, published: Published, memory: np.ndarray) -> None:
        if not published.source:
            raise RuntimeError("it was published for one node alone; set sync.transport = 'collective' for the trainer")
        devices.use(self._device)
        kind, group = json.loads(published.source)[2], uuid.uuid4().hex
        store = _connect(published.source)
        store.queue_push(_ASKED, json.dumps([group, published.version, self._device.type]))
        common = self._device if kind == self._device.type else _CPU
        with closing(_Line(common, store, group, 1, self._timeout)) as line:
            line.move(there := [torch.tensor([0])])
            if not there[0].item():
                gone = "the trainer has them no more; take the newest"
                raise WeightsDamaged(f"weights of version {published.version}: {gone}")
            line.move(_buckets(memory, published), landed=lambda number: verify(memory, published, number))


class _Line:
    """One end of a group of two: what rank 0 moves, rank 1 gets."""

    def __init__(self, device: torch.device, store: TCPStore, group: str, rank: int, timeout: timedelta) -> None:
        self._device, self._rank = device, rank
        self._group = devices.group(device, PrefixStore(group, store), rank, 2, timeout)

    def move(self, pieces: Sequence[torch.Tensor], landed: Callable[[int], None] = lambda number: None) -> None:
        """``pieces``: tensors in host memory, of equal sizes at both ends; ``landed`` is told the number of each in turn."""
        largest = max((piece.nbytes for piece in pieces), default=0)
        staged = [
            torch.empty(0 if self._device == _CPU else largest, dtype=torch.uint8, device=self._device)
            for _ in range(IN_FLIGHT)
        ]
        flying: deque[tuple[int, torch.Tensor, Any]] = deque()

        def arrive() -> None:
            number, tensor, work = flying.popleft()
            work.wait()
            if self._rank and tensor is not pieces[number]:
                pieces[number].copy_(tensor)
            landed(number)

        for number, piece in enumerate(pieces):
            if len(flying) == IN_FLIGHT:
                arrive()
            tensor = piece
            if self._device != _CPU:
                tensor = staged[number % IN_FLIGHT][: piece.nbytes].view(piece.dtype)
                if self._rank == 0:
                    tensor.copy_(piece)
            flying.append((number, tensor, self._group.broadcast([tensor], BroadcastOptions())))  # root: rank 0
        while flying:
            arrive()
        devices.synchronize(self._device)

    def close(self) -> None:
        self._group.shutdown()


def _buckets(memory: np.ndarray, published: Published) -> list[torch.Tensor]:
    flat = torch.from_numpy(memory)
    return [flat[offset : offset + nbytes] for offset, nbytes, _ in published.buckets]


def rendezvous(host: str, timeout: timedelta) -> tuple[TCPStore, int]:
    """A store on a free port of ``host`` alone (left to itself torch takes all of the machine's addresses), and the port.
    Raises ``OSError`` where ``host`` is no address of this machine."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listening:
        listening.bind(address)
        listening.listen(128)
        port = listening.getsockname()[1]
        taken = os.dup(listening.fileno())  # torch closes it
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=taken)
    return store, port


def _connect(source: str, timeout: timedelta = timedelta(seconds=CONNECT_SECONDS)) -> TCPStore:
    host, port, _ = json.loads(source)
    return TCPStore(host, port, is_master=False, timeout=timeout)
