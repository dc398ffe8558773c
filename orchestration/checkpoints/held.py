"""Checkpoints that are read while their run goes on, which removes older ones.

a reader:   run.json of a checkpoint ─▶ flock, shared ─▶ checked, copied, linked ─▶ freed
the run:    its own flock of that file: does a reader hold it? ─yes─▶ the checkpoint stays until the next one is written
                                                               └no──▶ removed

The kernel frees a reader's lock when its process ends, even when it is killed. On a file system
without flock nothing is held.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestration.checkpoints.checkpoint import Checkpoint
from stages.model.manifest import STATE

ATTEMPTS = 10  # to choose a checkpoint that is still there when it is held


@contextlib.contextmanager
def held(choose: Callable[[], Checkpoint | None]) -> Iterator[Checkpoint | None]:
    """Yield the checkpoint that ``choose`` returns, which its run does not remove until the block
    ends. It is chosen again where it was removed meanwhile."""
    with contextlib.ExitStack() as stack:
        for attempt in itertools.count(1):
            try:
                checkpoint = choose()
                if checkpoint is not None:
                    stack.enter_context(hold(checkpoint.path))
                break
            except FileNotFoundError:
                if attempt == ATTEMPTS:
                    raise
        yield checkpoint


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Keep the checkpoint at ``path`` from being removed by its run until the block ends. Raises
    FileNotFoundError where it was removed."""
    descriptor = os.open(path / STATE, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not os.path.samestat(os.fstat(descriptor), os.stat(path / STATE)):
            raise FileNotFoundError(f"{path} was removed")
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process has the descriptor too
        os.close(descriptor)
