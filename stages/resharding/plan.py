"""The plan from one layout to another: the slices that each rank gets from other ranks, and the
memory that it takes.

    Placement (train) ─┐               ┌─ slices that a rank has itself: copied locally
                       ├─ plan_reshard ┤
    Placement (rollout)┘               └─ slices from others: split ─▶ rounds, each within one bucket per rank

    memory of a rank   training weights │██████████████████│░░░░░░░░░░░░░░░░░│██████████
                       grads, optimizer │████│░░░░░░░░░░░░░│░░░░░░░░░░░░░░░░░│██████████   ░ in host memory
                       rollout weights  │    │█████████████│█████████████████│
                       buckets          │    │██           │                 │
                                    train  gather          generate     prefetch

Arithmetic on placements only: it needs no process and no device, and gives all bytes that a swap
moves and allocates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import prod

import torch

from stages.parallel.placement import Box, Piece, Placement, intersect, subtract

BUCKET_BYTES = 4 * 2**20  # gloo is as fast with these as with larger ones
_CRUMB = 64  # the rest of a bucket is left empty when it is less than bucket_bytes / _CRUMB


class PlanError(ValueError):
    """The two placements do not have the same parameters. The message names what is missing."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of ``parameter`` to be sent: ``sizes`` elements at ``source_at`` of the sender's local
    tensor ``source`` become those at ``target_at`` of the receiver's ``target``, in the target's
    ``dtype``."""

    parameter: str
    sender: int
    receiver: int
    sizes: tuple[int, ...]
    source: str
    source_at: tuple[int, ...]
    target: str
    target_at: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize


Round = tuple[Slice, ...]


@dataclass(frozen=True)
class ReshardPlan:
    """The plan of a reshard. ``slices``: everything that has to arrive, once. ``rounds``: the
    slices that travel between ranks, split so that in each round no rank sends and receives more
    than ``bucket_bytes`` together. A round has one dtype."""

    source: Placement
    target: Placement
    slices: tuple[Slice, ...]
    rounds: tuple[Round, ...]
    bucket_bytes: int

    @property
    def world(self) -> int:
        return max(self.source.world, self.target.world)

    def local(self, rank: int) -> Iterator[Slice]:
        """Return the slices that ``rank`` copies from its own tensors."""
        return (s for s in self.slices if s.sender == s.receiver == rank)

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """Bytes that each rank sends to others."""
        return self._sums((s.sender, s.nbytes) for s in self.slices if s.sender != s.receiver)

    @cached_property
    def received(self) -> tuple[int, ...]:
        """Bytes that each rank receives from others."""
        return self._sums((s.receiver, s.nbytes) for s in self.slices if s.sender != s.receiver)

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """Bytes that each rank copies from its own tensors."""
        return self._sums((s.receiver, s.nbytes) for s in self.slices if s.sender == s.receiver)

    @cached_property
    def temporary(self) -> tuple[int, ...]:
        """The largest temporary buffers of each rank in bytes: its two largest consecutive rounds,
        which are in flight together."""
        # as many bytes as the fullest of every second round
        buffers = [[0] * self.world, [0] * self.world]
        for number, slices in enumerate(self.rounds):
            load = self._sums((rank, s.nbytes) for s in slices for rank in (s.sender, s.receiver))
            buffers[number % 2] = list(map(max, buffers[number % 2], load))
        return tuple(map(sum, zip(*buffers, strict=True)))

    def _sums(self, items: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        sums = [0] * self.world
        for rank, nbytes in items:
            sums[rank] += nbytes
        return tuple(sums)


def plan_reshard(
    source: Placement,
    target: Placement,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    ranks_per_node: int | None = None,
) -> ReshardPlan:
    """Return the plan that fills ``target`` from ``source``.

    A rank first uses its own slices, then those of a rank of its node (``ranks_per_node``
    neighbours; None: one node), then any; among equals the sender with the fewest bytes so far.

    Raises :class:`PlanError` when the source lacks something, and for a bucket smaller than an
    element.
    """
    widest = max((t.dtype.itemsize for rank in target.ranks for t in rank), default=1)
    if bucket_bytes < 2 * widest:
        raise PlanError(
            f"bucket_bytes: {bucket_bytes} cannot hold an element of {widest} bytes; "
            f"use 1 MiB or more"
        )
    node = ranks_per_node or max(source.world, target.world)
    slices = tuple(_slices(source, target, node))
    crossing = [s for s in slices if s.sender != s.receiver]
    return ReshardPlan(source, target, slices, tuple(_rounds(crossing, bucket_bytes)), bucket_bytes)


# --- senders
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """A piece in a rank's tensor."""

    tensor: str
    piece: Piece
    dtype: torch.dtype


def _places(placement: Placement) -> dict[str, dict[int, list[_Place]]]:
    """Return the places by parameter and rank."""
    places: dict[str, dict[int, list[_Place]]] = defaultdict(dict)
    for rank, tensors in enumerate(placement.ranks):
        for tensor in tensors:
            for piece in tensor.pieces:
                places[piece.parameter].setdefault(rank, []).append(
                    _Place(tensor.name, piece, tensor.dtype)
                )
    return places


def _slices(source: Placement, target: Placement, node: int) -> Iterator[Slice]:
    sources = _places(source)
    targets = _places(target)
    sent: dict[int, int] = defaultdict(int)
    for parameter, wanted in targets.items():
        if parameter not in sources:
            raise PlanError(
                f"parameter {parameter!r}: the source layout has none of it; both must "
                f"be of one model"
            )
        have = sources[parameter]
        boxes: dict[Box, list[tuple[int, _Place]]] = defaultdict(list)
        for rank, places in have.items():
            for place in places:
                boxes[place.piece.box].append((rank, place))
        for receiver, places in wanted.items():
            for place in places:
                yield from _cover(
                    parameter, receiver, place, have.get(receiver, ()), boxes, node, sent
                )


def _cover(
    parameter: str,
    receiver: int,
    place: _Place,
    own: Iterable[_Place],
    boxes: dict[Box, list[tuple[int, _Place]]],
    node: int,
    sent: dict[int, int],
) -> Iterator[Slice]:
    """Yield the slices that exactly cover the box of ``place``."""

    def distance(holder: tuple[int, _Place]) -> tuple[bool, int, int]:
        return holder[0] // node != receiver // node, sent[holder[0]], holder[0]

    missing = [place.piece.box]

    def take(sender: int, held: _Place) -> Iterator[Slice]:
        """Yield the slices that ``sender`` has of what is missing."""
        for box in missing[:]:
            if (common := intersect(box, held.piece.box)) is None:
                continue
            at = missing.index(box)
            missing[at : at + 1] = subtract(box, common)
            sizes = tuple(end - start for start, end in common)
            source_at = _offset(common, held.piece)
            target_at = _offset(common, place.piece)
            yield Slice(
                parameter,
                sender,
                receiver,
                sizes,
                held.tensor,
                source_at,
                place.tensor,
                target_at,
                place.dtype,
            )

    for held in own:
        yield from take(receiver, held)
    if not missing:
        return
    offers = [
        min(holders, key=distance)
        for box, holders in boxes.items()
        if intersect(box, place.piece.box)
    ]
    for sender, theirs in sorted(offers, key=distance):
        for s in take(sender, theirs):
            sent[sender] += s.nbytes
            yield s
    if missing:
        raise PlanError(
            f"parameter {parameter!r}: no rank of the source layout has {missing[0]}; both must be "
            f"of one model"
        )


def _offset(box: Box, piece: Piece) -> tuple[int, ...]:
    """Return the offset of ``box``, a part of the piece's box, in the piece's local tensor."""
    return tuple(
        at + start - first
        for (start, _), (first, _), at in zip(box, piece.box, piece.at, strict=True)
    )


# --- rounds
# --------------------------------------------------------------------------------------------------


def _rounds(slices: Sequence[Slice], bucket_bytes: int) -> Iterator[Round]:
    """Build rounds in which the pairs of ranks with the most bytes left come first.

    A slice is split where the room ends. A pair first gets half a bucket, so that an odd number of
    ranks leaves none without a partner, and then the rest.
    """
    for dtype in dict.fromkeys(s.dtype for s in slices):
        waiting: dict[tuple[int, int], list[Slice]] = defaultdict(list)
        waiting_bytes: dict[int, int] = defaultdict(int)  # bytes before each rank
        for s in reversed(slices):
            if s.dtype == dtype:
                waiting[s.sender, s.receiver].append(s)
                waiting_bytes[s.sender] += s.nbytes
                waiting_bytes[s.receiver] += s.nbytes
        while waiting:
            pairs = sorted(
                waiting,
                key=lambda pair: (-max(waiting_bytes[pair[0]], waiting_bytes[pair[1]]), pair),
            )
            room = dict.fromkeys(waiting_bytes, bucket_bytes)
            round_slices: list[Slice] = []
            for share in (bucket_bytes // 2, bucket_bytes):
                for pair in pairs:
                    for s in _taken(
                        waiting[pair],
                        min(share, room[pair[0]], room[pair[1]]),
                        bucket_bytes // _CRUMB,
                    ):
                        round_slices.append(s)
                        for rank in pair:
                            room[rank] -= s.nbytes
                            waiting_bytes[rank] -= s.nbytes
            waiting = {pair: queue for pair, queue in waiting.items() if queue}
            yield tuple(round_slices)


def _taken(queue: list[Slice], room: int, crumb: int) -> Iterator[Slice]:
    """Take slices off the end of ``queue`` while they fit into ``room`` bytes; the rest of a split
    slice is put back."""
    while queue and room and room >= crumb:
        head, rest = _fit(queue.pop(), room)
        queue += reversed(rest)
        if head is None:
            return
        room -= head.nbytes
        yield head


def _fit(part: Slice, room: int) -> tuple[Slice | None, list[Slice]]:
    """Return the first part of ``part`` that fits into ``room`` bytes, if any, and the rest of it,
    in order."""
    if part.nbytes <= room:
        return part, []
    for dim, size in enumerate(part.sizes):
        row = part.nbytes // prod(part.sizes[: dim + 1])
        if prod(part.sizes[:dim]) == 1 and size > 1:
            if row <= room:
                return _along(part, dim, 0, room // row), [_along(part, dim, room // row, size)]
            head, rest = _fit(_along(part, dim, 0, 1), room)
            return head, [*rest, _along(part, dim, 1, size)]
    return None, [part]


def _along(part: Slice, dim: int, start: int, end: int) -> Slice:
    def moved(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    return replace(
        part,
        sizes=moved(part.sizes, end - start),
        source_at=moved(part.source_at, part.source_at[dim] + start),
        target_at=moved(part.target_at, part.target_at[dim] + start),
    )


# --- memory
# --------------------------------------------------------------------------------------------------


class Phase(StrEnum):
    """The phases of a swap, in order."""

    TRAIN = "train"
    OFFLOAD_STATE = "offload state"
    GATHER = "gather"
    OFFLOAD_WEIGHTS = "offload weights"
    GENERATE = "generate"
    PREFETCH = "prefetch"


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes of one phase, each by rank.

    ``live``: device memory at most; ``after``: at its end; ``temporary``: of ``live``, buckets;
    ``received``: from other ranks; ``host``: between device and host.
    """

    phase: Phase
    live: tuple[int, ...]
    after: tuple[int, ...]
    temporary: tuple[int, ...]
    received: tuple[int, ...]
    host: tuple[int, ...]


def adamw_bytes(placement: Placement, *, gradients: bool = True) -> tuple[int, ...]:
    """Return the bytes of gradients and of AdamW's two moments by rank, all in the weights' dtype.

    Without ``gradients``: between two steps of an engine that frees them.
    """
    return tuple((2 + gradients) * placement.nbytes(rank) for rank in range(placement.world))


def memory(plan: ReshardPlan, state_bytes: Sequence[int]) -> tuple[PhaseMemory, ...]:
    """Return the device memory of every rank in every phase of an allgather-swap.

    ``state_bytes``: gradients and optimizer state, by rank (:func:`adamw_bytes`, or counted).
    """
    ranks = range(plan.world)
    nothing = tuple(0 for _ in ranks)
    weights = tuple(plan.source.nbytes(rank) for rank in ranks)
    state = tuple(state_bytes[rank] if rank < len(state_bytes) else 0 for rank in ranks)
    rollout = tuple(plan.target.nbytes(rank) for rank in ranks)
    training = _add(weights, state)
    both = _add(weights, rollout)
    return (
        PhaseMemory(Phase.TRAIN, training, training, nothing, nothing, nothing),
        PhaseMemory(Phase.OFFLOAD_STATE, training, weights, nothing, nothing, state),
        PhaseMemory(
            Phase.GATHER, _add(both, plan.temporary), both, plan.temporary, plan.received, nothing
        ),
        PhaseMemory(Phase.OFFLOAD_WEIGHTS, both, rollout, nothing, nothing, weights),
        PhaseMemory(Phase.GENERATE, rollout, rollout, nothing, nothing, nothing),
        # Rollout weights are let go before the first training byte comes back.
        PhaseMemory(
            Phase.PREFETCH, tuple(map(max, rollout, training)), training, nothing, nothing, training
        ),
    )


def _add(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def redundant_if_naive(plan: ReshardPlan) -> tuple[int, ...]:
    """Return the bytes of training weights that the naive way (gather, slice, keep both) leaves on
    each rank beside the rollout weights. A rollout tensor that is a contiguous part of one training
    tensor of its rank can be a view of it, so those bytes are not redundant."""
    redundant = [plan.source.nbytes(rank) for rank in range(plan.world)]
    arriving: dict[tuple[int, str], list[Slice]] = defaultdict(list)
    for s in plan.slices:
        arriving[s.receiver, s.target].append(s)
    have = {(rank, t.name): t for rank, tensors in enumerate(plan.source.ranks) for t in tensors}
    for rank, tensors in enumerate(plan.target.ranks):
        # two views of the same bytes save them once
        viewed: set[tuple[str, tuple[int, ...]]] = set()
        for tensor in tensors:
            places = {
                (
                    s.sender,
                    s.source,
                    tuple(a - b for a, b in zip(s.source_at, s.target_at, strict=True)),
                )
                for s in arriving[rank, tensor.name]
            }
            if len(places) == 1:
                ((sender, name, at),) = places
                if (
                    sender == rank
                    and have[rank, name].dtype == tensor.dtype
                    and (name, at) not in viewed
                ):
                    redundant[rank] -= tensor.nbytes
                    viewed.add((name, at))
    return tuple(redundant)
