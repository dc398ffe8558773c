"""Execution of a plan by one rank: it gathers its slices from the other ranks through two bounded
buckets.

    round k      pack ─▶ ║ exchange ║ ─▶ unpack          bucket k mod 2
    round k + 1          pack ─▶ ║ exchange ║ ─▶ unpack  bucket (k + 1) mod 2

Only the slices of the plan are sent, in shared memory or by all-to-alls
(stages/resharding/exchange.py). At the end the receivers compare the checksums that the senders
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import xxhash

from stages.resharding.exchange import Exchange, connect, part_index, part_of, temporary_bytes
from stages.resharding.plan import ReshardPlan

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GatherError(RuntimeError):
    """Slices did not arrive, or arrived damaged.

    The message names the rank, the round and the reason. The targets must not be used.
    """


class Gather:
    """The part of ``rank`` in ``plan``.

    It can be executed repeatedly, on every rank of ``group`` at the same time.

    ``deadline``: seconds for a round. ``watch`` is called after each round. Raises ValueError for a
    group that is not as large as the plan.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        *,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        deadline: float = 600.0,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        # one rank alone needs no group
        size = dist.get_world_size(group) if dist.is_initialized() else 1
        if size != plan.world:
            raise ValueError(
                f"group: has {size} ranks, the plan {plan.world}; give the group that the plan was "
                f"made for"
            )
        self.rank = rank
        self.world = plan.world
        self.device = device
        self.group = group
        self._deadline = deadline
        self._watch = watch
        self._parts = [part_of(rank, round_slices, plan.world) for round_slices in plan.rounds]
        self._local = [
            (s.target, part_index(s.target_at, s.sizes), s.source, part_index(s.source_at, s.sizes))
            for s in plan.local(rank)
        ]
        self._temporary = temporary_bytes(self._parts)  # asked for after each round
        self._exchange: Exchange | None = None
        self.exchange = "none"
        """How the last call's messages went: ``shared memory``, the group's backend, or ``none`` if
        there were none."""

    def __call__(
        self, sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> None:
        """Fill ``targets`` from the ``sources`` of all ranks: tensors by the names of the plan's
        target and source. Raises :class:`GatherError` on all ranks when a message is damaged, and
        on those that notice it when a rank does not answer.
        """
        for target, into, source, part in self._local:
            targets[target][into].copy_(sources[source][part])
        if not self._parts:  # on no rank
            return
        sent = torch.zeros(len(self._parts), self.world, dtype=torch.int64, device=self.device)
        received = torch.zeros_like(sent)
        with self._reported(0):
            self._exchange = connect(
                self._parts,
                self.rank,
                device=self.device,
                group=self.group,
                deadline=self._deadline,
            )
        self.exchange = self._exchange.name
        try:
            for number in range(len(self._parts)):
                self._send(self._exchange, number, sources, sent)
                if number:
                    self._land(self._exchange, number - 1, targets, received)
            self._land(self._exchange, len(self._parts) - 1, targets, received)
        finally:
            self._exchange.close()
            self._exchange = None
        self._compare(sent, received)

    def temporary_bytes(self) -> int:
        """Return the number of bytes of the allocated buckets. Shared memory counts for its sender
        and its receiver."""
        return self._temporary if self._exchange else 0

    def _send(
        self,
        exchange: Exchange,
        number: int,
        sources: Mapping[str, torch.Tensor],
        sent: torch.Tensor,
    ) -> None:
        part = self._parts[number]
        with self._reported(number):
            room = exchange.room(number)
        for source, index, place, sizes in part.packed:
            room[place].view(sizes).copy_(sources[source][index])
        sent[number] = _checksums(room.split(part.sends))
        with self._reported(number):
            exchange.start(number)

    def _land(
        self,
        exchange: Exchange,
        number: int,
        targets: Mapping[str, torch.Tensor],
        found: torch.Tensor,
    ) -> None:
        with self._reported(number):
            messages = exchange.messages(number)
        found[number] = _checksums(messages)
        for sender, (target, index, place, sizes) in self._parts[number].unpacked:
            targets[target][index].copy_(messages[sender][place].view(sizes))
        self._watch()

    def _compare(self, sent: torch.Tensor, found: torch.Tensor) -> None:
        """Raise when a message was damaged.

        Checksums: ``sent`` [rounds, receivers], ``found`` [rounds, senders].
        """
        with self._reported(len(self._parts)):
            sent_sums = sent.t().contiguous()
            expected_sums = torch.empty_like(sent_sums)
            dist.all_to_all_single(expected_sums, sent_sums, group=self.group)
            damaged = (expected_sums.t() != found).nonzero()
            count = torch.tensor([len(damaged)], device=self.device)
            dist.all_reduce(count, group=self.group)  # what one rank cannot use, none uses
        if total := int(count):
            here = "; ".join(
                f"from rank {sender} in round {number}" for number, sender in damaged[:3].tolist()
            )
            raise GatherError(
                f"rank {self.rank}: {total} messages are not what was sent, here {here or 'none'}"
            )

    @contextmanager
    def _reported(self, number: int) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            rounds = len(self._parts)
            what = (
                (f"round {number} of {rounds}")
                if number < rounds
                else "the comparison of checksums"
            )
            raise GatherError(
                f"rank {self.rank}: {what} did not come about ({error}); restart the ranks that "
                f"are gone and make a new "
                "group"
            ) from error


def _checksums(messages: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the checksums int64 [peers] of ``messages``, on the device.

    On a CPU xxh3; elsewhere the sum of the bits as integers, which every single wrong element
    changes and which needs no copy to the host.
    """
    messages = [message.view(_BITS[message.element_size()]) for message in messages]
    if messages[0].device.type == "cpu":
        digests = [xxhash.xxh3_64_intdigest(message.numpy().data) - 2**63 for message in messages]
        return torch.tensor(digests, dtype=torch.int64)
    return torch.stack([message.sum(dtype=torch.int64) for message in messages])
