"""Checkpoints: all that a run needs to go on from step k as if it had never stopped.

    checkpoints/step-00000020/   model/     a Hugging Face checkpoint
                                 train.pt   optimizer, schedule, RNG and weights, bit for bit
                                 run.json   version, prompt position, ledger, groups still to be made

Written beside its final name and renamed at the end: a folder that is there is whole. Prompts are a pure function of the
group's number, so the prompt position is a number, and groups in flight are simply made again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stages.engines.protocols import TrainEngine
from stages.models import Tokenizer

_NAME = "step-{:08d}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. ``counters`` and ``remake`` are what :meth:`pipeline.index.Index.init` starts from."""

    path: Path
    version: int
    counters: dict[str, int]
    remake: list[int]

    @property
    def model(self) -> Path:
        return self.path / "model"

    def load_into(self, engine: TrainEngine) -> None:
        # Written by this program into the run's own folder; the optimizer's state holds more than tensors.
        engine.load_state_dict(torch.load(self.path / "train.pt", weights_only=False))


def save(
    directory: Path,
    engine: TrainEngine,
    tokenizer: Tokenizer,
    version: int,
    index_state: Mapping[str, Any],
    keep: int,
) -> Checkpoint:
    """Write the checkpoint of ``version`` and drop all but the newest ``keep``."""
    final = directory / _NAME.format(version)
    partial = directory / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    engine.save_pretrained(partial / "model")
    tokenizer.save_pretrained(partial / "model")
    torch.save(engine.state_dict(), partial / "train.pt")
    (partial / "run.json").write_text(json.dumps({"version": version, **index_state}, indent=1))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    for old in _all(directory)[:-keep]:
        shutil.rmtree(old)
    return open_checkpoint(final)


def latest(directory: Path) -> Checkpoint | None:
    """The newest checkpoint under ``directory``; None when there is none."""
    found = _all(directory)
    return open_checkpoint(found[-1]) if found else None


def _all(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("step-*") if (path / "run.json").is_file())


def open_checkpoint(path: Path) -> Checkpoint:
    state = json.loads((path / "run.json").read_text())
    return Checkpoint(path, state["version"], state["counters"], state["remake"])
