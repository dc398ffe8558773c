"""Weight sync, first form: publish to host memory, swap late.

    trainer:  step v done ─▶ write slot (v mod slots), bucket by bucket, each with its checksum ─▶ index: v is published
    follower: v is published ─▶ copy out of shared memory and verify (beside generation) ─▶ engine swaps at its next
              token boundary ─▶ claims groups that need v

A slot that is overwritten while it is read fails its checksums: the follower keeps its version, says so, and takes the
newest. Versions come as the optimizer makes them; a slow follower skips some. One that finds the newest damaged where it
lies asks for it: the trainer publishes the same version again, in another edition (``damaged`` names what is asked for).
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from tensordict import TensorDict

from stages.engines.protocols import TrainEngine

BUCKET_BYTES = 32 * 2**20
ASKED = "weights"  # the index's topic of whoever wants something of the trainer's weights, or nothing more of them
_ALIGN = 64


class WeightsDamaged(RuntimeError):
    """A bucket's bytes are not those that were published: overwritten by a later version, or corrupted."""


class WeightsUnreachable(RuntimeError):
    """The trainer that published a version does not send it: it has ended, or the network between them is gone."""


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Probe:
    """A short response and what its tokens' logprobs are under the weights it comes with: an engine that has loaded them
    must find the same."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def gap(self, found: torch.Tensor) -> Gap:
        return gap(torch.tensor(self.logprobs), found)


def probed(engine: TrainEngine, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Probe:
    """What ``engine`` says of a response under its present weights; a call of all ranks where it has several."""
    row = TensorDict({"group": torch.zeros(1, dtype=torch.int64), "place": torch.zeros(1, dtype=torch.int64)}, [1])
    for name, ids in (("prompt_ids", prompt_ids), ("response_ids", response_ids)):
        row[name] = torch.nested.nested_tensor([torch.tensor(ids)], layout=torch.jagged)
    return Probe(tuple(prompt_ids), tuple(response_ids), tuple(engine.logprobs(row).unbind()[0].tolist()))


@dataclass(frozen=True)
class Gap:
    """How far logprobs of one policy by two engines lie apart: largest and mean difference, and the k3 estimate of the KL
    divergence (http://joschu.net/blog/kl-approx.html)."""

    max: float
    mean: float
    k3: float


def gap(one: torch.Tensor, other: torch.Tensor) -> Gap:
    """Of logprobs [T] and [T], the first those of the policy that is trained. Not a number anywhere: infinite."""
    difference = one.double() - other.double()
    if not bool(difference.isfinite().all()):
        return Gap(math.inf, math.inf, math.inf)
    size = difference.abs()
    return Gap(float(size.max()), float(size.mean()), float((difference.exp() - 1 - difference).mean()))


@dataclass(frozen=True)
class Published:
    """What the index keeps of a version: where it lies and what it must be. ``buckets`` are (offset, bytes, xxh3);
    ``source`` is the trainer that sends it (``stages.weight_link``; "": it is read on the trainer's node), ``edition`` the
    number of times that it had been published before."""

    version: int
    slot: int
    nbytes: int
    tensors: tuple[Tensor, ...]
    buckets: tuple[tuple[int, int, str], ...]
    probe: Probe | None = None
    source: str = ""
    edition: int = 0

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Published:
        return cls(
            record["version"],
            record["slot"],
            record["nbytes"],
            tuple(Tensor(**tensor) for tensor in record["tensors"]),
            tuple((offset, nbytes, digest) for offset, nbytes, digest in record["buckets"]),
            Probe(**{name: tuple(values) for name, values in probe.items()})
            if (probe := record.get("probe"))
            else None,
            record.get("source", ""),
            record.get("edition", 0),
        )

    def check(self) -> None:
        """The buckets cover every byte once. Raises WeightsDamaged."""
        at = 0
        for offset, nbytes, _ in self.buckets:
            if offset != at:
                raise WeightsDamaged(
                    f"weights of version {self.version}: bytes {at}..{offset} are in no bucket, or in two; publish again"
                )
            at += nbytes
        end = max((t.offset + t.nbytes for t in self.tensors if t.nbytes), default=0)
        if at < end:
            raise WeightsDamaged(
                f"weights of version {self.version}: bytes {at}..{end} are in no bucket; publish again"
            )


def damaged(version: int, edition: int) -> str:
    """The document of the index that says that somebody has found this edition damaged."""
    return f"damaged:{version}:{edition}"


def done_with(worker: str) -> str:
    """The document of the index that says of which version ``worker`` needs no more: the last one that it has taken."""
    return f"has-last-weights:{worker}"


class Publisher(Protocol):
    """Where a trainer puts its weights: a :class:`WeightStore`, or one that is also sent from."""

    source: str  # of what it publishes, see Published

    def publish(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], probe: Probe | None = None
    ) -> Published: ...

    def close(self) -> None: ...


class Reader(Protocol):
    """Where a rollout engine gets published weights from."""

    def read(self, published: Published) -> dict[str, torch.Tensor]:
        """A private, verified copy in host memory, by parameter name. Raises ``WeightsDamaged``, ``WeightsUnreachable``."""


class WeightStore:
    """Versions of a model's weights in shared memory under ``directory``, ``slots`` of them at a time."""

    source = ""  # of what it publishes: nobody sends it

    def __init__(self, directory: Path, *, slots: int = 2, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.directory, self.slots, self.bucket_bytes = directory, slots, bucket_bytes
        self._maps: dict[int, mmap.mmap] = {}

    def slot(self, version: int) -> int:
        """Where ``version`` is published."""
        return version % self.slots

    def memory(self, slot: int, nbytes: int) -> np.ndarray:
        """A slot's first bytes, uint8 [``nbytes``], for whoever fills or sends them; the file grows to hold them."""
        return np.frombuffer(self._open(slot, max(nbytes, 1)), np.uint8, nbytes)

    def publish(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], probe: Probe | None = None
    ) -> Published:
        """Write ``weights`` as ``version`` into the slot that holds the oldest. Each byte is copied once, and read once
        for its checksum while it is warm; one tensor is held at a time, so that a sharded engine may gather them one by
        one."""
        layout, buckets, slot = [], [], self.slot(version)
        at = written = start = 0
        memory = np.frombuffer(self._open(slot, 1), np.uint8)
        for name, value in weights:
            source = value.detach().contiguous().view(-1).view(torch.uint8)
            tensor = Tensor(name, str(value.dtype).removeprefix("torch."), list(value.shape), at, source.numel())
            layout.append(tensor)
            at = (at + tensor.nbytes + _ALIGN - 1) // _ALIGN * _ALIGN
            if at > len(memory):  # the first time; later versions find the file as long as they are
                memory = np.frombuffer(self._open(slot, at), np.uint8)
            target = torch.from_numpy(memory)
            for begin in range(0, tensor.nbytes, self.bucket_bytes):
                piece = source[begin : begin + self.bucket_bytes]
                target[tensor.offset + begin : tensor.offset + begin + piece.numel()].copy_(piece)
                written = tensor.offset + begin + piece.numel()
                if written - start >= self.bucket_bytes:
                    buckets.append((start, written - start, _digest(memory[start:written])))
                    start = written
        if written > start:
            buckets.append((start, written - start, _digest(memory[start:written])))
        return Published(version, slot, at, tuple(layout), tuple(buckets), probe)

    def read(self, published: Published) -> dict[str, torch.Tensor]:
        """A private, verified copy of a published version, by parameter name. Raises WeightsDamaged."""
        source = self._mapped(published)
        copy = np.empty(len(source), np.uint8)
        for number, (offset, nbytes, _) in enumerate(published.buckets):
            copy[offset : offset + nbytes] = source[offset : offset + nbytes]
            verify(copy, published, number)
        return tensors_of(copy, published)

    def verify(self, published: Published) -> None:
        """Compare the bytes where they lie with their checksums. Raises WeightsDamaged."""
        source = self._mapped(published)
        for number in range(len(published.buckets)):
            verify(source, published, number)

    def view(self, published: Published) -> dict[str, torch.Tensor]:
        """A published version where it lies, neither copied nor verified, by parameter name: for a reader that has seen it
        verified, and whose writer overwrites nothing before it is done. Raises WeightsDamaged when it is not there."""
        return tensors_of(self._mapped(published), published)

    def close(self) -> None:
        self._maps.clear()

    def _mapped(self, published: Published) -> np.ndarray:
        published.check()
        self._check_file(published)
        nbytes = max(published.nbytes, 1)
        return np.frombuffer(self._open(published.slot, nbytes), np.uint8, nbytes)

    def _check_file(self, published: Published) -> None:
        """A reader makes no file longer, and reads no mapped page that the file has lost (that would be SIGBUS)."""
        path = self.directory / f"weights-{published.slot}"
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise WeightsDamaged(
                f"weights of version {published.version}: {path} is not there; is this the node that they were published on?"
            ) from None
        if size < published.nbytes:
            raise WeightsDamaged(
                f"weights of version {published.version}: {path} has {size} bytes where {published.nbytes} were published"
            )

    def _open(self, slot: int, nbytes: int) -> mmap.mmap:
        if slot not in self._maps or len(self._maps[slot]) < nbytes:
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.directory / f"weights-{slot}", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if os.fstat(descriptor).st_size < nbytes:
                    os.ftruncate(descriptor, nbytes)
                self._maps[slot] = mmap.mmap(descriptor, 0)
            finally:
                os.close(descriptor)
        return self._maps[slot]


def verify(data: np.ndarray, published: Published, number: int) -> None:
    """Compare bucket ``number`` of ``data``, all bytes of ``published``, with its checksum. Raises WeightsDamaged."""
    offset, nbytes, digest = published.buckets[number]
    if _digest(data[offset : offset + nbytes]) != digest:
        raise WeightsDamaged(
            f"weights of version {published.version}: bucket {number} ({nbytes} bytes) does not match its "
            "checksum; a later version has overwritten it, or it was corrupted"
        )


def tensors_of(data: np.ndarray, published: Published) -> dict[str, torch.Tensor]:
    """The tensors in ``data``, all bytes of ``published``, by name."""
    flat = torch.from_numpy(data)
    return {
        t.name: flat[t.offset : t.offset + t.nbytes].view(getattr(torch, t.dtype)).view(t.shape)
        for t in published.tensors
    }


def _digest(data: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(data.data)
