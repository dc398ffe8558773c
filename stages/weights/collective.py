"""Weight sync over the network: engines request published versions from the trainer's process.

    engine                                         trainer, rank 0
    connect, both prove the run's secret ────────▶ a thread for this one request
    request v ───────────────────────────────────▶
        ◀── found? ── bucket 0 ── bucket 1 … ───── out of the memory that v was published into, beside training
        └─▶ host memory beside generation, each bucket's checksum against the record in the index

Bytes travel on the proven connection itself (``secret_socket``), from host memory to host memory. Two accelerators
of one kind join a group of two of their own backend (nccl, hccl) instead, whose rendezvous is that connection: two buckets
are in flight, and no more than that lies on a device. Connection and group serve one request: when one end dies the other
gets an error, at once or after ``timeout``, and the next request begins with new ones.
"""

from __future__ import annotations

import json
import os
import ssl
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from torch.distributed import BroadcastOptions, HashStore, Store

from stages import device as devices
from stages.weights.secret_socket import SecretServer, SecretSocket, connect
from stages.weights.store import (
    Probe,
    Published,
    WeightsDamaged,
    WeightStore,
    WeightsUnreachable,
    tensors_of,
    verify,
)

log = structlog.get_logger()

CONNECT_SECONDS = 5.0  # to notice that a trainer is gone
STALL_SECONDS = 30.0  # that one end waits for the other
IN_FLIGHT = 2  # buckets
_CREDENTIALS = "credentials.json"


class WeightSender:
    """Publishes into ``store`` as the store itself does, and sends what lies there to engines that ask.

    ``device`` is the trainer's; ``host`` the address that it listens on, and by which engines reach this process unless
    ``advertise`` is another one; ``secret`` the run's, which an engine must prove to know; ``tls`` wraps the connections;
    ``timeout``: seconds for which it waits for the other end at each bucket. Raises ``OSError`` where ``host`` is no address
    of this machine.
    """

    def __init__(
        self,
        store: WeightStore,
        device: torch.device,
        *,
        host: str,
        secret: bytes,
        advertise: str = "",
        tls: ssl.SSLContext | None = None,
        timeout: float = STALL_SECONDS,
    ) -> None:
        self._store, self._device, self._timeout = store, device, timeout
        self._offered: dict[int, Published] = {}  # by slot
        self._sending: Counter[int] = Counter()  # requests that read a slot
        self._turn = threading.Condition()
        self._server = SecretServer(host, secret, self._answer, timeout=timeout, tls=tls)
        self.source = json.dumps([advertise or host, self._server.address[1], device.type])

    def publish(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], probe: Probe | None = None
    ) -> Published:
        """See :meth:`WeightStore.publish`. It waits while the bytes that it would overwrite are being sent."""
        slot = self._store.slot(version)
        with self._turn:
            self._offered.pop(slot, None)  # no new request reads this slot
            self._turn.wait_for(lambda: not self._sending[slot], self._timeout)
        published = replace(self._store.publish(version, weights, probe), source=self.source)
        with self._turn:
            self._offered[slot] = published
        return published

    def close(self) -> None:
        """Take no more requests; one under way ends with the process."""
        self._server.close()
        self._store.close()

    def _answer(self, engine: SecretSocket) -> None:
        try:
            asked = engine.receive_message()
            version, kind = int(asked["version"]), str(asked["device"])
            with self._reading(version) as published:
                together = self._together(kind)
                engine.send_message({"have": published is not None, "group": together})
                if published is None:
                    return
                memory = self._store.memory(published.slot, published.nbytes)
                if together:
                    self._send_by_group(engine, _buckets(memory, published))
                else:
                    for offset, nbytes, _ in published.buckets:
                        engine.send(memory[offset : offset + nbytes].data)
        except Exception as error:  # most likely the engine's process has ended; if not, it requests again
            log.warning("weights not sent", reason=f"{type(error).__name__}: {error}")

    def _together(self, kind: str) -> bool:
        """Whether the bytes go from device to device."""
        return kind == self._device.type and kind != "cpu"

    def _send_by_group(self, engine: SecretSocket, buckets: Sequence[torch.Tensor]) -> None:
        devices.use(self._device)
        store = HashStore()
        store.set_timeout(timedelta(seconds=self._timeout))
        serving = threading.Thread(target=serve_store, args=(engine, store), name="weights-rendezvous", daemon=True)
        serving.start()
        with closing(_DevicePair(self._device, store, 0, self._timeout)) as pair:
            pair.move(buckets)
        serving.join(self._timeout)  # until the engine hangs up: it has everything then

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
    """Asks a :class:`WeightSender` for published versions. ``device``: the engine's; ``secret``, ``tls`` and ``timeout``: as
    the sender's."""

    def __init__(
        self,
        device: torch.device,
        *,
        secret: bytes,
        tls: ssl.SSLContext | None = None,
        timeout: float = STALL_SECONDS,
    ) -> None:
        self._device, self._secret, self._tls, self._timeout = device, secret, tls, timeout

    def read(self, published: Published) -> dict[str, torch.Tensor]:
        """As :meth:`WeightStore.read`: a private, verified copy in host memory, by parameter name."""
        memory = np.empty(published.nbytes, np.uint8)
        self.receive(published, memory)
        return tensors_of(memory, published)

    def receive(self, published: Published, memory: np.ndarray) -> None:
        """Fill ``memory``, uint8 [``published.nbytes``]. Raises ``WeightsDamaged`` for bytes that are not those that were
        published, and ``WeightsUnreachable``."""
        published.check()
        options: dict[str, Any] = {"connecting": CONNECT_SECONDS, "timeout": self._timeout, "tls": self._tls}
        try:
            if not published.source:
                raise RuntimeError("it was published for one node alone; set sync.transport = 'collective'")
            host, port, _ = json.loads(published.source)
            with closing(connect((host, port), self._secret, **options)) as trainer:
                trainer.send_message({"version": published.version, "device": self._device.type})
                answer = trainer.receive_message()
                if not answer["have"]:
                    raise published.damage("the trainer has them no more; take the newest")
                receive = self._receive_by_group if answer["group"] else self._receive_bytes
                receive(trainer, published, memory)
        except WeightsDamaged:
            raise
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            wrong = f"weights of version {published.version}: not received from the trainer at {published.source!r}"
            raise WeightsUnreachable(f"{wrong}: {error}") from error

    def _receive_bytes(self, trainer: SecretSocket, published: Published, memory: np.ndarray) -> None:
        """Fill ``memory``; each bucket is verified while the next one comes."""
        with ThreadPoolExecutor(1, "weights-verified") as beside:
            verifying: deque[Future[None]] = deque()
            for number, (offset, nbytes, _) in enumerate(published.buckets):
                if len(verifying) == IN_FLIGHT:
                    verifying.popleft().result()
                trainer.receive_into(memory[offset : offset + nbytes].data)
                verifying.append(beside.submit(verify, memory, published, number))
            for verified in verifying:
                verified.result()

    def _receive_by_group(self, trainer: SecretSocket, published: Published, memory: np.ndarray) -> None:
        devices.use(self._device)
        with closing(_DevicePair(self._device, RemoteStore(trainer), 1, self._timeout)) as pair:
            pair.move(_buckets(memory, published), landed=lambda number: verify(memory, published, number))


@dataclass(frozen=True)
class Credentials:
    """What a process of another library (vLLM's worker) needs to receive weights: a file that only the run's user can read.
    ``authority``: the certificates by which TLS trusts the trainer ("": the system's; None: no TLS)."""

    secret: bytes
    authority: str | None = None

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _CREDENTIALS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"secret": self.secret.decode(), "authority": self.authority}, file)

    @classmethod
    def read(cls, folder: Path) -> Credentials:
        found = json.loads((folder / _CREDENTIALS).read_text())
        return cls(found["secret"].encode(), found["authority"])

    def receiver(self, device: torch.device) -> WeightReceiver:
        tls = None if self.authority is None else ssl.create_default_context(cafile=self.authority or None)
        return WeightReceiver(device, secret=self.secret, tls=tls)


class RemoteStore(Store):
    """The store of a group's rendezvous, held by the other end of a proven connection (:func:`serve_store`)."""

    def __init__(self, peer: SecretSocket) -> None:
        super().__init__()
        self._peer, self._turn = peer, threading.Lock()

    def _ask(self, do: str, *arguments: Any) -> Any:
        with self._turn:
            self._peer.send_message([do, *arguments])
            answer = self._peer.receive_message()
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


def serve_store(peer: SecretSocket, store: Store) -> None:
    """Answer the calls of a :class:`RemoteStore` out of ``store`` until the other end hangs up."""
    try:
        while True:
            do, *arguments = peer.receive_message()
            if do not in ("set", "get", "add", "check", "wait", "delete_key"):
                raise ConnectionError(f"the engine requested from the rendezvous {do!r}")
            try:
                peer.send_message({"is": getattr(store, do)(*arguments)})
            except RuntimeError as error:  # torch's: a key did not come in time
                peer.send_message({"wrong": str(error)[:1000]})
    except (OSError, ValueError, TypeError):
        return


class _DevicePair:
    """One end of a group of two devices, through which rank 0 sends and rank 1 receives."""

    def __init__(self, device: torch.device, store: Store, rank: int, timeout: float) -> None:
        self._device, self._rank = device, rank
        self._group = devices.group(device, store, rank, 2, timedelta(seconds=timeout))

    def move(self, pieces: Sequence[torch.Tensor], landed: Callable[[int], None] = lambda number: None) -> None:
        """``pieces``: uint8 tensors in host memory, of equal sizes at both ends; ``landed`` is called with the number of
        each in turn."""
        largest = max((piece.nbytes for piece in pieces), default=0)
        staged = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(IN_FLIGHT)]
        flying: deque[tuple[int, torch.Tensor, Any]] = deque()

        def arrive() -> None:
            number, tensor, work = flying.popleft()
            work.wait()
            if self._rank:
                pieces[number].copy_(tensor)
            landed(number)

        for number, piece in enumerate(pieces):
            if len(flying) == IN_FLIGHT:
                arrive()
            tensor = staged[number % IN_FLIGHT][: piece.nbytes]
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
