"""The references of a run whose reference becomes the policy every k steps (``model.reference_every``).

    step n·k is trained ─▶ references/step-… ─▶ version n·k is published ─▶ rows whose oldest token is of
                             (n·k, on disk)                                  versions n·k … n·k + k − 1 read it

A row's versions stay with it, so that it is scored by the same reference whenever that happens, and
its reference is there before the row is. With ``mix`` below 1 a reference is mix × policy +
(1 − mix) × the one before (TR-DPO, arXiv 2404.09656, Eq. 5; TRL's ``ref_model_mixup_alpha``).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from orchestration.checkpoints.checkpoint import name_of, version_of, whole
from orchestration.disk import sync

FOLDER = "references"  # in the run's folder
FILES = "*.safetensors"


class References:
    """The references in the folder of a run, each a Hugging Face checkpoint. Without one of version
    0 the first reference is the model that the run begins with."""

    def __init__(self, run_folder: Path, every: int, mix: float) -> None:
        self._run_folder = run_folder
        self._folder = run_folder / FOLDER
        self.every = every
        self._mix = mix

    def path(self, version: int) -> Path | None:
        """Return the folder of the reference of ``version``; None for the model that the run begins
        with. Raises FileNotFoundError."""
        path = self._folder / name_of(version)
        if path.is_dir():
            return path
        if version == 0:
            return None
        raise FileNotFoundError(
            f"reference: {path} is not there; it was removed, or is on another machine; resume the "
            f"run with --from a version before {version}"
        )

    def is_due(self, version: int, *, again: bool) -> bool:
        """Return whether the policy of ``version`` is to be written as a reference; ``again``: also
        where it was, by a run that went on from an older checkpoint since."""
        is_one = version % self.every == 0 and (version > 0 or self._mix < 1)
        return is_one and (again or not (self._folder / name_of(version)).is_dir())

    def begin(self, version: int) -> Path:
        """Make and return the folder for the policy of ``version``; :meth:`finish` follows."""
        partial = self._folder / f".{name_of(version)}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def finish(self, version: int, oldest: int) -> None:
        """Make a reference of the policy that was written for ``version``. Then remove those that
        neither rows of version ``oldest`` need, nor a run that goes on from a checkpoint."""
        name = name_of(version)
        partial = self._folder / f".{name}.partial"
        if self._mix < 1 and version > 0:
            before = self.path(version - self.every)
            assert before is not None, "that of version 0 was written, as references are mixed"
            _mix(partial, before, self._mix)
        for file in partial.iterdir():
            sync(file)
        shutil.rmtree(self._folder / name, ignore_errors=True)
        os.replace(partial, self._folder / name)
        sync(self._folder)
        checkpoints = whole(self._run_folder / "checkpoints")
        needed = min(oldest, version_of(checkpoints[0].name) if checkpoints else 0)
        self._remove(lambda each: each < needed // self.every * self.every)

    def rewind(self, version: int) -> None:
        """Remove the references of versions after ``version``, from which a run goes on."""
        self._remove(lambda each: each > version)

    def _remove(self, is_unneeded: Callable[[int], bool]) -> None:
        for path in self._folder.glob("step-*"):
            if is_unneeded(version_of(path.name)):
                shutil.rmtree(path, ignore_errors=True)


def _mix(policy: Path, before: Path, share: float) -> None:
    """Replace each weight in the folder ``policy`` by ``share`` × itself + (1 − ``share``) × that of
    ``before``, in float32. One file is in memory at a time."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    file_of: dict[str, Path] = {}
    for path in before.glob(FILES):
        with safe_open(path, framework="pt") as file:
            file_of |= dict.fromkeys(file.keys(), path)
    for path in policy.glob(FILES):
        tensors = load_file(path)
        for name, weight in tensors.items():
            if weight.is_floating_point():
                with safe_open(file_of[name], framework="pt") as file:
                    mixed = (1 - share) * file.get_tensor(name).float() + share * weight.float()
                tensors[name] = mixed.to(weight.dtype)
        save_file(tensors, path, metadata={"format": "pt"})
