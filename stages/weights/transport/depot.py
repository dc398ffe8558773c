"""The depot: one copy of each published version on a node, in shared memory, which all engines of
the node map.

    engine that wants v first ─▶ locks the depot ─▶ receives v: from the trainer, or from the node before it in the chain
             │                            │            └─▶ and sends it on to the next node, piece by piece as it comes
             │                            └──▶ on the trainer's own node: copies what lies there
    the node's other engines ──▶ wait for the lock ─▶ map v's file, and compare the checksums

The lock is one of the kernel on a file, so it ends with the process that has it. The next engine
keeps the buckets that are there. A file is complete when it has its name; nothing writes to it
after that. It is removed when newer versions come, and engines that have mapped it keep the bytes
until they drop them.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from pipeline.node import is_here
from pipeline.wire.blocking import BlockingServer, BlockingStream, connect
from pipeline.wire.frames import TransferError
from stages.threads import deferred
from stages.weights.published import (
    Published,
    WeightsDamaged,
    WeightsUnreachable,
    copy_verified,
    tensors_of,
    verify,
)
from stages.weights.transport.chain import (
    SERVICE,
    SILENT_SECONDS,
    Address,
    pieces_of,
    receive_pieces,
    send_pieces,
)
from stages.weights.transport.store import WeightStore, mapped

log = structlog.get_logger()

CONNECT_SECONDS = 5.0  # to notice that a node is gone
STALL_SECONDS = 30.0  # for which one end waits for the other
FOLDER = "depot"
_LOCK_SECONDS = 0.02  # between two attempts to get the lock
# of a connection: it fails, or what comes makes no sense
_UNREADABLE = (OSError, TransferError, ValueError, KeyError, TypeError)


class Arriving:
    """A version that arrives in ``memory``, uint8 [``published.nbytes``], from each source of
    ``published`` its part. Where this node has the bytes ``base`` of an older version, ``base_of``,
    they may come as changes of these."""

    alive: Callable[[], None] = staticmethod(lambda: None)
    """Called with each piece that arrives."""

    def __init__(
        self,
        published: Published,
        memory: np.ndarray,
        base_of: Published | None = None,
        base: np.ndarray | None = None,
    ) -> None:
        self.published = published
        self.memory = memory
        self._base = base
        self._base_of = None if base is None else base_of
        sources: list[Any] = json.loads(published.source)
        self.sources: list[Address] = [(source[0], source[1]) for source in sources]
        self.pieces = [pieces_of(published, source, len(sources)) for source in range(len(sources))]
        self.there = [0] * len(sources)  # pieces of each source
        self._turn = threading.Condition()
        self._failed = False

    def keep_verified(self) -> None:
        """Keep what the memory has already of each source, up to the first bucket that is not
        right."""
        for source, pieces in enumerate(self.pieces):
            with suppress(WeightsDamaged):
                for number, piece in enumerate(pieces):
                    if piece.is_last:
                        verify(self.memory, self.published, [piece.bucket])
                        self.there[source] = number + 1

    def request(self, source: int, *part: int, **more: Any) -> dict[str, Any]:
        """Returns the request for the rest of one source's part.

        ``part``: that and the number of sources, where the other end has this part alone.
        """
        keys = {
            "key": self.published.key(*part),
            "base": self._base_of.key(*part) if self._base_of else "",
        }
        return {"source": source, "first": self.there[source], **keys, **more}

    def receive(self, peer: BlockingStream, source: int, timeout: float) -> None:
        """Receive the rest of one source's part, and verify each bucket when it is there.

        After an error only verified buckets count as there. Raises OSError, TransferError,
        ValueError and WeightsDamaged.
        """
        pieces = self.pieces[source]
        verified = self.there[source]
        try:
            for number in receive_pieces(peer, self.memory, pieces, verified, timeout, self._base):
                self._set(source, number + 1)
                if pieces[number].is_last:
                    verify(self.memory, self.published, [pieces[number].bucket])
                    verified = number + 1
        finally:
            self._set(source, verified)

    def send(self, peer: BlockingStream, source: int, first: int, base: np.ndarray | None) -> None:
        """Send one source's part from piece ``first`` on, as it arrives, as changes of ``base``
        where the other end has that. Raises OSError."""

        def wait(number: int, seconds: float) -> bool:
            with self._turn:
                self._turn.wait_for(lambda: self._failed or self.there[source] > number, seconds)
                if self._failed:
                    raise ConnectionError("this node has not received the version itself")
                return self.there[source] > number

        send_pieces(peer, self.memory, self.pieces[source], first, wait, lambda: base)

    def fail(self) -> None:
        """Nothing more arrives: those who wait for it turn to another node."""
        with self._turn:
            self._failed = True
            self._turn.notify_all()

    def _set(self, source: int, there: int) -> None:
        with self._turn:
            self.there[source] = there
            self._turn.notify_all()
        self.alive()


class Depot:
    """Reads published versions for one engine, through the copy of its node in a folder of
    ``shared``.

    ``secret``: of the run; ``tls``: contexts of server and client; ``timeout``: seconds for which
    one end waits for the other. Where the trainer's own folder is ``shared``, the copy is made of
    what lies there.
    """

    def __init__(
        self,
        shared: Path,
        *,
        secret: bytes = b"",
        tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
        timeout: float = STALL_SECONDS,
    ) -> None:
        self._store = WeightStore(shared)
        self._folder = shared / FOLDER
        self._secret = secret
        self._tls = tls
        self._timeout = timeout
        self._name = uuid.uuid4().hex
        self._sendable: dict[str, Arriving] = {}  # by key of the version: received here
        self._last: Published | None = None  # that was read here, and verified
        self._server: BlockingServer | None = None
        self._starting = threading.Lock()

    def read(self, published: Published) -> dict[str, torch.Tensor]:
        """Returns the tensors of a version by parameter name, verified.

        They are the node's copy: for reading alone. Raises ``WeightsDamaged`` for bytes that are
        not those that were published, and ``WeightsUnreachable``.
        """
        return tensors_of(self._held(published), published)

    def link(self, published: Published, path: Path) -> None:
        """Make ``path`` a name of the node's copy of a version, verified, for other processes to
        map for reading: it stays when the depot removes its own name. ``path`` is in the depot's
        file system.

        Raises as :meth:`read`.
        """
        self._held(published)
        new = path.with_name(f"{path.name}-{self._name}")
        new.unlink(missing_ok=True)
        try:
            new.hardlink_to(self._folder / f"weights-{published.key()}")
        except FileNotFoundError:
            raise published.damage("a newer one has replaced it; take the newest") from None
        new.replace(path)
        new.unlink(missing_ok=True)  # where both were the same file already

    def close(self) -> None:
        """Send to no more nodes; one that is sent to asks elsewhere when this process ends."""
        if self._server is not None:
            self._server.close()
        self._sendable.clear()

    def _is_trainers(self, published: Published) -> bool:
        """Whether all of the version lies in the trainer's own memory on this node.

        Raises WeightsUnreachable.
        """
        if published.source:
            return all(
                is_here(node, self._store.directory) for _, _, node in json.loads(published.source)
            )
        if self._store.has(published):
            return True
        wrong = "it was published for one node alone; set sync.transport = 'network'"
        raise WeightsUnreachable(f"weights of version {published.version}: {wrong}")

    def _held(self, published: Published) -> np.ndarray:
        """The node's copy, which is made first if it is not there."""
        published.check()
        path = self._folder / f"weights-{published.key()}"
        made = False
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for key in [
            key for key in self._sendable if not (self._folder / f"weights-{key}").exists()
        ]:
            del self._sendable[key]
        try:
            with self._only_one() as locked:
                if not path.exists():
                    self._make(path, published, locked)
                    made = True
                memory = mapped(path)[: published.nbytes]
        except _UNREADABLE as error:
            wrong = (
                f"weights of version {published.version}: not received from the trainer at "
                f"{published.source!r}"
            )
            raise WeightsUnreachable(f"{wrong}: {error}") from error
        try:
            if not made:
                verify(memory, published)
        except WeightsDamaged:
            path.unlink(missing_ok=True)  # so that it is received again
            raise
        self._last = published
        return memory

    @contextmanager
    def _only_one(self) -> Iterator[bool]:
        """Wait until no other engine of the node receives.

        Gives False when the one that does has received nothing for so long that it must be stuck:
        flock has no deadline, so the lock is tried again and again.
        """
        with (self._folder / "lock").open("ab") as lock:
            touched = 0
            since = time.monotonic()
            while not (locked := _is_locked(lock.fileno())):
                before = touched
                touched = os.fstat(lock.fileno()).st_mtime_ns
                if touched != before:
                    since = time.monotonic()
                elif time.monotonic() - since > self._timeout:
                    break
                time.sleep(_LOCK_SECONDS)
            os.utime(lock.fileno())
            yield locked

    def _make(self, path: Path, published: Published, locked: bool) -> None:
        """Copy a version of this node's trainer, or receive it, into a file, which gets the name
        ``path`` when it is complete. ``locked``: what another engine has left of it is used, and
        what is left of others is removed; of older versions the newest stays where the next one may
        come as changes of it."""
        part = self._folder / f"part-{self._name}-{published.key()}"
        is_trainers = self._is_trainers(published)
        if locked:
            complete = sorted(
                self._folder.glob("weights-*"), key=lambda file: file.stat().st_mtime_ns
            )
            lefts = sorted(
                self._folder.glob("part-*"),
                key=lambda file: not file.name.endswith(f"-{published.key()}"),
            )
            if lefts and lefts[0].name.endswith(f"-{published.key()}"):
                lefts.pop(0).rename(part)
            for file in (*complete[: len(complete) if is_trainers else -1], *lefts):
                file.unlink()
        begun = part.exists()
        memory = mapped(part, make=max(published.nbytes, 1))[: published.nbytes]
        if is_trainers:
            copy_verified(self._store.mapped(published), memory, published)
        else:
            last = self._last
            self._last = None  # a base that is damaged is not used again
            base = self._complete(last.key(), published.nbytes) if last else None
            self._receive_into(Arriving(published, memory, last, base), begun)
        part.rename(path)

    def _receive_into(self, arriving: Arriving, begun: bool) -> None:
        """Receive a version from all of its sources. ``begun``: its memory has some of it."""
        key = arriving.published.key()
        arriving.alive = lambda: os.utime(self._folder / "lock")
        if begun:
            arriving.keep_verified()
        self._sendable[key] = arriving
        try:
            _all(lambda source: self._receive_part(arriving, source), len(arriving.sources))
        except BaseException:
            del self._sendable[key]
            arriving.fail()
            raise

    def _complete(self, key: str, nbytes: int) -> np.ndarray | None:
        """Returns the bytes of a version that this node has, by its key; None when it has none of
        ``nbytes`` bytes."""
        for file in self._folder.glob("weights-*"):
            with suppress(FileNotFoundError):
                if file.name == f"weights-{key}" and file.stat().st_size == max(nbytes, 1):
                    return mapped(file)[:nbytes]
        return None

    def _receive_part(self, arriving: Arriving, source: int) -> None:
        """Receive one source's part from the node that the source names; from another one when that
        fails."""
        origin = arriving.sources[source]
        sources = len(arriving.sources)
        failed = list[Address]()
        while True:
            with closing(self._connect(origin, self._timeout)) as trainer:
                serves = self._serve(trainer.own_address)
                trainer.send_message(
                    arriving.request(source, source, sources, serves=serves, failed=failed)
                )
                answer = trainer.receive_message()
                if not answer["have"]:
                    raise arriving.published.damage("the trainer has them no more; take the newest")
                if answer["from"] is None:
                    return arriving.receive(trainer, source, self._timeout)
            sender = (str(answer["from"][0]), int(answer["from"][1]))
            try:
                with closing(self._connect(sender, SILENT_SECONDS)) as node:
                    node.send_message(arriving.request(source))
                    if not node.receive_message()["have"]:
                        raise ConnectionError("it does not have the version")
                    return arriving.receive(node, source, self._timeout)
            except (WeightsDamaged, *_UNREADABLE) as error:
                reason = f"{type(error).__name__}: {error}"
                log.warning(
                    "weights: the node before this one has failed", node=sender, reason=reason
                )
                failed.append(sender)

    def _connect(self, address: Address, timeout: float) -> BlockingStream:
        tls = self._tls and self._tls[1]
        return connect(
            address,
            self._secret,
            SERVICE,
            connecting=CONNECT_SECONDS,
            timeout=timeout,
            tls=tls,
        )

    def _serve(self, host: str) -> Address | None:
        """Returns where the next node reaches this one, on its own address ``host``; None:
        nowhere."""
        with self._starting:
            if self._server is None:
                tls = self._tls and self._tls[0]
                with suppress(OSError):
                    self._server = BlockingServer(
                        host, self._secret, SERVICE, self._answer, timeout=self._timeout, tls=tls
                    )
            return None if self._server is None else self._server.address

    def _answer(self, node: BlockingStream) -> None:
        try:
            request = node.receive_message()
            arriving = self._sendable.get(request["key"])
            node.send_message({"have": arriving is not None})
            if arriving is not None:
                base = self._complete(request["base"], len(arriving.memory))
                arriving.send(node, int(request["source"]), int(request["first"]), base)
        except Exception as error:  # most likely that node has ended; if not, it asks another one
            log.warning("weights not sent on", reason=f"{type(error).__name__}: {error}")


def _all(work: Callable[[int], None], count: int) -> None:
    """Call ``work`` with each number below ``count``, at the same time; it returns, or raises, when
    all have ended."""
    calls = [deferred(functools.partial(work, number)) for number in range(count)]
    for _, run in calls[1:]:
        threading.Thread(target=run, name="weights-received", daemon=True).start()
    calls[0][1]()
    for outcome, _ in calls:
        outcome.exception()
    for outcome, _ in calls:
        outcome.result()


def _is_locked(descriptor: int) -> bool:
    """Lock an open file unless another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
