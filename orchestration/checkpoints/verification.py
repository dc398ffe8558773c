"""Verification of all checkpoints of a run: those in its folder, and those at its
``checkpoint.url``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestration.checkpoints.checkpoint import ASIDE, CheckpointUnusable, open_checkpoint, whole
from orchestration.checkpoints.held import hold
from orchestration.checkpoints.store import CheckpointStore
from orchestration.recipe.loading.load import recorded_recipe
from orchestration.state.paths import RECIPE, store_url
from orchestration.units import format_size
from stages.model import manifest
from stages.model.manifest import STATE, FilesDamaged


class NoCheckpoints(LookupError):
    """A folder has no checkpoint to verify; the message says what to give."""


@dataclass(frozen=True)
class Verification:
    """Findings of the checkpoint at ``path``, a folder or a URL.

    ``damages``: a sentence for each damaged file; ``bytes`` of ``files`` were read.
    ``has_digests``: otherwise there was nothing to compare with.
    """

    path: str
    files: int
    bytes: int
    has_digests: bool
    damages: Sequence[str]

    @property
    def text(self) -> str:
        if self.damages:
            return "\n".join([f"{self.path}: damaged", *(f"  {damage}" for damage in self.damages)])
        if not self.has_digests:
            return f"{self.path}: not verified: it has no digests, of an older version"
        return f"{self.path}: whole ({self.files} files, {format_size(self.bytes)})"


def verified(run: Path) -> Iterator[Verification]:
    """Verify the checkpoints of the run in the folder ``run``, oldest first, or the one in this
    folder. Raises NoCheckpoints."""
    run = run.absolute()
    if (run / STATE).is_file():
        yield verify(run)
        return
    folder = run / "checkpoints"
    paths = [
        *whole(folder),
        *sorted(path for path in folder.glob(f"{ASIDE}step-*") if path.is_dir()),
    ]
    store = _store_of(run)
    names = store.names() if store else []
    if not paths and not names:
        raise NoCheckpoints(
            f"run: {run} has no checkpoint; give the folder of a run, or of one of its checkpoints"
        )
    for path in paths:
        try:
            with hold(path):
                verification = verify(path)
        except FileNotFoundError:
            if path.exists():
                raise
            continue  # a run that goes on has removed it
        yield verification
    for name in names if store else []:
        if store:
            yield _verified_at(store, name)


def verify(path: Path) -> Verification:
    """Verify the checkpoint in the folder ``path``."""
    try:
        digests = manifest.read(path)
        damages = list[str]()
        if digests is not None:
            damages = list(manifest.damages(path, digests, list(digests)))
        open_checkpoint(path)
    except FilesDamaged as damaged:
        return Verification(str(path), 0, 0, True, [str(damaged)])
    except CheckpointUnusable as unusable:
        damages = damages or [str(unusable)]
    return _verification(str(path), digests, damages)


def _verified_at(store: CheckpointStore, name: str) -> Verification:
    try:
        digests, damages = store.verify(name)
    except FilesDamaged as damaged:
        return Verification(f"{store.url}/{name}", 0, 0, True, [str(damaged)])
    return _verification(f"{store.url}/{name}", digests, damages)


def _verification(
    path: str, digests: dict[str, manifest.FileDigest] | None, damages: Sequence[str]
) -> Verification:
    sizes = [digest.bytes for digest in (digests or {}).values()]
    return Verification(path, len(sizes), sum(sizes), digests is not None, damages)


def _store_of(run: Path) -> CheckpointStore | None:
    try:
        url = store_url(recorded_recipe(run / RECIPE), run)
    except OSError:
        return None
    return CheckpointStore(url) if url else None
