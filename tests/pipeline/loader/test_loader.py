"""What a trainer relies on from the loader: every row once, peers that agree, nothing lost with a
reader that dies."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from pipeline.data.arena import StaleHandle
from pipeline.data.columns import Column, ColumnError, Packed, Schema
from pipeline.index.claims import Nothing
from pipeline.index.client import Claim, Index, IndexRefused, LeaseLost, StageSpec
from pipeline.loader.balance import balanced
from pipeline.loader.loader import Batch, SampleLoader, SampleStream
from pipeline.warehouse.dock import Dock

SCHEMA = Schema(
    [
        Column.scalar("number", torch.int64),
        Column.ragged("ids", torch.int64),
        Column.text("answer"),
        Column.scalar("reward", torch.float32),
    ]
)
TRAIN = StageSpec("train", "rows", SCHEMA.mask(["ids"]), 0, releases=True)
T = TypeVar("T")
COLUMNS = ("number", "ids", "answer")


def lengths(numbers: range) -> list[int]:
    return [1 + (7 * n) % 13 for n in numbers]


def rows(numbers: range) -> dict[str, Any]:
    return {
        "number": torch.tensor(list(numbers)),
        "ids": [
            torch.full((length,), n) for n, length in zip(numbers, lengths(numbers), strict=True)
        ],
        "answer": [f"answer {n} é" for n in numbers],
    }


class Flow:
    """A flow of one stage, and streams from it."""

    def __init__(self, dock: Dock) -> None:
        self.dock = dock
        self.streams = []

    def stream(self, *columns: str, **options: Any) -> SampleStream:
        options = {"batch_size": 4, "idle": 10.0, "timeout": 20.0} | options
        index = self.dock.index
        stream = SampleStream(index.url, index.run, SCHEMA, "train", columns or COLUMNS, **options)
        self.streams.append(stream)
        return stream

    def loader(self, workers: int, **options: Any) -> SampleLoader:
        loader = SampleLoader(self.stream(**options), num_workers=workers)
        self.streams.append(loader.dataset)
        return loader

    async def put(self, numbers: range, finish: bool = True) -> None:
        for start in range(numbers.start, numbers.stop, 5):
            await self.dock.put(rows(range(start, min(start + 5, numbers.stop))))
        if finish:
            await self.dock.index.transition([""], "finished")

    async def left(self) -> tuple[int, int, int]:
        """Rows that are there, ready and leased."""
        stats = await self.dock.index.stats()
        return stats["rows"], stats["stages"]["train"]["ready"], stats["stages"]["train"]["leased"]


@pytest.fixture
async def flow(index: Index, tmp_path: Path) -> AsyncIterator[Flow]:
    async with Dock.open(
        index.url, index.run, SCHEMA, [TRAIN], worker="w", arena=1 << 20, directory=tmp_path
    ) as dock:
        flow = Flow(dock)
        yield flow
        for stream in flow.streams:
            stream.close()


async def thread(work: Callable[..., T], *arguments: Any) -> T:
    """A consumer, in a thread of its own: not in a pool's, as a worker forked from one of these
    ends badly."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            loop.call_soon_threadsafe(done.set_result, work(*arguments))
        except BaseException as failed:
            loop.call_soon_threadsafe(done.set_exception, failed)

    threading.Thread(target=run, daemon=True).start()
    return await done


async def threads(*works: Callable[[], T]) -> list[T]:
    """Each of them in a thread of its own: the readers of a job."""
    return list(await asyncio.gather(*map(thread, works)))


def numbers(batches: list[Batch]) -> list[int]:
    return [int(n) for batch in batches for n in batch["number"]]


def checked(batches: Iterator[Batch]) -> list[list[int]]:
    """The numbers of all batches, whose columns belong together."""
    out = []
    for batch in batches:
        found = batch["number"].tolist()
        assert (
            [t.tolist() for t in batch["ids"].unbind()]
            == [[n] * lengths(range(n, n + 1))[0] for n in found]
            if found
            else len(batch) == 0
        )
        assert batch["answer"] == [f"answer {n} é" for n in found]
        out.append(found)
    return out


# ── one reader ──


async def test_batches_come_in_order_and_are_released_when_the_next_is_asked_for(
    flow: Flow,
) -> None:
    await flow.put(range(10))
    batches = iter(flow.stream())

    def first() -> Batch:
        return next(batches)

    assert (await thread(first))["number"].tolist() == [0, 1, 2, 3]
    assert await flow.left() == (10, 6, 4)
    assert (await thread(first))["number"].tolist() == [4, 5, 6, 7]
    assert await flow.left() == (6, 2, 4)
    assert await thread(checked, batches) == [[8, 9]], "the rest of an ended run is a smaller batch"
    assert await flow.left() == (0, 0, 0)


async def test_ragged_columns_come_packed_jagged_or_padded(flow: Flow) -> None:
    await flow.put(range(4))
    stream = flow.stream("ids", "answer", "number", ragged="packed", commit="explicit")
    batch = await thread(lambda: next(iter(stream)))
    wanted = rows(range(4))["ids"]
    assert isinstance(batch["ids"], Packed)
    assert batch["ids"].values.tolist() == torch.cat(wanted).tolist()
    assert batch["ids"].lengths().tolist() == lengths(range(4))
    jagged = batch.columns["ids"].jagged()
    assert [t.tolist() for t in jagged.unbind()] == [t.tolist() for t in wanted]
    padded = torch.nn.utils.rnn.pad_sequence(wanted, batch_first=True, padding_value=-1)
    assert torch.equal(batch.columns["ids"].padded(-1), padded)
    part = batch.select([3, 1])
    assert part["number"].tolist() == [3, 1]
    assert part["answer"] == ["answer 3 é", "answer 1 é"]
    assert part["ids"].values.tolist() == torch.cat([wanted[3], wanted[1]]).tolist()
    assert part.row.tolist() == [batch.row[3], batch.row[1]]


async def test_without_workers_a_batch_is_a_view_of_shared_memory(flow: Flow) -> None:
    await flow.dock.put(rows(range(4)))
    stream = flow.stream("ids", ragged="packed", commit="explicit")
    batch = await thread(lambda: next(iter(stream)))
    home = flow.dock.warehouses.records[flow.dock.home]
    arena = flow.dock.warehouses.arena(home)
    at = bytes(arena.slice(0, arena.nbytes)).find(batch["ids"].values.numpy().tobytes())
    assert at > 0
    arena.slice(at, 8)[:] = torch.tensor([99]).numpy().tobytes()
    assert int(batch["ids"].values[0]) == 99


async def test_a_reader_may_come_before_the_flow_is_there(index: Index, tmp_path: Path) -> None:
    stream = SampleStream(index.url, index.run, SCHEMA, "train", COLUMNS, batch_size=2, timeout=20)
    reading = asyncio.create_task(thread(lambda: checked(iter(stream))))
    async with Dock.open(
        index.url, index.run, SCHEMA, [TRAIN], worker="w", arena=1 << 16, directory=tmp_path
    ) as dock:
        await Flow(dock).put(range(4))
        assert await asyncio.wait_for(reading, 20) == [[0, 1], [2, 3]]


async def test_a_claim_of_at_least_so_many_takes_nothing_while_there_are_fewer(flow: Flow) -> None:
    await flow.put(range(3), finish=False)
    assert isinstance(await flow.dock.index.claim("train", "w", 4, 60, least=4), Nothing)
    waiting = asyncio.create_task(thread(lambda: next(iter(flow.stream(commit="explicit")))))
    await flow.dock.put(rows(range(3, 4)))
    assert (await asyncio.wait_for(waiting, 10))["number"].tolist() == [0, 1, 2, 3]


async def test_a_batch_that_does_not_fill_comes_smaller_and_then_the_stream_ends(
    flow: Flow,
) -> None:
    await flow.put(range(6), finish=False)
    assert await thread(checked, iter(flow.stream(idle=0.3))) == [[0, 1, 2, 3], [4, 5]]
    await flow.put(range(6, 12), finish=False)
    assert await thread(checked, iter(flow.stream(idle=0.3, drop_last=True))) == [[6, 7, 8, 9]]
    assert await flow.left() == (2, 2, 0)


async def test_the_end_of_the_run_waits_for_what_other_stages_still_hold(
    index: Index, tmp_path: Path
) -> None:
    reward = StageSpec("reward", "rows", SCHEMA.mask(["ids"]), SCHEMA.mask(["reward"]))
    train = StageSpec("train", "rows", SCHEMA.mask(["reward"]), 0, releases=True)
    async with Dock.open(
        index.url, index.run, SCHEMA, [reward, train], worker="w", arena=1 << 16, directory=tmp_path
    ) as dock:
        await dock.put(rows(range(2)))
        claim = await dock.claim("reward", 2)
        assert claim is not None
        await index.transition([""], "finished")
        stream = SampleStream(
            index.url, index.run, SCHEMA, "train", ["reward"], batch_size=2, idle=20
        )
        reading = asyncio.create_task(
            thread(lambda: [batch["reward"].tolist() for batch in stream])
        )
        assert not (await asyncio.wait([reading], timeout=0.3))[0]
        await dock.commit(claim, [0, 1], {"reward": torch.tensor([0.5, 1.5])})
        assert await asyncio.wait_for(reading, 10) == [[0.5, 1.5]]


async def test_what_a_loop_leaves_uncommitted_is_delivered_again_at_once(flow: Flow) -> None:
    await flow.put(range(8))

    def leave_at_the_second() -> None:
        for _, _ in zip(range(2), flow.stream(), strict=False):
            pass

    await thread(leave_at_the_second)
    assert await flow.left() == (4, 4, 0)
    assert await thread(checked, iter(flow.stream())) == [[4, 5, 6, 7]]


async def test_explicit_commits_come_in_any_order_and_leases_hold_until_then(flow: Flow) -> None:
    await flow.put(range(12))
    stream = flow.stream(commit="explicit", lease=0.3)
    held = await thread(lambda: list(stream))
    stamp = time.monotonic()
    assert await flow.dock.claim("train", 12, timeout=0.6) is None, (
        "renewed although nothing is asked for"
    )
    assert time.monotonic() - stamp > 0.5
    for batch in reversed(held):
        await thread(stream.commit, batch)
    assert await flow.left() == (0, 0, 0)
    with pytest.raises(StaleHandle):
        await thread(stream.commit, held[0])


async def test_a_commit_after_the_lease_was_lost_is_refused(flow: Flow) -> None:
    await flow.put(range(4))
    stream = flow.stream(commit="explicit")
    batch = await thread(lambda: next(iter(stream)))
    await flow.dock.index.forget_worker(stream._link().worker)
    assert isinstance(await flow.dock.claim("train", 4), Claim)
    with pytest.raises(LeaseLost):
        await thread(stream.commit, batch)


async def test_rows_of_another_node_come_over_the_wire(index: Index, tmp_path: Path) -> None:
    options = {"node": "there", "secret": b"a secret of the run, sixteen or more"}
    async with Dock.open(
        index.url,
        index.run,
        SCHEMA,
        [TRAIN],
        worker="w",
        arena=1 << 20,
        directory=tmp_path,
        **options,
    ) as dock:
        await dock.serve("127.0.0.1")
        flow = Flow(dock)
        await flow.put(range(10))
        stream = flow.stream(**options | {"node": "here"})
        assert await thread(lambda: checked(iter(stream))) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert await flow.left() == (0, 0, 0)


# ── DataLoader workers ──


@pytest.mark.parametrize("workers", [0, 2])
async def test_every_row_comes_once_whatever_the_number_of_workers(
    flow: Flow, workers: int
) -> None:
    await flow.put(range(30))
    loader = flow.loader(workers)
    found = await thread(lambda: checked(iter(loader)))
    assert sorted(itertools.chain(*found)) == list(range(30))
    assert sorted(map(len, found)) == [2, *[4] * 7], (
        "the short one comes wherever its worker's turn is"
    )
    assert await flow.left() == (0, 0, 0)


async def test_workers_run_ahead_and_only_what_was_consumed_is_committed(flow: Flow) -> None:
    await flow.put(range(40))
    loader = flow.loader(2, lease=1.0)

    def some() -> list[int]:
        batches = iter(loader)
        seen = numbers([next(batches), next(batches), next(batches)])
        del batches
        return seen

    seen = await thread(some)
    rest = await thread(lambda: checked(iter(flow.stream(idle=3.0))))
    again = set(seen) & set(itertools.chain(*rest))
    assert again == set(seen[8:]), "two were committed, the third was left in the consumer's hands"
    assert sorted(seen[:8] + list(itertools.chain(*rest))) == list(range(40))


async def test_a_plain_dataloader_commits_without_workers_and_refuses_to_guess_with_them(
    flow: Flow,
) -> None:
    await flow.put(range(8))
    guessing = iter(DataLoader(flow.stream(), batch_size=None, num_workers=1))
    with pytest.raises(RuntimeError, match="use SampleLoader"):
        next(guessing)
    guessing._shutdown_workers()  # now, not whenever the garbage collector comes by
    assert await flow.left() == (8, 8, 0)
    plain = DataLoader(flow.stream(), batch_size=None)
    assert await thread(lambda: checked(iter(plain))) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert await flow.left() == (0, 0, 0)


def consume_until_killed(url: str, run: str, workers: int, seen: Any) -> None:
    stream = SampleStream(url, run, SCHEMA, "train", COLUMNS, batch_size=4, lease=1.0)
    for number, batch in enumerate(SampleLoader(stream, num_workers=workers)):
        seen.send(batch["number"].tolist())
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("workers", [0, 2])
async def test_a_killed_loaders_rows_are_delivered_again_after_the_lease(
    flow: Flow, workers: int
) -> None:
    await flow.put(range(24))
    receive, send = multiprocessing.Pipe(duplex=False)
    arguments = (flow.dock.index.url, flow.dock.index.run, workers, send)
    process = multiprocessing.get_context("fork").Process(
        target=consume_until_killed, args=arguments
    )
    process.start()
    send.close()
    committed, held = await thread(lambda: (receive.recv(), receive.recv()))
    # join() would wait for the orphaned workers, too
    _, status = await thread(os.waitpid, process.pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    found = await thread(
        lambda: numbers(list(flow.stream(idle=8.0, ragged="packed", commit="next")))
    )
    assert sorted(found) == sorted(set(range(24)) - set(committed))
    assert set(held) <= set(found)
    assert await flow.left() == (0, 0, 0)


# ── several readers ──


@pytest.mark.parametrize("workers", [0, 2])
async def test_replicas_in_lockstep_and_their_ranks_share_every_batch(
    flow: Flow, workers: int
) -> None:
    await flow.put(range(27))

    def reader(replica: int, rank: int) -> Callable[[], list[list[int]]]:
        where = {"replica": replica, "replicas": 2, "rank": rank, "ranks": 2}
        loader = flow.loader(workers, **where)
        return lambda: checked(iter(loader))

    found = await threads(*(reader(replica, rank) for replica in range(2) for rank in range(2)))
    assert found[0] == found[1], "ranks of one replica agree"
    assert found[2] == found[3]
    assert len(found[0]) == len(found[2]), "replicas take the same number of batches"
    assert sorted(itertools.chain(*found[0], *found[2])) == list(range(27))
    assert await flow.left() == (0, 0, 0)


async def test_a_shared_batch_stays_until_its_slowest_reader_is_done(flow: Flow) -> None:
    await flow.put(range(8))
    fast, slow = (
        flow.stream(rank=rank, ranks=2, commit="explicit", lease=0.5) for rank in range(2)
    )
    quick = await thread(lambda: list(fast))
    for batch in quick:
        await thread(fast.commit, batch)
    assert await flow.dock.claim("train", 8, timeout=1.0) is None, (
        "held for the other rank, beyond a lease"
    )
    late = await thread(lambda: list(slow))
    assert numbers(late) == numbers(quick) == list(range(8))
    assert await flow.left() == (8, 0, 8)
    for batch in reversed(late):
        await thread(slow.commit, batch)
    assert await flow.left() == (0, 0, 0)


async def test_replicas_out_of_lockstep_take_what_they_can(flow: Flow) -> None:
    await flow.put(range(24))
    began = threading.Event()
    taken = threading.Event()

    def fast() -> list[list[int]]:
        found = []
        for batch in flow.stream(replica=0, replicas=2, lockstep=False):
            found.append(batch["number"].tolist())
            assert began.wait(10), "or nothing would be left for the other"
            if len(found) == 5:
                taken.set()
        return found

    def slow() -> list[list[int]]:
        batches = iter(flow.stream(replica=1, replicas=2, lockstep=False))
        first = [next(batches)["number"].tolist()]
        began.set()
        assert taken.wait(10)
        return first + checked(batches)

    found = await threads(fast, slow)
    assert sorted(itertools.chain(*found[0], *found[1])) == list(range(24))
    assert len(found[1]) == 1


async def test_lockstep_batches_are_balanced_by_tokens(flow: Flow) -> None:
    await flow.put(range(24))
    options = {"batch_size": 12, "replicas": 3, "balance_tokens": "ids"}
    found = await threads(
        *(lambda r=r: list(map(_loads, flow.stream(replica=r, **options))) for r in range(3))
    )
    for number in range(2):
        loads = [replica[number] for replica in found]
        assert {count for count, _ in loads} == {4}
        tokens = [total for _, total in loads]
        assert max(tokens) - min(tokens) <= 1, "12 lengths between 1 and 13 divide almost evenly"


def _loads(batch: Batch) -> tuple[int, int]:
    return len(batch), int(batch.columns["ids"].offsets[-1])


async def test_a_session_is_read_once(flow: Flow) -> None:
    await flow.put(range(8))
    first = flow.stream(ranks=2, commit="explicit")
    await thread(lambda: next(iter(first)))
    with pytest.raises(IndexRefused, match="has an entry 0 already"):
        await thread(lambda: next(iter(flow.stream(ranks=2, commit="explicit"))))
    other = flow.stream(ranks=2, commit="explicit", session="1", batch_size=2, idle=0.1)
    for stream in flow.streams:
        stream.close()
    assert (await thread(lambda: next(iter(other))))["number"].tolist() == [0, 1]


async def test_a_reader_whose_first_peer_never_comes_says_so(flow: Flow) -> None:
    await flow.put(range(8))
    with pytest.raises(
        TimeoutError, match="first reader of session '0' has not claimed it within 0 s"
    ):
        await thread(lambda: next(iter(flow.stream(rank=1, ranks=2, timeout=0.2))))


# ── refusals ──


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"balance_tokens": "number"}, ValueError, "one length in all rows"),
        ({"replica": 2, "replicas": 2}, ValueError, "count from 0"),
        ({"batch_size": 1, "replicas": 2}, ValueError, "leaves some of 2 replicas without rows"),
        ({"balance_tokens": "nothing"}, ColumnError, "not in the schema"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        SampleStream(
            "redis://nowhere", "run", SCHEMA, "train", COLUMNS, **({"batch_size": 4} | options)
        )


async def test_a_stage_that_a_loader_cannot_end_is_refused(index: Index, tmp_path: Path) -> None:
    stages = [
        StageSpec("reward", "rows", SCHEMA.mask(["ids"]), SCHEMA.mask(["reward"])),
        StageSpec("update", "batch", SCHEMA.mask(["reward"]), 0),
    ]
    async with Dock.open(
        index.url, index.run, SCHEMA, stages, worker="w", arena=1 << 16, directory=tmp_path
    ):
        for stage, message in (
            ("reward", "which a loader cannot write"),
            ("update", "ends in Index.train"),
        ):
            stream = SampleStream(index.url, index.run, SCHEMA, stage, COLUMNS, batch_size=1)
            with pytest.raises(ValueError, match=message):
                await thread(lambda stream=stream: next(iter(stream)))
        stream = SampleStream(index.url, index.run, SCHEMA, "nothing", COLUMNS, batch_size=1)
        with pytest.raises(ValueError, match="not declared"):
            await thread(lambda: next(iter(stream)))


# ── the partition ──


def spread(weights: list[int], split: list[list[int]]) -> int:
    sums = [sum(weights[i] for i in part) for part in split]
    return max(sums) - min(sums)


def greedy(weights: list[int], parts: int) -> list[list[int]]:
    """The longest first, each to the lightest."""
    out: list[list[int]] = [[] for _ in range(parts)]
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        min(out, key=lambda part: sum(weights[j] for j in part)).append(i)
    return out


def rounds(weights: list[int], parts: int) -> list[list[int]]:
    """Greedy with equal counts: of each ``parts`` longest one for every part, the longest to the
    lightest."""
    out: list[list[int]] = [[] for _ in range(parts)]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    for start in range(0, len(order), parts):
        lightest = sorted(out, key=lambda part: sum(weights[j] for j in part))
        for i, part in zip(order[start : start + parts], lightest, strict=False):
            part.append(i)
    return out


@settings(deadline=None)
@given(st.lists(st.integers(0, 10_000), max_size=60), st.integers(1, 9), st.booleans())
def test_balanced_is_a_partition_no_wider_than_greedy(
    weights: list[int], parts: int, equal: bool
) -> None:
    found = balanced(weights, parts, equal=equal)
    assert len(found) == parts
    assert sorted(itertools.chain(*found)) == list(range(len(weights)))
    assert all(part == sorted(part) for part in found)
    if equal:
        counts = [len(part) for part in found]
        assert max(counts) - min(counts) <= 1
    else:
        assert spread(weights, found) <= spread(weights, greedy(weights, parts))


def test_balanced_beats_both_simple_ways_on_lengths_like_those_of_responses() -> None:
    generator = torch.Generator().manual_seed(0)
    ours = 0
    theirs = 0
    for _ in range(50):
        weights = torch.randint(16, 8192, (64,), generator=generator).tolist()
        ours += spread(weights, balanced(weights, 8))
        theirs += spread(weights, rounds(weights, 8))
    assert ours < theirs / 4
