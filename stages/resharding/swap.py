"""Allgather-swap: training and generation take turns on the same devices, and neither leaves
weights in device memory.

    TRAINING ── to_rollout() ──▶ GENERATING ── prefetch() ──▶ RETURNING ── ready() ──▶ TRAINING
        │                            ▲
        │ 1. gradients, optimizer state ─▶ host arena         3. training weights ─▶ host arena
        └ 2. slices from all ranks ─▶ two buckets in turn ─▶ the rollout's tensors

``prefetch`` returns at once: the bytes come back in a thread (CPU) or a side stream (accelerator)
beside the inference stages, and ``ready`` waits for the rest. A tensor keeps its identity: its
storage is resized to 0 and back, so modules, optimizers and DTensors that hold it do not change.
When a step to generation fails, the training state is restored before the error is raised.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from stages import device as devices
from stages.parallel.placement import LocalTensor
from stages.resharding.gather import Gather, GatherError
from stages.resharding.plan import Phase, ReshardPlan
from stages.resharding.tensors import bytes_of, empty, live_bytes, storages_of

_ALIGN = 512  # of a storage in the arena: what copy engines and caches like

Watch = Callable[[Phase], None]


class SwapError(RuntimeError):
    """A swap failed.

    The message names the rank and the reason. The training state is on the device, or in the arena
    from which it can be restored.
    """


class State(Enum):
    TRAINING = "training"
    GENERATING = "generating"
    RETURNING = "returning"


# --- host memory
# --------------------------------------------------------------------------------------------------


class Arena:
    """Host memory for the storages of a rank: one allocation, reused, and enlarged when needed.

    Page-locked where copies are faster that way.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._away: list[tuple[torch.UntypedStorage, int, int]] = []  # storage, offset, bytes

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    def reserve(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Make room for ``storages``, before any of them is stored.

        Raises ValueError for one that cannot be resized.
        """
        if not all(storage.resizable() for storage in storages):
            raise ValueError(
                "weights, state: a storage cannot be resized, because numpy or another process "
                "shares it; train on a clone"
            )
        needed = sum(_padded(storage.nbytes()) for storage in storages)
        if needed > self.nbytes:
            # the old one first, so that both are never there
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = devices.host_empty(needed, self.device)

    def store(self, storages: Iterable[torch.UntypedStorage]) -> int:
        """Copy ``storages`` to the arena, then free them on their device. Returns their bytes."""
        stored = []
        for storage in storages:
            if nbytes := storage.nbytes():
                self._memory[self._used : self._used + nbytes].copy_(
                    bytes_of(storage), non_blocking=True
                )
                stored.append((storage, self._used, nbytes))
                self._used += _padded(nbytes)
        devices.synchronize(self.device)
        self._away += stored  # before anything is freed
        for storage, _, _ in stored:
            storage.resize_(0)
        return sum(nbytes for _, _, nbytes in stored)

    def allocate(self) -> None:
        """Give the stored storages their device memory again. Can be called again after a
        failure."""
        for storage, _, nbytes in self._away:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)

    def copy_back(self, stream: Any = None) -> None:
        """Copy everything back to the device; on an accelerator on ``stream``, without waiting."""
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream or nullcontext():
            for storage, offset, nbytes in self._away:
                bytes_of(storage).copy_(self._memory[offset : offset + nbytes], non_blocking=True)
        self._away = []
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes that are stored."""
        return sum(nbytes for _, _, nbytes in self._away)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class Swap:
    """One rank's swaps between the training tensors ``weights`` (by name, as in ``plan.source`` for
    ``rank``) and the rollout's tensors ``rollout`` (by the names of ``plan.target``), which have
    memory only while GENERATING. It creates the rollout's tensors, or uses those of an engine and
    empties their storages.

    ``state`` returns the present gradients and optimizer state (:func:`training_state`).
    ``device``: the device of all of them; parts of ``state`` on other devices stay there. ``group``
    has ``plan.world`` ranks, this one is number ``rank``. ``deadline``: seconds for a round.
    ``watch`` is called at the end of each phase and after each round. Methods are called from one
    thread, and on every rank of the group.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        weights: Mapping[str, torch.Tensor],
        state: Callable[[], Iterable[torch.Tensor]],
        *,
        device: torch.device,
        rollout: Mapping[str, torch.Tensor] | None = None,
        group: dist.ProcessGroup | None = None,
        deadline: float = 600.0,
        watch: Watch = lambda phase: None,
    ) -> None:
        tensors = plan.source.ranks[rank] if rank < plan.source.world else ()
        _check_tensors("weights", tensors, weights, rank)
        targets = plan.target.ranks[rank] if rank < plan.target.world else ()
        if rollout is not None:
            _check_tensors("rollout", targets, rollout, rank)
            _check_own(rollout)
        self.plan = plan
        self.rank = rank
        self.device = device
        self._weights = dict(weights)
        self._training_state = state
        self._deadline = deadline
        self._watch = watch
        self._gather = Gather(
            plan,
            rank,
            device=device,
            group=group,
            deadline=deadline,
            watch=lambda: self._watch(Phase.GATHER),
        )
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._stream = devices.stream(device)
        self._copied: tuple[Any, Any] = (0.0, 0.0)  # when bringing it back began and ended
        self.arena = Arena(device)
        self.state = State.TRAINING
        self.seconds: dict[Phase, float] = {}
        """What each phase of the last swap took; PREFETCH the copies themselves, beside whatever
        else ran."""
        self.waited = 0.0
        """Seconds that the last ``ready`` waited."""
        self.rollout: dict[str, torch.Tensor] = dict(rollout or {})
        empty(self.rollout.values())
        for tensor in targets if rollout is None else ():
            self.rollout[tensor.name] = buffer = torch.empty(
                tensor.shape, dtype=tensor.dtype, device=device
            )
            empty([buffer])  # one after the other, as training has all of its memory now

    def to_rollout(self) -> Mapping[str, torch.Tensor]:
        """Fill the rollout's tensors, and move the training state to host memory.

        Returns ``rollout``. Raises :class:`SwapError` and restores everything when a rank does not
        answer or a checksum is wrong.
        """
        self._expect(State.TRAINING, "to_rollout")
        weights = storages_of(self._weights.values())
        training = {storage._cdata for storage in weights}
        state = [
            s
            for s in storages_of(self._training_state())
            if s._cdata not in training and s.device.type == self.device.type
        ]
        self.arena.reserve([*state, *weights])
        self.seconds = {}
        try:
            with self._phase(Phase.OFFLOAD_STATE):
                self.arena.store(state)
            with self._phase(Phase.GATHER):
                for tensor in self.rollout.values():
                    tensor.untyped_storage().resize_(prod(tensor.shape) * tensor.element_size())
                self._gather(self._weights, self.rollout)
            with self._phase(Phase.OFFLOAD_WEIGHTS):
                self.arena.store(weights)
        except BaseException as error:
            empty(self.rollout.values())
            self.arena.allocate()
            self.arena.copy_back()
            devices.synchronize(self.device)
            if isinstance(error, GatherError):
                outcome = "the training state is back, the rollout has no weights"
                raise SwapError(f"{error}; {outcome}") from error
            raise
        devices.release_cached(self.device)
        self.state = State.GENERATING
        return self.rollout

    def prefetch(self) -> None:
        """Free the rollout's weights and start to restore the training state; returns at once.

        Raises the error of the device's allocator when there is no room; the call can be repeated.
        """
        self._expect(State.GENERATING, "prefetch")
        devices.synchronize(self.device)  # generation may have used other streams
        empty(self.rollout.values())
        # here and not on the thread: memory that one thread freed is not another's to reuse
        self.arena.allocate()
        self.state = State.RETURNING
        if self._stream is None:
            self._thread = threading.Thread(
                target=self._copy_back, name=f"prefetch-{self.rank}", daemon=True
            )
            self._thread.start()
        else:
            self._copy_back()

    def ready(self, timeout: float | None = None) -> None:
        """Wait until the training state is restored (``timeout`` seconds, default the deadline);
        starts it when :meth:`prefetch` was not called. Raises :class:`SwapError`."""
        if self.state is State.GENERATING:
            self.prefetch()
        self._expect(State.RETURNING, "ready")
        started = time.perf_counter()
        limit = self._deadline if timeout is None else timeout
        if self._thread is not None:
            self._thread.join(limit)
            if self._thread.is_alive():
                raise SwapError(
                    f"rank {self.rank}: the training state is not back within "
                    f"{limit:g} s; wait again"
                )
            self._thread = None
        if self._stream is not None:
            torch.accelerator.current_stream(self.device).wait_stream(self._stream)
            devices.synchronize(self.device)
        if (failure := self._failure) is not None:
            self._failure = None
            self.state = State.GENERATING  # the arena keeps its content
            raise SwapError(
                f"rank {self.rank}: the training state could not be brought back ({failure}); it "
                f"is still in "
                "host memory: call ready() again"
            ) from failure
        self.waited = time.perf_counter() - started
        self.seconds[Phase.PREFETCH] = devices.seconds_between(*self._copied)
        self.state = State.TRAINING
        self._watch(Phase.PREFETCH)

    @property
    def moved(self) -> int:
        """Bytes of the rollout's tensors, which each swap fills."""
        return self.plan.received[self.rank] + self.plan.kept[self.rank]

    @property
    def released(self) -> int:
        """Bytes that are in host memory."""
        return self.arena.used

    def device_bytes(self) -> int:
        """Return the number of bytes of training, of the rollout's tensors and of buckets on the
        device."""
        rollout = sum(tensor.untyped_storage().nbytes() for tensor in self.rollout.values())
        return self.training_bytes() + rollout + self.temporary_bytes()

    def temporary_bytes(self) -> int:
        """Return the number of bytes of the allocated buckets."""
        return self._gather.temporary_bytes()

    @property
    def exchange(self) -> str:
        """Transport of the last gather: ``shared memory``, the group's backend, or ``none``."""
        return self._gather.exchange

    def training_bytes(self) -> int:
        """Return the number of bytes of weights, gradients and optimizer state on the device."""
        state = [t for t in self._training_state() if t.device.type == self.device.type]
        return live_bytes([*self._weights.values(), *state])

    # ----------------------------------------------------------------------------------------------

    def _expect(self, state: State, call: str) -> None:
        if self.state is not state:
            raise RuntimeError(
                f"{call}() while {self.state.value}; the order is to_rollout(), then prefetch(), "
                f"then ready()"
            )

    @contextmanager
    def _phase(self, phase: Phase) -> Iterator[None]:
        started = time.perf_counter()
        yield
        devices.synchronize(self.device)
        self.seconds[phase] = time.perf_counter() - started
        self._watch(phase)

    def _copy_back(self) -> None:
        started = devices.mark(self._stream)
        try:
            self.arena.copy_back(self._stream)
        except BaseException as error:  # raised by ready()
            self._failure = error
        self._copied = started, devices.mark(self._stream)


def _check_tensors(
    what: str, tensors: Iterable[LocalTensor], given: Mapping[str, torch.Tensor], rank: int
) -> None:
    wanted = {tensor.name: tensor for tensor in tensors}
    if missing := sorted(wanted.keys() ^ given.keys()):
        where = "the plan" if missing[0] in given else what
        raise ValueError(
            f"{what}: {missing[0]!r} is not in {where} of rank {rank}; lay out the "
            f"model that is trained"
        )
    for name, tensor in wanted.items():
        value = given[name]
        if tuple(value.shape) != tensor.shape or value.dtype != tensor.dtype:
            raise ValueError(
                f"{what}: {name!r} is {value.dtype} {list(value.shape)} on rank {rank} where the "
                f"plan has {tensor.dtype} {list(tensor.shape)}; give the local tensors of the "
                f"layout that the plan was made from"
            )


def _check_own(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if not storage.resizable() or storage.nbytes() not in (0, tensor.nbytes):
            raise ValueError(
                f"rollout: {name!r} has no storage of its own that can be resized; give whole "
                f"tensors, each a clone"
            )
