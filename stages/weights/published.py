"""A published version: the record of where its bytes are, their checksums, and the tensors in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import xxhash
from pydantic import TypeAdapter

Ids = tuple[int, ...]
PROBE = "probe"  # column of a batch that no policy has sampled: it has no structure


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


@dataclass(frozen=True)
class Probe:
    """Token sequences of two tokens or more, with the logprobs of all tokens but the first of each
    under published weights: an engine that has loaded these must compute the same."""

    sequences: tuple[Ids, ...]
    logprobs: tuple[tuple[float, ...], ...]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Probe:
        return TypeAdapter(cls).validate_python(record)


@dataclass(frozen=True)
class Published:
    """The record of a version in the index: where its bytes are, and their checksums.

    ``buckets`` are (offset, bytes, xxh3); ``source`` is the trainer that sends it (JSON,
    ``weights.transport.network``; "": it is read on the trainer's node), or the ranks that do: of n ranks,
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
        return f"{self.version}-{checksum(np.frombuffer(of, np.uint8))}"

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Published:
        return _published().validate_python(record)

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


def verify(data: np.ndarray, published: Published, numbers: Iterable[int] | None = None) -> None:
    """Compare the buckets ``numbers`` (default: all) of ``data``, the bytes of ``published``, with
    their checksums. Raises WeightsDamaged."""
    for number in range(len(published.buckets)) if numbers is None else numbers:
        offset, nbytes, digest = published.buckets[number]
        if checksum(data[offset : offset + nbytes]) != digest:
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


@cache
def _published() -> TypeAdapter[Published]:
    return TypeAdapter(Published)  # takes milliseconds


def checksum(data: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(data.data)
