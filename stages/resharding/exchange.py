"""Exchange of messages between ranks in rounds: through shared memory on one node, else by
collectives of the group.

    SharedExchange   pack ─▶ a bucket that all ranks have mapped ─▶ meet (a byte to each rank) ─▶ unpack from the others
    GroupExchange    pack ─▶ a bucket ─▶ all-to-all (gloo, nccl, hccl) ─▶ a bucket ─▶ unpack

Both have two buckets. Round k uses number k mod 2, so a rank packs one while the other is in
flight. Shared buckets are memory files without a name, and pipes; the other ranks open them below
``/proc/PID/fd``, which the kernel permits to the same user. So a killed rank leaves nothing behind,
and the end of a rank is noticed at once.

Rounds are made in order, the same on every rank: fill ``room(k)``, ``start(k)``, then ``messages(k
- 1)``, which are valid until the next ``room``. These raise RuntimeError or OSError when a rank has
  ended or is late.

Ranks meet by writing a byte into a pipe. gloo's smallest collective would wake a second thread of
each rank.
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
from typing import Any
from uuid import UUID

import torch
import torch.distributed as dist

from pipeline.data.arena import shared_memory_directory
from stages.resharding.plan import Round

# of a tensor's part, to or from a place in flat values
Move = tuple[str, tuple[slice, ...], slice, tuple[int, ...]]


@dataclass(frozen=True)
class Part:
    """A rank's part in one round.

    ``sends`` and ``receives``: elements of ``dtype`` by peer. ``begins``: where the message for
    this rank begins in each peer's bucket; messages are ordered by receiver. ``packed``: parts of
    source tensors with their place in this rank's bucket. ``unpacked``: parts of target tensors
    with their sender and place in its message.
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
    """Return the part of ``rank`` in the round ``slices``."""
    sends = [0] * world
    receives = [0] * world
    begins = [0] * world
    packed = []
    unpacked = []
    at = 0
    for s in sorted((s for s in slices if s.sender == rank), key=lambda s: s.receiver):
        count = prod(s.sizes)
        packed.append((s.source, part_index(s.source_at, s.sizes), slice(at, at + count), s.sizes))
        sends[s.receiver] += count
        at += count
    for s in slices:
        count = prod(s.sizes)
        at = receives[s.sender]
        if s.receiver == rank:
            move = (s.target, part_index(s.target_at, s.sizes), slice(at, at + count), s.sizes)
            unpacked.append((s.sender, move))
            receives[s.sender] += count
        elif s.receiver < rank:
            begins[s.sender] += count
    return Part(slices[0].dtype, sends, receives, begins, tuple(packed), tuple(unpacked))


def part_index(at: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the index of the ``sizes`` elements at ``at`` of a tensor."""
    return tuple(slice(start, start + size) for start, size in zip(at, sizes, strict=True))


def temporary_bytes(parts: Sequence[Part]) -> int:
    """Return the number of bytes of the buckets of an exchange; what lies in shared memory counts
    for its sender and its receiver."""
    return sum(max((part.nbytes for part in parts[lane::2]), default=0) for lane in (0, 1))


def connect(
    parts: Sequence[Part],
    rank: int,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None,
    deadline: float,
) -> Exchange:
    """Return the exchange that all ranks of ``group`` use: shared memory when the tensors are on
    the CPU and every rank can open that of all others, else the group. ``deadline``: seconds for a
    round, and for this call."""
    if device.type != "cpu":
        return GroupExchange(parts, device, group, deadline)
    world = dist.get_world_size(group)
    shared = None
    announced = [0] * (6 + 2 * world)
    with ExitStack() as undo:
        with suppress(OSError):  # the others hear zeros then
            shared = SharedExchange(parts, rank, world, deadline)
            undo.callback(shared.close)
            announced = shared.announced
        announcements = torch.zeros(world, len(announced), dtype=torch.int64)
        _wait(
            dist.all_gather([*announcements], torch.tensor(announced), group=group, async_op=True),
            deadline,
        )
        reached = torch.tensor([int(shared is not None and shared.reach(announcements.tolist()))])
        _wait(dist.all_reduce(reached, dist.ReduceOp.MIN, group=group, async_op=True), deadline)
        if shared is not None and reached:
            shared.reached()
            undo.pop_all()
            return shared
    return GroupExchange(parts, device, group, deadline)


def _wait(work: Any, deadline: float) -> None:
    work.wait(timedelta(seconds=deadline))


class GroupExchange:
    """All-to-alls of the group.

    On gloo they are as fast as batches of sends and receives at 4 MiB, and faster below.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        device: torch.device,
        group: dist.ProcessGroup | None,
        deadline: float,
    ) -> None:
        self.name: str = dist.get_backend(group)
        self._parts = parts
        self._group = group
        self._deadline = deadline
        sizes = [max((part.nbytes for part in parts[lane::2]), default=0) for lane in (0, 1)]
        self._buckets = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        self._flying: list[Any] = [None, None]

    def _values(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sent and the received values, flat."""
        part = self._parts[number]
        values = self._buckets[number % 2][: part.nbytes].view(part.dtype)
        sent, received = values.split([sum(part.sends), sum(part.receives)])
        return sent, received

    def room(self, number: int) -> torch.Tensor:
        """Return the buffer for what this rank sends in the round. Waits until no rank reads it."""
        return self._values(number)[0]

    def start(self, number: int) -> None:
        """Send the filled buffer."""
        part, (sent, received) = self._parts[number], self._values(number)
        self._flying[number % 2] = dist.all_to_all_single(
            received, sent, part.receives, part.sends, group=self._group, async_op=True
        )

    def messages(self, number: int) -> Sequence[torch.Tensor]:
        """Return the messages of the round by sender. Waits for them."""
        _wait(self._flying[number % 2], self._deadline)
        return self._values(number)[1].split(self._parts[number].receives)

    def close(self) -> None:
        self._buckets = []


class SharedExchange:
    """Buckets in shared memory, for ranks of one user on one node.

    Raises OSError when the node has too little shared memory or is not Linux.

    All ranks meet before each round but the first, and before the last one is unpacked. A rank that
    has arrived has packed the previous round and unpacked the one before it, so that round's bucket
    can be packed again.
    """

    name = "shared memory"

    def __init__(self, parts: Sequence[Part], rank: int, world: int, deadline: float) -> None:
        self._parts = parts
        self._rank = rank
        self._deadline = deadline
        lanes = [max((part.sent_bytes for part in parts[lane::2]), default=0) for lane in (0, 1)]
        second = -(-lanes[0] // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = second + max(lanes[1], 1)
        self._open: list[int] = []
        self._incoming: list[int] = []  # pipes by rank; a rank meets itself too
        self._outgoing: list[int] = []
        self._buckets: list[list[torch.Tensor]] = []  # by rank
        try:
            node = UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).int >> 65
            memory = os.open(shared_memory_directory(), os.O_TMPFILE | os.O_RDWR, 0o600)
            self._open.append(memory)
            # a full directory is an error here and not a signal later
            os.posix_fallocate(memory, 0, nbytes)
            pipes = []
            for _ in range(world):
                incoming, outgoing = os.pipe()
                self._open += [incoming, outgoing]
                self._incoming.append(incoming)
                pipes += [outgoing, _identity(outgoing)]
            self.announced = [node, os.getpid(), memory, _identity(memory), second, nbytes, *pipes]
            """What the others must know to reach all this."""
        except BaseException:
            self.close()
            raise

    def reach(self, announcements: Sequence[Sequence[int]]) -> bool:
        """Map the buckets of all ranks and open their pipes.

        Returns False when one cannot be opened.
        """
        try:
            for node, pid, memory, identity, second, nbytes, *pipes in announcements:
                if node != self.announced[0]:
                    return False
                descriptor = self._opened(pid, memory, identity, os.O_RDWR)
                mapped = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
                self._buckets.append([mapped[:second], mapped[second:]])
                outgoing, identity = pipes[2 * self._rank : 2 * self._rank + 2]
                self._outgoing.append(self._opened(pid, outgoing, identity, os.O_WRONLY))
        except OSError:
            return False
        return True

    def _opened(self, pid: int, number: int, identity: int, flags: int) -> int:
        path = f"/proc/{pid}/fd/{number}"
        if _identity(path) != identity:  # of a process that has this number in another container
            raise OSError(f"process {pid} is not the rank that announced of it")
        self._open.append(os.open(path, flags))
        return self._open[-1]

    def reached(self) -> None:
        """Close all descriptors but the pipes, when all ranks have opened everything.

        From then on the end of a rank closes its pipes.
        """
        for descriptor in {*self._open}.difference(self._incoming, self._outgoing):
            os.close(descriptor)
        self._open = [*self._incoming, *self._outgoing]

    def room(self, number: int) -> torch.Tensor:
        if number:
            self._meet()
        part = self._parts[number]
        return self._buckets[self._rank][number % 2][: part.sent_bytes].view(part.dtype)

    def start(self, number: int) -> None:
        """Do nothing: the other ranks see the buffer when all ranks meet."""

    def messages(self, number: int) -> Sequence[torch.Tensor]:
        if number == len(self._parts) - 1:
            self._meet()
        part = self._parts[number]
        messages = []
        for buckets, begin, size in zip(self._buckets, part.begins, part.receives, strict=True):
            first = begin * part.dtype.itemsize
            nbytes = size * part.dtype.itemsize
            messages.append(buckets[number % 2][first : first + nbytes].view(part.dtype))
        return messages

    def _meet(self) -> None:
        end = time.monotonic() + self._deadline
        for pipe in self._outgoing:
            os.write(pipe, b".")
        for peer, pipe in enumerate(self._incoming):
            waiting = select.poll()
            waiting.register(pipe, select.POLLIN)
            if not waiting.poll(max(0.0, end - time.monotonic()) * 1000):
                raise RuntimeError(f"rank {peer} has not come within {self._deadline:g} s")
            if not os.read(pipe, 1):
                raise RuntimeError(f"rank {peer} has left")

    def close(self) -> None:
        self._buckets = []
        for descriptor in self._open:
            os.close(descriptor)
        self._open = []


Exchange = GroupExchange | SharedExchange


def _identity(opened: int | str) -> int:
    status = os.stat(opened)
    return hash((status.st_dev, status.st_ino))
