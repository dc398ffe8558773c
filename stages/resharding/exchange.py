"""How the messages of a round get from rank to rank: through shared memory on one node, else by the group's collectives.

    SharedExchange   pack ─▶ a bucket that all have mapped ─▶ meet (a byte to each) ─▶ unpack from the others' buckets
    GroupExchange    pack ─▶ a bucket ─▶ all-to-all (gloo, nccl, hccl) ─▶ a bucket ─▶ unpack

Both have two buckets, of which round k takes number k mod 2, so that a rank packs one while the other is on its way. The
shared ones are a file in memory that never has a name, and pipes; the others open them below ``/proc/PID/fd``, which the
kernel grants to the same user. So nothing is left behind by whoever is killed, and a rank that ends is noticed at once.

Ranks meet by a byte in a pipe, which wakes no thread beside theirs, as gloo's smallest collective would.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

import torch
import torch.distributed as dist

from pipeline.warehouse.arena import shared_memory_directory
from stages.resharding.plan import Round

Move = tuple[str, tuple[slice, ...], slice, tuple[int, ...]]  # of a tensor's part, to or from a place in flat values


@dataclass(frozen=True)
class Part:
    """A rank's part in one round. ``sends`` and ``receives`` are elements of ``dtype`` by peer, and ``begins`` where the
    message for this rank begins in each peer's bucket, in which messages lie by receiver. ``packed`` are parts of source
    tensors with their place in this rank's bucket, ``unpacked`` those of targets with their sender and place in its message.
    """

    dtype: torch.dtype
    sends: list[int]
    receives: list[int]
    begins: list[int]
    packed: tuple[Move, ...]
    unpacked: tuple[tuple[int, Move], ...]

    @property
    def sent_bytes(self) -> int:
        return sum(self.sends) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.sent_bytes + sum(self.receives) * self.dtype.itemsize


def part_of(rank: int, slices: Round, world: int) -> Part:
    """What ``rank`` does in the round ``slices``."""
    sends, receives, begins = [0] * world, [0] * world, [0] * world
    packed, unpacked, at = [], [], 0
    for s in sorted((s for s in slices if s.sender == rank), key=lambda s: s.receiver):
        count = prod(s.sizes)
        packed.append((s.source, part_index(s.source_at, s.sizes), slice(at, at + count), s.sizes))
        sends[s.receiver] += count
        at += count
    for s in slices:
        count, at = prod(s.sizes), receives[s.sender]
        if s.receiver == rank:
            move = (s.target, part_index(s.target_at, s.sizes), slice(at, at + count), s.sizes)
            unpacked.append((s.sender, move))
            receives[s.sender] += count
        elif s.receiver < rank:
            begins[s.sender] += count
    return Part(slices[0].dtype, sends, receives, begins, tuple(packed), tuple(unpacked))


def part_index(at: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    """What a tensor is indexed with for the ``sizes`` elements at ``at``."""
    return tuple(slice(start, start + size) for start, size in zip(at, sizes, strict=True))


class Exchange(Protocol):
    """Rounds in order, on every rank alike: fill ``room(k)``, ``start(k)``, then ``messages(k - 1)``. What these raise when
    a rank is gone or late is a RuntimeError or an OSError."""

    name: str

    def room(self, number: int) -> torch.Tensor:
        """Where this rank packs what it sends in the round; waits until nobody reads it any more."""
        ...

    def start(self, number: int) -> None:
        """The room is filled."""
        ...

    def messages(self, number: int) -> Sequence[torch.Tensor]:
        """What the round has brought, by sender; waits for it. It is there until the next ``room``."""
        ...

    def close(self) -> None: ...


def temporary_bytes(parts: Sequence[Part]) -> int:
    """Bytes of the buckets of an exchange; what lies in shared memory counts for its sender and its receiver."""
    return sum(max((part.nbytes for part in parts[lane::2]), default=0) for lane in (0, 1))


def connect(
    parts: Sequence[Part], rank: int, *, device: torch.device, group: dist.ProcessGroup | None, deadline: float
) -> Exchange:
    """The exchange that all ranks of ``group`` use: shared memory when the tensors are the CPU's and every rank reaches
    every other's, else the group. ``deadline``: seconds that a round, and finding out, may take."""
    if device.type != "cpu":
        return GroupExchange(parts, device, group, deadline)
    world, shared = dist.get_world_size(group), None
    mine = [0] * (6 + 2 * world)
    with ExitStack() as undo:
        with suppress(OSError):  # the others hear zeros then
            shared = SharedExchange(parts, rank, world, deadline)
            undo.callback(shared.close)
            mine = shared.told
        everyone = torch.zeros(world, len(mine), dtype=torch.int64)
        _wait(dist.all_gather([*everyone], torch.tensor(mine), group=group, async_op=True), deadline)
        reached = torch.tensor([int(shared is not None and shared.reach(everyone.tolist()))])
        _wait(dist.all_reduce(reached, dist.ReduceOp.MIN, group=group, async_op=True), deadline)
        if shared is not None and reached:
            shared.reached()
            undo.pop_all()
            return shared
    return GroupExchange(parts, device, group, deadline)


def _wait(work: Any, deadline: float) -> None:
    work.wait(timedelta(seconds=deadline))


class GroupExchange:
    """All-to-alls of the group. They were measured on gloo beside batches of sends and receives: as fast at 4 MiB, faster
    below."""

    def __init__(
        self, parts: Sequence[Part], device: torch.device, group: dist.ProcessGroup | None, deadline: float
    ) -> None:
        self.name: str = dist.get_backend(group)
        self._parts, self._group, self._deadline = parts, group, deadline
        sizes = [max((part.nbytes for part in parts[lane::2]), default=0) for lane in (0, 1)]
        self._buckets = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        self._flying: list[Any] = [None, None]

    def _values(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What is sent and what is received, flat."""
        part = self._parts[number]
        values = self._buckets[number % 2][: part.nbytes].view(part.dtype)
        sent, received = values.split([sum(part.sends), sum(part.receives)])
        return sent, received

    def room(self, number: int) -> torch.Tensor:
        return self._values(number)[0]

    def start(self, number: int) -> None:
        part, (sent, received) = self._parts[number], self._values(number)
        self._flying[number % 2] = dist.all_to_all_single(
            received, sent, part.receives, part.sends, group=self._group, async_op=True
        )

    def messages(self, number: int) -> Sequence[torch.Tensor]:
        _wait(self._flying[number % 2], self._deadline)
        return self._values(number)[1].split(self._parts[number].receives)

    def close(self) -> None:
        self._buckets = []


class SharedExchange:
    """Buckets in shared memory, for ranks of one user on one node. Raises OSError where the node has no such memory left,
    or not what it takes (Linux).

    All ranks meet before each round but the first, and before the last is unpacked: whoever has come has packed the round
    before and unpacked the one before that, whose bucket is packed next.
    """

    name = "shared memory"

    def __init__(self, parts: Sequence[Part], rank: int, world: int, deadline: float) -> None:
        self._parts, self._rank, self._deadline = parts, rank, deadline
        lanes = [max((part.sent_bytes for part in parts[lane::2]), default=0) for lane in (0, 1)]
        second = -(-lanes[0] // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = second + max(lanes[1], 1)
        self._open: list[int] = []
        self._hears: list[int] = []  # pipes by rank; a rank meets itself too
        self._tells: list[int] = []
        self._buckets: list[list[torch.Tensor]] = []  # by rank
        try:
            node = UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).int >> 65
            memory = os.open(shared_memory_directory(), os.O_TMPFILE | os.O_RDWR, 0o600)
            self._open.append(memory)
            os.posix_fallocate(memory, 0, nbytes)  # a full directory is an error here and not a signal later
            pipes = []
            for _ in range(world):
                hears, theirs = os.pipe()
                self._open += [hears, theirs]
                self._hears.append(hears)
                pipes += [theirs, _identity(theirs)]
            self.told = [node, os.getpid(), memory, _identity(memory), second, nbytes, *pipes]
            """What the others must know to reach all this."""
        except BaseException:
            self.close()
            raise

    def reach(self, everyone: Sequence[Sequence[int]]) -> bool:
        """Map the buckets of all and open the pipes to them, by what they told. False where one cannot be reached."""
        try:
            for node, pid, memory, identity, second, nbytes, *pipes in everyone:
                if node != self.told[0]:
                    return False
                found = self._opened(pid, memory, identity, os.O_RDWR)
                mapped = torch.frombuffer(mmap.mmap(found, nbytes), dtype=torch.uint8)
                self._buckets.append([mapped[:second], mapped[second:]])
                theirs, identity = pipes[2 * self._rank : 2 * self._rank + 2]
                self._tells.append(self._opened(pid, theirs, identity, os.O_WRONLY))
        except OSError:
            return False
        return True

    def _opened(self, pid: int, number: int, identity: int, flags: int) -> int:
        path = f"/proc/{pid}/fd/{number}"
        if _identity(path) != identity:  # of a process that has this number in another container
            raise OSError(f"process {pid} is not the rank that told of it")
        self._open.append(os.open(path, flags))
        return self._open[-1]

    def reached(self) -> None:
        """Everybody has opened everything: from now on a rank that ends closes its pipes."""
        for one in {*self._open}.difference(self._hears, self._tells):
            os.close(one)
        self._open = [*self._hears, *self._tells]

    def room(self, number: int) -> torch.Tensor:
        if number:
            self._meet()
        part = self._parts[number]
        return self._buckets[self._rank][number % 2][: part.sent_bytes].view(part.dtype)

    def start(self, number: int) -> None:
        """The others hear of it when all meet."""

    def messages(self, number: int) -> Sequence[torch.Tensor]:
        if number == len(self._parts) - 1:
            self._meet()
        part, found = self._parts[number], []
        for buckets, begin, size in zip(self._buckets, part.begins, part.receives, strict=True):
            first, nbytes = begin * part.dtype.itemsize, size * part.dtype.itemsize
            found.append(buckets[number % 2][first : first + nbytes].view(part.dtype))
        return found

    def _meet(self) -> None:
        end = time.monotonic() + self._deadline
        for pipe in self._tells:
            os.write(pipe, b".")
        for peer, pipe in enumerate(self._hears):
            waiting = select.poll()
            waiting.register(pipe, select.POLLIN)
            if not waiting.poll(max(0.0, end - time.monotonic()) * 1000):
                raise RuntimeError(f"rank {peer} has not come within {self._deadline:g} s")
            if not os.read(pipe, 1):
                raise RuntimeError(f"rank {peer} has left")

    def close(self) -> None:
        self._buckets = []
        for one in self._open:
            os.close(one)
        self._open = []


def _identity(opened: int | str) -> int:
    found = os.stat(opened)
    return hash((found.st_dev, found.st_ino))
