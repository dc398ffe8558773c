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

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from stages.weights.published import (
    Probe,
    Published,
    Tensor,
    checksum,
    copy_verified,
    tensors_of,
)

BUCKET_BYTES = 32 * 2**20
_ALIGN = 64


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
                        (
                            start,
                            written - start,
                            checksum(memory[start:written]) if own else "",
                        )
                    )
                    start = written
        if written > start:
            own = len(buckets) % part[1] == part[0]
            buckets.append((start, written - start, checksum(memory[start:written]) if own else ""))
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
