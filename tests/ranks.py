"""Real ranks for tests: processes that form a gloo group and hand back what they found."""

from __future__ import annotations

import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.flow.scale import inside
from stages import device as devices
from stages.engines.torch.parallel.mesh import join
from stages.parallel.layout import Layout, RankCoordinates
from tests.forked import forks

DEADLINE = 270.0


def on_ranks(
    dp: int, tp: int, work: Callable[..., Any], *arguments: Any, timeout: float = DEADLINE
) -> list[Any]:
    """:func:`of_product` with dp · tp ranks."""
    return of_product({"dp": dp, "tp": tp}, work, *arguments, timeout=timeout)


def of_product(
    chosen: Mapping[str, int],
    work: Callable[..., Any],
    *arguments: Any,
    timeout: float = DEADLINE,
    namespaces: Sequence[str] = (),
    device: str = "cpu",
) -> list[Any]:
    """Run ``work(ranks, *arguments)`` on each rank of a group with the strategies ``chosen``, one
    thread each, and return the results by rank.

    Raises what the first of them to fail raised, as text, and ends the others. ``timeout`` is that
    of their collectives. ``namespaces``: of the network, one for each rank, where ``eth0`` leads to
    the others. ``device``: that the group computes on.
    """
    context = forks()
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="adk-ranks-") as home:
        processes: list[BaseProcess] = [
            context.Process(
                target=_rank,
                args=(
                    results,
                    Layout.for_training(**chosen).coordinates(rank),
                    home,
                    timeout,
                    work,
                    arguments,
                    namespaces[rank : rank + 1],
                    device,
                ),
            )
            for rank in range(Layout.for_training(**chosen).world)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(results, processes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(results: Any, processes: list[BaseProcess]) -> list[Any]:
    by_rank: dict[int, Any] = {}
    deadline = time.monotonic() + DEADLINE
    while len(by_rank) < len(processes):
        try:
            rank, error, result = results.get(timeout=1.0)
        except queue.Empty:
            died = [
                rank
                for rank, p in enumerate(processes)
                if p.exitcode is not None and rank not in by_rank
            ]
            assert not died, (
                f"rank {died[0]} ended with {processes[died[0]].exitcode} without a message"
            )
            assert time.monotonic() < deadline, (
                f"only ranks {sorted(by_rank)} are done after {DEADLINE:.0f} s"
            )
            continue
        assert not error, f"rank {rank}:\n{error}"
        by_rank[rank] = result
    return [by_rank[rank] for rank in range(len(processes))]


def _rank(
    results: Any,
    ranks: RankCoordinates,
    home: str,
    timeout: float,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    namespaces: Sequence[str],
    device: str,
) -> None:
    entered = ExitStack()
    for namespace in namespaces:
        entered.enter_context(inside(namespace))
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        store = dist.FileStore(str(Path(home) / "store"), ranks.world)
        join(ranks, store, devices.of_rank(torch.device(device), ranks.rank), timeout)
        result = work(ranks, *arguments)
        store.set(f"done {ranks.rank}", "")
        # One that leaves early would break the others' connections.
        store.wait([f"done {rank}" for rank in range(ranks.world)])
        dist.destroy_process_group()
        results.put((ranks.rank, "", result))
    except BaseException:
        results.put((ranks.rank, traceback.format_exc(), None))
