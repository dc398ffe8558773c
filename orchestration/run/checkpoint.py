"""Checkpoints: files from which a run continues at step k as if it had never stopped.

    checkpoints/step-00000020/   model/     a Hugging Face checkpoint
                                 train/     optimizer's state and weights, bit for bit: a shard of each rank
                                 run.json   version, prompt position, ledger, groups still to be made

``train/`` is a distributed checkpoint of torch: ranks of any number and layout read what any others have written. A
checkpoint is written under another name and renamed at the end, so one with its final name is complete. Prompts are a pure
function of the group's number, so the prompt position is a number, and groups in flight are generated again.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a service lists checkpoints without torch; functions that read or write one import it
    from stages.engines.protocols import TrainEngine
    from stages.models import Tokenizer

TRAIN = "train"
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
        """Load the saved state into ``engine``, which may have other ranks than the saved one. All ranks call this."""
        import torch.distributed.checkpoint as dcp

        state = engine.state_dict()
        with _no_warning():
            dcp.load(state, checkpoint_id=self.path / TRAIN, no_dist=not _sharded(state))
        engine.load_state_dict(state)


def begin(directory: Path, version: int) -> Path:
    """Make and return an empty folder to :func:`write` the checkpoint of ``version`` into."""
    partial = _partial(directory, version)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def write(partial: Path, engine: TrainEngine) -> None:
    """Write the engine's weights and state into ``partial``: each rank its shard, in one collective call. On rank 0 it
    returns when all shards are written."""
    import torch.distributed.checkpoint as dcp

    engine.save_pretrained(partial / "model")
    state = engine.state_dict()
    with _no_warning():
        dcp.save(state, checkpoint_id=partial / TRAIN, no_dist=not _sharded(state))


def finish(
    directory: Path, tokenizer: Tokenizer, version: int, index_state: Mapping[str, Any], keep: int
) -> Checkpoint:
    """Add the files that are not the engine's, and give the checkpoint its name: from now on it exists. Removes all but the
    newest ``keep``."""
    final, partial = directory / _NAME.format(version), _partial(directory, version)
    tokenizer.save_pretrained(partial / "model")
    (partial / "run.json").write_text(json.dumps({"version": version, **index_state}, indent=1))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    for old in whole(directory)[:-keep]:
        shutil.rmtree(old)
    return open_checkpoint(final)


def _partial(directory: Path, version: int) -> Path:
    return directory / f".{_NAME.format(version)}.partial"


def _sharded(state: Any) -> bool:
    """Whether ``state`` is spread over several ranks."""
    from torch.distributed.tensor import DTensor

    if isinstance(state, dict):
        return any(_sharded(value) for value in state.values())
    return isinstance(state, DTensor)


@contextmanager
def _no_warning() -> Iterator[None]:
    """Hide torch's warning about a single process, which ``no_dist`` has declared."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def latest(directory: Path) -> Checkpoint | None:
    """Returns the newest checkpoint under ``directory``; None when there is none."""
    found = whole(directory)
    return open_checkpoint(found[-1]) if found else None


def whole(directory: Path) -> list[Path]:
    """Returns the complete checkpoints below ``directory``, oldest first."""
    return sorted(path for path in directory.glob("step-*") if (path / "run.json").is_file())


def open_checkpoint(path: Path) -> Checkpoint:
    state = json.loads((path / "run.json").read_text())
    return Checkpoint(path, state["version"], state["counters"], state["remake"])
