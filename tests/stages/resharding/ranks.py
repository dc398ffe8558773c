"""Real ranks for tests: processes with a gloo group of their own, ended by a deadline, none left
behind."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forked import forks


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, deadline: float = 120.0
) -> list[Any]:
    """``function(rank, world, *args)`` on each of ``world`` ranks, and what they returned; None of
    a rank that ended itself. Raises the first failure with its traceback, and ``TimeoutError`` when
    the deadline has passed."""
    end = time.monotonic() + deadline
    server = forks()
    with tempfile.TemporaryDirectory(prefix="ranks-") as home:
        pipes = [server.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            server.Process(
                target=_rank,
                args=(rank, world, Path(home) / "store", there, function, args),
                daemon=True,
            )
            for rank, (_, there) in enumerate(pipes)
        ]
        try:
            for rank in ranks:
                rank.start()
            for _, there in pipes:
                there.close()
            return _results([here for here, _ in pipes], end)
        finally:
            for rank in ranks:
                if rank.pid is not None:
                    rank.kill()
                    rank.join()


def _results(pipes: list[Connection], end: float) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise TimeoutError(
                f"ranks {sorted(waiting.values())} have not ended before their deadline"
            )
        for pipe in ready:
            rank = waiting.pop(pipe)  # type: ignore[arg-type]
            try:
                failed, results[rank] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:  # it ended itself
                continue
            if failed:
                raise AssertionError(f"rank {rank}:\n{results[rank]}")
    return results


def _rank(
    rank: int, world: int, store: Path, results: Connection, function: Callable[..., Any], args: Any
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
        results.send((False, function(rank, world, *args)))
    except BaseException:
        results.send((True, traceback.format_exc()))
