"""Allgather-swap: training and generation take turns on the same devices, and neither leaves a byte of weights there.

    TRAINING ── to_rollout() ──▶ GENERATING ── prefetch() ──▶ RETURNING ── ready() ──▶ TRAINING
        │                            ▲
        │ 1. gradients and optimizer state ─▶ host arena      3. training weights ─▶ host arena
        └ 2. two buckets in turn:  pack slices ─▶ all-to-all ─▶ unpack into the rollout's tensors

``prefetch`` returns at once; the bytes come back on a thread (CPU) or a side stream (accelerator) beside the inference
stages, and ``ready`` waits for what is left of them. A tensor keeps its identity throughout: its storage is resized to 0
and back, so modules, optimizers and DTensors that hold it need not know.

Only the slices of the plan cross between ranks, in all-to-alls of one bucket each (measured on gloo: as fast as batches
of sends and receives at 4 MiB and faster below). Each message's checksum is compared when all have arrived. Whatever fails
on the way to generation, the training state is brought back before the error is raised.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from stages import device as devices
from stages.resharding.layout import LocalTensor
from stages.resharding.plan import Phase, ReshardPlan, Round, Slice

_ALIGN = 512  # of a storage in the arena: what copy engines and caches like
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Watch = Callable[[Phase], None]


class SwapError(RuntimeError):
    """A swap did not come about: the message names the rank, the round and the reason. The training state is whole."""


class State(Enum):
    TRAINING = "training"
    GENERATING = "generating"
    RETURNING = "returning"


# --- what a rank has -------------------------------------------------------------------------------------------------


def local_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of ``model`` by name as this rank holds them, tied ones once: DTensors' local tensors, or all."""
    return {name: _local(parameter.detach()) for name, parameter in model.named_parameters()}


def training_state(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """This rank's gradients and optimizer state, local tensors."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield _local(parameter.grad)
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    yield _local(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def live_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of ``tensors``, shared ones once; a storage that was resized to 0 has none."""
    return sum(storage.nbytes() for storage in _storages(tensors))


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, storage)
    return list(found.values())


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """uint8 [n]: all of ``storage``."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# --- host memory -----------------------------------------------------------------------------------------------------


class Arena:
    """Host memory that the storages of a rank go to and come back from: one allocation, reused, and grown when more is
    to go there. Page-locked where copies are faster that way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._away: list[tuple[torch.UntypedStorage, int, int]] = []  # storage, offset, bytes

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    @property
    def empty(self) -> bool:
        return not self._away

    def reserve(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Room for ``storages``, of which none has been stored yet. Raises ValueError for one that cannot be resized."""
        if not all(storage.resizable() for storage in storages):
            raise ValueError(
                "weights, state: a storage cannot be resized, because numpy or another process shares it; train on a clone"
            )
        needed = sum(_padded(storage.nbytes()) for storage in storages)
        if needed > self.nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one first, so that both are never there
            self._memory = devices.host_empty(needed, self.device)

    def store(self, storages: Iterable[torch.UntypedStorage]) -> int:
        """Copy ``storages`` here, then free them on their device. Returns their bytes."""
        stored = []
        for storage in storages:
            if nbytes := storage.nbytes():
                self._memory[self._used : self._used + nbytes].copy_(_bytes(storage), non_blocking=True)
                stored.append((storage, self._used, nbytes))
                self._used += _padded(nbytes)
        devices.synchronize(self.device)
        self._away += stored  # before anything is freed
        for storage, _, _ in stored:
            storage.resize_(0)
        return sum(nbytes for _, _, nbytes in stored)

    def restore(self, stream: Any = None) -> None:
        """Bring all that is here back to where it was; on an accelerator the copies run on ``stream`` and are not waited
        for, and the storages are allocated on the current one, which is where they are used and freed."""
        for storage, _, nbytes in self._away:
            storage.resize_(nbytes)
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream or nullcontext():
            for storage, offset, nbytes in self._away:
                _bytes(storage).copy_(self._memory[offset : offset + nbytes], non_blocking=True)
        self._away, self._used = [], 0


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


# --- between ranks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Exchange:
    """A rank's part in one round. In its bucket, seen as ``dtype``, lie what it sends, by receiver, and then what it
    receives, by sender; each with the slice and where it begins. ``sends`` and ``receives`` are elements by peer."""

    dtype: torch.dtype
    sends: list[int]
    receives: list[int]
    packed: tuple[tuple[Slice, int], ...]
    unpacked: tuple[tuple[Slice, int], ...]

    @property
    def nbytes(self) -> int:
        return (sum(self.sends) + sum(self.receives)) * self.dtype.itemsize


def _exchange(slices: Round, rank: int, world: int) -> _Exchange:
    out = sorted((s for s in slices if s.sender == rank), key=lambda s: s.receiver)
    into = sorted((s for s in slices if s.receiver == rank), key=lambda s: s.sender)
    sends, receives, places, at = [0] * world, [0] * world, [], 0
    for s in (*out, *into):
        places.append((s, at))
        at += prod(s.sizes)
    for s in out:
        sends[s.receiver] += prod(s.sizes)
    for s in into:
        receives[s.sender] += prod(s.sizes)
    return _Exchange(slices[0].dtype, sends, receives, tuple(places[: len(out)]), tuple(places[len(out) :]))


def _part(tensor: torch.Tensor, at: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(at, sizes, strict=True))]


def _checksums(values: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """int64 [peers] on the device of ``values``, of its messages one after the other: xxh3 on a CPU; elsewhere the sum of
    the bits as integers, which no single wrong element leaves unchanged and which waits for no copy to the host."""
    messages = values.view(_BITS[values.element_size()]).split(sizes)
    if values.device.type == "cpu":
        digests = [xxhash.xxh3_64_intdigest(message.numpy().data) - 2**63 for message in messages]
        return torch.tensor(digests, dtype=torch.int64)
    return torch.stack([message.sum(dtype=torch.int64) for message in messages])


class Swap:
    """One rank's swaps between the training tensors ``weights`` (by name, as ``plan.source`` has them for ``rank``) and
    the rollout's, which it makes: ``rollout``, by the names of ``plan.target``, filled only while GENERATING.

    ``state`` gives the gradients and optimizer state of the moment (:func:`training_state`). ``device`` is where all of it
    lives; what ``state`` has elsewhere stays there. ``group`` has ``plan.world`` ranks, this one the ``rank``-th.
    ``deadline``: seconds that a round may take. ``watch`` is called at the end of each phase and after each round.
    Methods are called from one thread, and on every rank of the group alike.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        weights: Mapping[str, torch.Tensor],
        state: Callable[[], Iterable[torch.Tensor]],
        *,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        deadline: float = 600.0,
        watch: Watch | None = None,
    ) -> None:
        tensors = plan.source.ranks[rank] if rank < plan.source.world else ()
        _check_weights(tensors, weights, rank)
        if (size := dist.get_world_size(group)) != plan.world:
            raise ValueError(
                f"group: has {size} ranks, the plan {plan.world}; give the group that the plan was made for"
            )
        self.plan, self.rank, self.device, self.group = plan, rank, device, group
        self._weights, self._training_state = dict(weights), state
        self._deadline, self._watch = deadline, watch or (lambda phase: None)
        self._exchanges = [_exchange(one, rank, plan.world) for one in plan.rounds]
        self._local = tuple(plan.local(rank))
        self._buckets: list[torch.Tensor] = []
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._stream = devices.stream(device)
        self.arena = Arena(device)
        self.state = State.TRAINING
        self.seconds: dict[Phase, float] = {}
        """What each phase of the last swap took; PREFETCH the copies themselves, beside whatever else ran (on an
        accelerator: their submission)."""
        self.waited = 0.0
        """Seconds that the last ``ready`` waited."""
        self.rollout: dict[str, torch.Tensor] = {}
        for tensor in plan.target.ranks[rank] if rank < plan.target.world else ():
            self.rollout[tensor.name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        self._release_rollout()

    def to_rollout(self) -> Mapping[str, torch.Tensor]:
        """Fill the rollout's tensors, and move all that trains to host memory. Returns ``rollout``. Raises
        :class:`SwapError`, with everything as it was, when a rank does not answer or a checksum is wrong."""
        self._expect(State.TRAINING, "to_rollout")
        weights = _storages(self._weights.values())
        mine = {storage._cdata for storage in weights}
        state = [
            s for s in _storages(self._training_state()) if s._cdata not in mine and s.device.type == self.device.type
        ]
        self.arena.reserve([*state, *weights])
        self.seconds = {}
        try:
            with self._phase(Phase.OFFLOAD_STATE):
                self.arena.store(state)
            with self._phase(Phase.GATHER):
                for tensor in self.rollout.values():
                    tensor.untyped_storage().resize_(prod(tensor.shape) * tensor.element_size())
                self._gather()
            with self._phase(Phase.OFFLOAD_WEIGHTS):
                self.arena.store(weights)
        except BaseException:
            self._buckets = []
            self._release_rollout()
            self.arena.restore()
            devices.synchronize(self.device)
            raise
        devices.release_cached(self.device)
        self.state = State.GENERATING
        return self.rollout

    def prefetch(self) -> None:
        """Let the rollout's weights go and start to bring the training state back; returns at once."""
        self._expect(State.GENERATING, "prefetch")
        devices.synchronize(self.device)  # generation may have used other streams
        self._release_rollout()
        self.state = State.RETURNING
        if self._stream is None:
            self._thread = threading.Thread(target=self._restore, name=f"prefetch-{self.rank}", daemon=True)
            self._thread.start()
        else:
            self._restore()

    def ready(self, timeout: float | None = None) -> None:
        """Wait until the training state is back (``timeout`` seconds, default the deadline), and start bringing it back
        when nobody has. Raises :class:`SwapError`."""
        if self.state is State.GENERATING:
            self.prefetch()
        self._expect(State.RETURNING, "ready")
        started, limit = time.perf_counter(), self._deadline if timeout is None else timeout
        if self._thread is not None:
            self._thread.join(limit)
            if self._thread.is_alive():
                raise SwapError(f"rank {self.rank}: the training state is not back within {limit:g} s; wait again")
            self._thread = None
        if self._stream is not None:
            torch.accelerator.current_stream(self.device).wait_stream(self._stream)
            devices.synchronize(self.device)
        if (failure := self._failure) is not None:
            self._failure, self.state = None, State.GENERATING  # what is in the arena is still there
            raise SwapError(
                f"rank {self.rank}: the training state could not be brought back ({failure}); free device memory and "
                "call ready() again"
            ) from failure
        self.waited = time.perf_counter() - started
        self.state = State.TRAINING
        self._watch(Phase.PREFETCH)

    def temporary_bytes(self) -> int:
        """Bytes of the buckets that are alive."""
        return live_bytes(self._buckets)

    # -----------------------------------------------------------------------------------------------------------------

    def _expect(self, state: State, call: str) -> None:
        if self.state is not state:
            raise RuntimeError(
                f"{call}() while {self.state.value}; the order is to_rollout(), then prefetch(), then ready()"
            )

    @contextmanager
    def _phase(self, phase: Phase) -> Iterator[None]:
        started = time.perf_counter()
        yield
        devices.synchronize(self.device)
        self.seconds[phase] = time.perf_counter() - started
        self._watch(phase)

    def _release_rollout(self) -> None:
        for tensor in self.rollout.values():
            tensor.untyped_storage().resize_(0)

    def _restore(self) -> None:
        started = time.perf_counter()
        try:
            self.arena.restore(self._stream)
        except BaseException as error:  # raised by ready()
            self._failure = error
        self.seconds[Phase.PREFETCH] = time.perf_counter() - started

    def _gather(self) -> None:
        for s in self._local:
            _part(self.rollout[s.target], s.target_at, s.sizes).copy_(
                _part(self._weights[s.source], s.source_at, s.sizes)
            )
        sizes = [max((e.nbytes for e in self._exchanges[lane::2]), default=0) for lane in (0, 1)]
        self._buckets = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        zeros = torch.zeros(len(self._exchanges), self.plan.world, dtype=torch.int64, device=self.device)
        told, found = zeros, zeros.clone()
        flying: list[tuple[int, Any]] = []
        for number, exchange in enumerate(self._exchanges):
            if len(flying) == 2:
                self._land(*flying.pop(0), found)
            values = self._values(number)
            for s, at in exchange.packed:
                source = _part(self._weights[s.source], s.source_at, s.sizes)
                values[at : at + prod(s.sizes)].view(s.sizes).copy_(source)
            sent, received = values.split([sum(exchange.sends), sum(exchange.receives)])
            told[number] = _checksums(sent, exchange.sends)
            with self._reported(f"round {number} of {len(self._exchanges)}"):
                work = dist.all_to_all_single(
                    received, sent, exchange.receives, exchange.sends, group=self.group, async_op=True
                )
            flying.append((number, work))
        for one in flying:
            self._land(*one, found)
        self._buckets = []
        self._compare(told, found)

    def _values(self, number: int) -> torch.Tensor:
        exchange = self._exchanges[number]
        return self._buckets[number % 2][: exchange.nbytes].view(exchange.dtype)

    def _land(self, number: int, work: Any, found: torch.Tensor) -> None:
        exchange, values = self._exchanges[number], self._values(number)
        with self._reported(f"round {number} of {len(self._exchanges)}"):
            work.wait(timedelta(seconds=self._deadline))
        found[number] = _checksums(values[sum(exchange.sends) :], exchange.receives)
        for s, at in exchange.unpacked:
            target = _part(self.rollout[s.target], s.target_at, s.sizes)
            target.copy_(values[at : at + prod(s.sizes)].view(s.sizes))
        self._watch(Phase.GATHER)

    def _compare(self, told: torch.Tensor, found: torch.Tensor) -> None:
        """Raise when a message is not what its sender sent. ``told`` [rounds, receivers], ``found`` [rounds, senders]."""
        with self._reported("the comparison of checksums"):
            mine = told.t().contiguous()
            into = torch.empty_like(mine)
            dist.all_to_all_single(into, mine, group=self.group)
            wrong = (into.t() != found).nonzero()
            count = torch.tensor([len(wrong)], device=self.device)
            dist.all_reduce(count, group=self.group)  # all ranks swap, or none
        if total := int(count):
            here = "; ".join(f"from rank {sender} in round {number}" for number, sender in wrong[:3].tolist())
            raise SwapError(
                f"rank {self.rank}: {total} messages are not what was sent, here {here or 'none'}; the training state is "
                "back, the rollout has no weights"
            )

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise SwapError(
                f"rank {self.rank}: {what} did not come about ({error}); the training state is back, the rollout has no "
                "weights; restart the ranks that are gone and make a new group"
            ) from error


def _check_weights(tensors: Iterable[LocalTensor], weights: Mapping[str, torch.Tensor], rank: int) -> None:
    wanted = {tensor.name: tensor for tensor in tensors}
    if missing := sorted(wanted.keys() ^ weights.keys()):
        where = "the plan" if missing[0] in weights else "weights"
        raise ValueError(f"weights: {missing[0]!r} is not in {where} of rank {rank}; lay out the model that is trained")
    for name, tensor in wanted.items():
        given = weights[name]
        if tuple(given.shape) != tensor.shape or given.dtype != tensor.dtype:
            raise ValueError(
                f"weights: {name!r} is {given.dtype} {list(given.shape)} on rank {rank} where the plan has {tensor.dtype} "
                f"{list(tensor.shape)}; give the local tensors of the layout that the plan was made from"
            )
