"""Weight sync through host memory: the trainer publishes versions into shared memory, and engines
copy them out.

    trainer:  step v done ─▶ write slot (v mod slots), bucket by bucket, each with its checksum ─▶ index: v is published
    follower: v is published ─▶ copy out of shared memory and verify (beside generation) ─▶ engine swaps at its next
              token boundary ─▶ claims groups that need v

A slot that is overwritten while it is read fails its checksums: the follower keeps its version,
reports that, and loads the newest. Versions come as the optimizer makes them; a slow follower skips
some. A follower that finds the newest version damaged where it lies reports it (:func:`damaged`):
the trainer starts again, and publishes the same version again.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
import xxhash
from pydantic import TypeAdapter
from tensordict import TensorDict

from stages.algorithms.interface import MOST_LOG_RATIO
from stages.engines.protocols import RolloutEngine, TrainEngine

if TYPE_CHECKING:
    from stages.weights.network import WeightSender
    from stages.weights.depot import Depot

BUCKET_BYTES = 32 * 2**20
_ALIGN = 64


class WeightsDamaged(RuntimeError):
    """The bytes of a bucket are not the published ones: a later version has overwritten them, or
    they were corrupted."""


class WeightsUnreachable(RuntimeError):
    """The trainer that published a version does not send it: it has ended, or the network has
    failed."""


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int


Ids = tuple[int, ...]


@dataclass(frozen=True)
class Probe:
    """Token sequences of two tokens or more, with the logprobs of all tokens but the first of each
    under published weights: an engine that has loaded these must compute the same."""

    sequences: tuple[Ids, ...]
    logprobs: tuple[tuple[float, ...], ...]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Probe:
        return TypeAdapter(cls).validate_python(record)


def probed(engine: TrainEngine, sequences: Sequence[Sequence[int]]) -> Probe:
    """Returns the logprobs of ``sequences`` under the present weights of ``engine``.

    All of its ranks call this together.
    """
    rows = len(sequences)
    batch = TensorDict(
        {"group": torch.arange(rows), "place": torch.zeros(rows, dtype=torch.int64)}, [rows]
    )
    for name, part in (("prompt_ids", slice(1)), ("response_ids", slice(1, None))):
        batch[name] = torch.nested.nested_tensor(
            [torch.tensor(ids[part]) for ids in sequences], layout=torch.jagged
        )
    logprobs = (tuple(row.tolist()) for row in engine.logprobs(batch).unbind())
    return Probe(tuple(map(tuple, sequences)), tuple(logprobs))


async def scored(
    engine: RolloutEngine, probe: Probe, temperature: float
) -> list[torch.Tensor] | None:
    """Returns the logprobs that ``engine`` computes for each sequence of ``probe``; None where it
    cannot."""
    found = []
    for ids in map(torch.tensor, probe.sequences):
        logprobs = await engine.score(ids[:1], ids[1:], temperature=temperature)
        if logprobs is None:
            return None
        found.append(logprobs)
    return found


@dataclass(frozen=True)
class Gap:
    """How far the logprobs of one policy by two engines lie apart, over ``tokens``: the largest,
    the mean and the 95th percentile of the absolute differences, and the k3 estimate of the KL
    divergence (http://joschu.net/blog/kl-approx.html)."""

    max: float
    mean: float
    k3: float
    q95: float
    tokens: int

    def fields(self) -> dict[str, float]:
        """The fields of a ``sync`` event."""
        return {f"gap_{name}": value for name, value in asdict(self).items()}


def gap(one: torch.Tensor, other: torch.Tensor) -> Gap:
    """Compare logprobs [T] with [T], the first those of the policy that is trained.

    Not a number anywhere: infinite.
    """
    difference = one.double() - other.double()
    tokens = len(one)
    if not bool(difference.isfinite().all()):
        return Gap(math.inf, math.inf, math.inf, math.inf, tokens)
    size = difference.abs()
    cut = difference.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    k3 = (cut.exp() - 1 - cut).mean()
    q95 = size.sort().values[math.ceil(0.95 * tokens) - 1]
    return Gap(float(size.max()), float(size.mean()), float(k3), float(q95), tokens)


@dataclass(frozen=True)
class ProbeLimits:
    """The largest :class:`Gap` that two engines with the same weights may have."""

    mean: float
    q95: float
    max: float = math.inf

    @property
    def k3(self) -> float:
        """k3 is nearly half the mean of the squares.

        Where no difference exceeds ``q95``, this follows from ``mean``; so it bounds the
        differences that may exceed ``q95``.
        """
        return self.q95 * self.mean / 2

    def exceeded(self, gap: Gap) -> str | None:
        """What ``gap`` exceeds, with the key of the limit; None: it is within the limits."""
        judged = (
            (gap.max, self.max, f"the largest of {gap.tokens} tokens", "sync.probe_tolerance"),
            (gap.q95, self.q95, f"95th percentile of {gap.tokens} tokens", "sync.probe_tolerance"),
            (gap.mean, self.mean, f"mean of {gap.tokens} tokens", "sync.probe_mean_tolerance"),
            (
                gap.k3,
                self.k3,
                f"k3 of {gap.tokens} tokens",
                "sync.probe_tolerance * sync.probe_mean_tolerance / 2",
            ),
        )
        for found, limit, what, key in judged:
            if not found <= limit:
                return f"by {found:.3g} ({what}; {key} is {limit:.3g})"
        return None

    def fields(self) -> dict[str, float]:
        """The fields of a ``sync`` event."""
        return {
            f"gap_{name}_limit": limit
            for name, limit in {**asdict(self), "k3": self.k3}.items()
            if limit < math.inf
        }


@dataclass(frozen=True)
class ProbeRule:
    """What the limits of a probe follow from: the dtype that a model of ``layers`` layers computes
    in, whether tokens are ``routed`` to experts, and the probe itself. ``q95`` and ``mean`` replace
    the limits of these names where they are not 0. docs/weights.md derives the numbers."""

    dtype: torch.dtype
    layers: int = 1
    routed: bool = False
    q95: float = 0.0
    mean: float = 0.0
    alarm: bool = True  # a refused probe is an alarm of the guard

    @classmethod
    def of(
        cls, dtype: torch.dtype, config: Any, *, q95: float = 0.0, mean: float = 0.0
    ) -> ProbeRule:
        """From the config of a transformers model."""
        text = config.get_text_config()
        routed = (getattr(text, "num_experts_per_tok", None) or 0) > 0
        return cls(dtype, int(getattr(text, "num_hidden_layers", 32)), routed, q95, mean)

    def limits(self, probe: Probe) -> ProbeLimits:
        """In float32 every token is held to 0.001.

        In a lower dtype a hidden state's error is about one rounding times the root of the number
        of layers, but four where few layers each outweigh what comes into them, and a logprob's is
        that times how far logprobs are spread: 95 of 100 tokens are held to seven and a half times
        this, and three times as much where a rounding may route a token to another expert. The mean
        is held to a fifth of what tokens are held to.
        """
        if self.dtype == torch.float32:
            q95 = self.q95 or 1e-3
            return ProbeLimits(self.mean or q95 / 5, q95, q95)
        spread = float(
            torch.tensor([value for row in probe.logprobs for value in row]).std(correction=0)
        )
        rounding = torch.finfo(self.dtype).eps / 2
        roundings = max(4.0, math.sqrt(self.layers)) * (3 if self.routed else 1)
        q95 = self.q95 or 7.5 * rounding * roundings * max(1.0, spread)
        return ProbeLimits(self.mean or q95 / 5, q95)


class ProbeFailed(RuntimeError):
    """The engine's logprobs are not those of the weights that it should have.

    The message says by how much. ``unmoved``: they are those of the weights before. ``alarm``: it
    is an alarm of the guard.
    """

    def __init__(
        self, message: str, *, measured: Gap, limits: ProbeLimits, unmoved: bool, alarm: bool
    ) -> None:
        super().__init__(message)
        self.measured = measured
        self.limits = limits
        self.alarm = alarm
        self.unmoved = unmoved


class ProbeJudge:
    """Judges the logprobs that one engine finds, from version to version.

    Successive probes share sequences. Where an update has not reached the engine, it finds for
    these bit for bit what it found before, while the trainer does not: in a dtype whose roundings
    hide one update this still shows it.
    """

    def __init__(self, rule: ProbeRule) -> None:
        self.rule = rule
        # by sequence: trainer's, engine's
        self._accepted: dict[Ids, tuple[tuple[float, ...], torch.Tensor]] = {}

    def compares(self, probe: Probe) -> bool:
        """Whether ``probe`` shares sequences with the last one."""
        return not self._accepted.keys().isdisjoint(probe.sequences)

    def judge(
        self, probe: Probe, found: Sequence[torch.Tensor], *, same_weights: bool = False
    ) -> dict[str, float]:
        """Compare ``found`` with the trainer's.

        ``same_weights``: they are known to be those of the last version judged. Returns the gap and
        its limits as the fields of a ``sync`` event. Raises ProbeFailed.
        """
        measured = gap(
            torch.tensor([value for row in probe.logprobs for value in row]), torch.cat(list(found))
        )
        limits = self.rule.limits(probe)
        now = dict(zip(probe.sequences, zip(probe.logprobs, found, strict=True), strict=True))
        shared = now.keys() & self._accepted.keys()
        unmoved = bool(shared) and not same_weights
        unmoved = unmoved and all(self._unmoved(now[ids], self._accepted[ids]) for ids in shared)
        about: dict[str, Any] = {
            "measured": measured,
            "limits": limits,
            "unmoved": unmoved,
            "alarm": self.rule.alarm,
        }
        if exceeded := limits.exceeded(measured):
            raise ProbeFailed(
                f"the engine's logprobs differ from the trainer's {exceeded}", **about
            )
        if unmoved:
            tokens = sum(len(ids) - 1 for ids in shared)
            raise ProbeFailed(
                f"the engine's logprobs of {tokens} tokens are bit for bit those of the weights "
                f"before, and the trainer's "
                "are not; the update has not reached what the engine computes with",
                **about,
            )
        self._accepted = now
        return measured.fields() | limits.fields()

    @staticmethod
    def _unmoved(
        now: tuple[Ids | tuple[float, ...], torch.Tensor], before: tuple[Any, torch.Tensor]
    ) -> bool:
        """Whether the engine's logprobs of a sequence are the same as before, and most of the
        trainer's are others."""
        moved = sum(one != other for one, other in zip(now[0], before[0], strict=True))
        return torch.equal(now[1], before[1]) and 2 * moved > len(now[0])


@dataclass(frozen=True)
class Published:
    """The record of a version in the index: where its bytes are, and their checksums.

    ``buckets`` are (offset, bytes, xxh3); ``source`` is the trainer that sends it (JSON,
    ``weights.network``; "": it is read on the trainer's node), or the ranks that do: of n ranks,
    rank r the buckets r, r + n, …
    """

    version: int
    slot: int
    nbytes: int
    tensors: tuple[Tensor, ...]
    buckets: tuple[tuple[int, int, str], ...]
    probe: Probe | None = None
    source: str = ""

    def key(self, source: int = 0, sources: int = 1) -> str:
        """Names these bytes, or those of one of several sources: of two publications with one key
        they are the same."""
        of = repr(self.buckets[source::sources]).encode()
        return f"{self.version}-{_digest(np.frombuffer(of, np.uint8))}"

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Published:
        return TypeAdapter(cls).validate_python(record)

    def check(self) -> None:
        """Raises WeightsDamaged unless the buckets cover every byte once."""
        at = 0
        for offset, nbytes, _ in self.buckets:
            if offset != at:
                raise self.damage(
                    f"bytes {at}..{offset} are in no bucket, or in two; publish again"
                )
            at += nbytes
        end = max((t.offset + t.nbytes for t in self.tensors if t.nbytes), default=0)
        if at < end:
            raise self.damage(f"bytes {at}..{end} are in no bucket; publish again")

    def damage(self, what: str) -> WeightsDamaged:
        """Returns the error for ``what`` is wrong with this version's bytes."""
        return WeightsDamaged(f"weights of version {self.version}: {what}")


def joined(parts: Sequence[Published]) -> Published:
    """Returns the record of a version that the ranks of a trainer have published in ``parts``, rank
    0 first."""
    buckets = (
        parts[number % len(parts)].buckets[number] for number in range(len(parts[0].buckets))
    )
    sources = [source for part in parts if part.source for source in json.loads(part.source)]
    return replace(parts[0], buckets=tuple(buckets), source=json.dumps(sources) if sources else "")


Publisher: TypeAlias = "WeightStore | WeightSender"  # what a trainer publishes weights with
Reader: TypeAlias = "WeightStore | Depot"  # what a rollout engine reads published weights with


class WeightStore:
    """Versions of a model's weights in shared memory under ``directory``, ``slots`` of them at a
    time."""

    source = ""  # of what it publishes: readers are on the same node

    def __init__(
        self, directory: Path, *, slots: int = 2, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.directory = directory
        self.slots = slots
        self.bucket_bytes = bucket_bytes
        self._maps: dict[int, np.ndarray] = {}

    def slot(self, version: int) -> int:
        """Returns the slot of ``version``."""
        return version % self.slots

    def memory(self, published: Published) -> np.ndarray:
        """Returns the bytes of a version's slot, uint8 [``published.nbytes``], to fill or to send;
        the file grows to hold them."""
        slot = self.slot(published.version)
        nbytes = published.nbytes
        return self._open(slot, max(nbytes, 1))[:nbytes]

    def has(self, published: Published) -> bool:
        """Whether versions are published here, so that this one is or was."""
        return self._file(self.slot(published.version)).exists()

    def publish(
        self,
        version: int,
        weights: Iterable[tuple[str, torch.Tensor]],
        probe: Probe | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> Published:
        """Write ``weights`` as ``version`` into the slot that holds the oldest.

        Each byte is copied once, and read once for its checksum while it is warm; one tensor is
        held at a time, so that a sharded engine may gather them one by one. ``part`` (r, n): of
        each n buckets the one with number r alone, others have no checksum (:func:`joined`).
        """
        layout = []
        slot = self.slot(version)
        buckets: list[tuple[int, int, str]] = []
        at = written = start = 0
        memory = self._open(slot, 1)
        for name, value in weights:
            source = value.detach().contiguous().view(-1).view(torch.uint8)
            tensor = Tensor(
                name, str(value.dtype).removeprefix("torch."), list(value.shape), at, source.numel()
            )
            layout.append(tensor)
            at = (at + tensor.nbytes + _ALIGN - 1) // _ALIGN * _ALIGN
            if at > len(memory):  # the first time; later versions find the file as long as they are
                memory = self._open(slot, at)
            target = torch.from_numpy(memory)
            for begin in range(0, tensor.nbytes, self.bucket_bytes):
                piece = source[begin : begin + self.bucket_bytes]
                own = len(buckets) % part[1] == part[0]
                if own:
                    target[tensor.offset + begin : tensor.offset + begin + piece.numel()].copy_(
                        piece
                    )
                written = tensor.offset + begin + piece.numel()
                if written - start >= self.bucket_bytes:
                    buckets.append(
                        (start, written - start, _digest(memory[start:written]) if own else "")
                    )
                    start = written
        if written > start:
            own = len(buckets) % part[1] == part[0]
            buckets.append((start, written - start, _digest(memory[start:written]) if own else ""))
        return Published(version, slot, at, tuple(layout), tuple(buckets), probe)

    def read(self, published: Published) -> dict[str, torch.Tensor]:
        """Returns a private, verified copy of a published version, by parameter name.

        Raises WeightsDamaged.
        """
        copy = np.empty(max(published.nbytes, 1), np.uint8)
        copy_verified(self.mapped(published), copy, published)
        return tensors_of(copy, published)

    def close(self) -> None:
        self._maps.clear()

    def mapped(self, published: Published) -> np.ndarray:
        """Returns a published version's bytes where they lie, uint8.

        Raises WeightsDamaged when the file is too short: reading a mapped page past its end would
        be a SIGBUS.
        """
        published.check()
        path = self._file(self.slot(published.version))
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise published.damage(
                f"{path} is not there; is this the node that they were published on?"
            ) from None
        if size < published.nbytes:
            raise published.damage(
                f"{path} has {size} bytes where {published.nbytes} were published"
            )
        return self.memory(published)

    def _file(self, slot: int) -> Path:
        return self.directory / f"weights-{slot}"

    def _open(self, slot: int, nbytes: int) -> np.ndarray:
        if slot not in self._maps or len(self._maps[slot]) < nbytes:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._maps[slot] = mapped(self._file(slot), make=nbytes)
        return self._maps[slot]


def mapped(path: Path, *, make: int = 0) -> np.ndarray:
    """Returns the bytes of a file, uint8, which is made to have ``make`` at least, also where
    several processes do so at the same time. Raises OSError, also when shared memory has no room: a
    page without room would be a SIGBUS."""
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if make else 0), 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size < make:
            os.posix_fallocate(descriptor, size, make - size)
        return np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
    finally:
        os.close(descriptor)


def verify(data: np.ndarray, published: Published, numbers: Iterable[int] | None = None) -> None:
    """Compare the buckets ``numbers`` (default: all) of ``data``, the bytes of ``published``, with
    their checksums. Raises WeightsDamaged."""
    for number in range(len(published.buckets)) if numbers is None else numbers:
        offset, nbytes, digest = published.buckets[number]
        if _digest(data[offset : offset + nbytes]) != digest:
            why = "a later version has overwritten it, or it was corrupted"
            raise published.damage(
                f"bucket {number} ({nbytes} bytes) does not match its checksum; {why}"
            )


def copy_verified(source: np.ndarray, memory: np.ndarray, published: Published) -> None:
    """Copy a version's bytes, and compare those of the copy with their checksums.

    Raises WeightsDamaged.
    """
    for number, (offset, nbytes, _) in enumerate(published.buckets):
        memory[offset : offset + nbytes] = source[offset : offset + nbytes]
        verify(memory, published, [number])


def tensors_of(data: np.ndarray, published: Published) -> dict[str, torch.Tensor]:
    """The tensors in ``data``, all bytes of ``published``, by name."""
    flat = torch.from_numpy(data)
    return {
        t.name: flat[t.offset : t.offset + t.nbytes].view(getattr(torch, t.dtype)).view(t.shape)
        for t in published.tensors
    }


def _digest(data: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(data.data)
