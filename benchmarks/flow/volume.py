"""How many bytes one iteration moves between stages: the paper's Eq. 2 and its Table 1, and an
iteration of ours beside it.

    python -m benchmarks.flow.volume [--groups 16] [--samples 8] [--prompt 256] [--response 1024] [--json FILE]

Eq. 2 of MindSpeed RL (arXiv 2507.19017) counts what a global batch moves when every put and every
get of a column crosses the network once, rows padded to their greatest length:

    TCV = G · N · B · (2·PL + 3n·SL + 8·M)        bytes; the paper's GB are 1024³ of them

G prompts, N responses each, B bytes an element, PL and SL the lengths of prompt and response
columns, n columns of length SL and M integers a sample. We read its terms as moves: the prompt is
put once and got once, a column of length SL is put once and got by two stages on average, an
integer is moved eight times. (The paper gives the sum; which stage makes which move is our reading,
and the iteration below is built so that the first two terms hold move by move.)

The iteration: n = 5 columns of length SL, M = 3 integers, through six stages.

    stage        gets                                                 puts
    admission                                                         prompt_ids
    rollout      prompt_ids                                           input_ids, prompt_length, response_length
    reward       input_ids, lengths                                   reward
    inference    input_ids, lengths                                   old_logprobs
    reference    input_ids, lengths                                   ref_logprobs
    advantage    old_logprobs, ref_logprobs, lengths, reward          advantages, returns
    update       all five of length SL, lengths, reward

That is 1 put and 1 get of length PL, 5 puts and 10 gets of length SL (3n), 3 puts and 12 gets of an
integer (15, where the equation has 8·M = 24: a few bytes a sample). It runs three times through
real docks, over real sockets, with the payload counted by the warehouses' servers:

    central      one warehouse on a node without workers: every move crosses the wire, as Eq. 2 counts
    dock         admission and rollout on one node, the other stages on another, a warehouse on each: what is written stays
                 on its node, and only rollout's columns cross, when the others read them
    dock, ragged the same, with responses of differing lengths, packed instead of padded
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from pipeline.data.columns import Column, Schema
from pipeline.index.client import StageSpec
from pipeline.index.embedded import EmbeddedIndex
from pipeline.warehouse.dock import Dock

SECRET = b"of one benchmark run on one machine"
ELEMENT = 4  # bytes: the paper's B
LONG = ("input_ids", "old_logprobs", "ref_logprobs", "advantages", "returns")  # the equation's n
INTEGERS = ("prompt_length", "response_length", "reward")  # the equation's M
LENGTHS = ("prompt_length", "response_length")
K = 1024


def transfer_volume(
    groups: int, samples: int, prompt: int, n: int, response: int, m: int, element: int = ELEMENT
) -> int:
    """Eq. 2 of MindSpeed RL (arXiv 2507.19017), in bytes: what one iteration of ``groups`` ·
    ``samples`` samples moves, with prompts of ``prompt`` elements, ``n`` columns of ``response``
    elements and ``m`` integers, ``element`` bytes each.

    >>> round(transfer_volume(256, 8, 2048, 5, 8192, 3) / 1024**3, 3)
    0.969
    """
    return groups * samples * element * (2 * prompt + 3 * n * response + 8 * m)


@dataclass(frozen=True)
class TableRow:
    """One row of the paper's Table 1: its setting, then what it prints: GB (1024³ bytes), seconds
    at 100 MB/s and 1 GB/s."""

    groups: int
    samples: int
    prompt: int
    n: int
    response: int
    m: int
    gb: float
    slow: float
    fast: float

    @property
    def computed(self) -> tuple[float, float, float]:
        gb = (
            transfer_volume(self.groups, self.samples, self.prompt, self.n, self.response, self.m)
            / K**3
        )
        return gb, gb * K / 100, gb


TABLE_1 = (
    TableRow(256, 8, 2 * K, 5, 8 * K, 3, 0.96, 9.92, 0.97),
    TableRow(256, 16, 2 * K, 5, 16 * K, 3, 3.81, 39.0, 3.81),
    TableRow(1 * K, 16, 2 * K, 5, 16 * K, 3, 15.2, 156.1, 15.2),
    TableRow(1 * K, 32, 4 * K, 8, 32 * K, 5, 97.0, 993.3, 97.0),
    TableRow(4 * K, 32, 4 * K, 8, 32 * K, 5, 388.0, 3900, 388.0),
    TableRow(8 * K, 64, 4 * K, 8, 64 * K, 5, 3100, 31000, 3100),
)


@dataclass(frozen=True)
class Step:
    """A stage of the iteration: where it runs and what it moves."""

    name: str
    gets: tuple[str, ...]
    puts: tuple[str, ...]
    generates: bool = False  # runs on the node of generation


STEPS = (
    Step("admission", (), ("prompt_ids",), True),
    Step("rollout", ("prompt_ids",), ("input_ids", *LENGTHS), True),
    Step("reward", ("input_ids", *LENGTHS), ("reward",)),
    Step("inference", ("input_ids", *LENGTHS), ("old_logprobs",)),
    Step("reference", ("input_ids", *LENGTHS), ("ref_logprobs",)),
    Step("advantage", ("old_logprobs", "ref_logprobs", *INTEGERS), ("advantages", "returns")),
    Step("update", (*LONG, *INTEGERS), ()),
)


@dataclass(frozen=True)
class Batch:
    """One scaled-down global batch."""

    groups: int = 16
    samples: int = 8
    prompt: int = 256
    response: int = 1024

    @property
    def rows(self) -> int:
        return self.groups * self.samples

    @property
    def equation(self) -> int:
        return transfer_volume(
            self.groups, self.samples, self.prompt, len(LONG), self.response, len(INTEGERS)
        )

    def width(self, column: str) -> int:
        """Elements of a padded row."""
        return self.prompt if column == "prompt_ids" else self.response if column in LONG else 1

    def counted(self, step: Step) -> int:
        """Bytes that ``step`` moves when each of its gets and puts crosses the network once."""
        return self.rows * ELEMENT * sum(self.width(column) for column in (*step.gets, *step.puts))

    def schema(self, ragged: bool) -> Schema:
        columns = []
        for name in ("prompt_ids", *LONG, *INTEGERS):
            dtype = torch.int32 if name.endswith("_ids") or name in LENGTHS else torch.float32
            if name in INTEGERS:
                columns.append(Column.scalar(name, dtype))
            else:
                ours = (
                    Column.ragged(name, dtype)
                    if ragged
                    else Column.fixed(name, dtype, [self.width(name)])
                )
                columns.append(ours)
        return Schema(columns)

    def lengths(self, column: str, ragged: bool) -> torch.Tensor:
        """int64 [rows], each column of length SL like the others: full when padded, else 1/8 of it
        up to all of it."""
        full = self.width(column)
        if not ragged:
            return torch.full([self.rows], full)
        generator = torch.Generator().manual_seed(0)
        return torch.randint(full // 8, full + 1, (self.rows,), generator=generator)

    def values(self, schema: Schema, step: Step, ragged: bool) -> dict[str, Any]:
        """What ``step`` puts for all rows: row i of any column begins with i, so that a mix-up is
        seen."""
        out: dict[str, Any] = {}
        for name in step.puts:
            first = torch.arange(self.rows).to(schema[name].dtype)  # type: ignore[arg-type]
            if name in INTEGERS:
                out[name] = first
            else:
                parts = [
                    value.repeat(n)
                    for value, n in zip(first, self.lengths(name, ragged).tolist(), strict=True)
                ]
                out[name] = parts if ragged else torch.stack(parts)
        return out


@dataclass(frozen=True)
class Moved:
    """Payload bytes that crossed the wire in one stage, as the warehouses' servers count them."""

    step: str
    got: int
    put: int


async def iteration(
    batch: Batch, url: str, home: Path, *, central: bool, ragged: bool
) -> list[Moved]:
    """One global batch through all stages, stage after stage as a synchronous iteration goes, each
    row checked."""
    schema = batch.schema(ragged)
    run = f"volume-{'central' if central else 'dock'}-{'ragged' if ragged else 'padded'}"
    stages = [
        StageSpec(
            step.name,
            "rows",
            schema.mask(step.gets),
            schema.mask(step.puts),
            releases=step is STEPS[-1],
        )
        for step in STEPS[1:]
    ]
    arena = 2 * ELEMENT * batch.rows * (batch.prompt + len(LONG) * batch.response) + (16 << 20)
    async with AsyncExitStack() as opened:

        async def dock(node: str, warehouse: str) -> Dock:
            options: dict[str, Any] = {
                "worker": node,
                "warehouse": warehouse,
                "node": node,
                "secret": SECRET,
            }
            return await opened.enter_async_context(
                Dock.open(
                    url, run, schema, stages, arena=arena, directory=home / run / node, **options
                )
            )

        if central:
            stores = [await dock("store", "store")]
            docks = {}
            # these have no warehouse, so they do not join with one
            for node in ("generation", "others"):
                options: dict[str, Any] = {
                    "worker": node,
                    "warehouse": "store",
                    "node": node,
                    "secret": SECRET,
                }
                docks[node] = Dock(stores[0].index, schema, directory=home / run / node, **options)
                opened.push_async_callback(docks[node].close)
        else:
            docks = {node: await dock(node, node) for node in ("generation", "others")}
            stores = list(docks.values())
        for store in stores:
            await store.serve("127.0.0.1")

        def counted() -> tuple[int, int]:
            servers = [store.warehouses.server for store in stores]
            return sum(s.payload_sent for s in servers if s), sum(
                s.payload_received for s in servers if s
            )

        moved = []
        for step in STEPS:
            before = counted()
            worker = docks["generation" if step.generates else "others"]
            rows = batch.values(schema, step, ragged)
            if not step.gets:
                await worker.put(rows, samples=batch.samples)
            else:
                claim = await worker.claim(step.name, batch.rows, timeout=30)
                assert claim is not None, f"{step.name}: nothing to claim"
                assert claim.row.tolist() == list(range(batch.rows)), (
                    f"{step.name}: rows are missing"
                )
                found = await worker.fetch_packed(claim, step.gets)
                for name in step.gets:
                    lengths = (
                        torch.ones(batch.rows, dtype=torch.int64) if name in INTEGERS else None
                    )
                    lengths = batch.lengths(name, ragged) if lengths is None else lengths
                    expected = torch.arange(batch.rows).repeat_interleave(lengths)
                    assert torch.equal(found[name].values.reshape(-1).long(), expected), (
                        f"{step.name}: wrong {name}"
                    )
                await worker.commit(claim, range(batch.rows), rows or None)
            got, put = (now - then for now, then in zip(counted(), before, strict=True))
            moved.append(Moved(step.name, got, put))
        return moved


ARMS = (("central", True, False), ("dock", False, False), ("dock, ragged", False, True))


async def measure(batch: Batch) -> dict[str, list[Moved]]:
    with (
        tempfile.TemporaryDirectory(prefix="adk-") as directory,
        EmbeddedIndex(Path(directory) / "index") as index,
    ):
        home = Path(directory)
        return {
            name: await iteration(batch, index.url, home, central=central, ragged=ragged)
            for name, central, ragged in ARMS
        }


def number(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def print_table_1() -> None:
    print(
        "Table 1 of MindSpeed RL (arXiv 2507.19017) from its Eq. 2, B = 4; each figure: computed, "
        "printed, difference\n"
    )
    columns = "".join(
        f"{head:>33}" for head in ("TCV, GB", "seconds at 100 MB/s", "seconds at 1 GB/s")
    )
    print(f"{'G':>6}{'N':>4}{'PL':>6}{'n':>3}{'SL':>7}{'M':>3}{columns}")
    for row in TABLE_1:
        setting = (
            f"{row.groups:>6}{row.samples:>4}{row.prompt:>6}{row.n:>3}{row.response:>7}{row.m:>3}"
        )
        printed = (row.gb, row.slow, row.fast)
        figures = "".join(
            f"{number(ours):>14}{number(theirs):>10}{ours / theirs - 1:>+9.2%}"
            for ours, theirs in zip(row.computed, printed, strict=True)
        )
        print(setting + figures)
    print(
        "\nThe paper cuts or rounds what it prints to two to four digits, which is where the "
        "differences come from.\n"
    )


def print_iteration(batch: Batch, found: dict[str, list[Moved]]) -> None:
    print(
        f"One iteration through the dock: G = {batch.groups}, N = {batch.samples}, PL = "
        f"{batch.prompt}, n = {len(LONG)}, SL = {batch.response}, M = {len(INTEGERS)}, B = "
        f"{ELEMENT}; payload bytes on the wire\n"
    )
    print(f"{'stage':<12}{'moves counted':>16}" + "".join(f"{arm:>16}" for arm in found))
    for i, step in enumerate(STEPS):
        cells = "".join(f"{moved[i].got + moved[i].put:>16,}" for moved in found.values())
        print(f"{step.name:<12}{batch.counted(step):>16,}{cells}")
    totals = {arm: sum(m.got + m.put for m in moved) for arm, moved in found.items()}
    counted = sum(batch.counted(step) for step in STEPS)
    print(f"{'all':<12}{counted:>16,}" + "".join(f"{total:>16,}" for total in totals.values()))
    print(f"{'Eq. 2':<12}{batch.equation:>16,}" + f"{batch.equation:>16,}" * len(totals))
    shares = "".join(f"{total / batch.equation:>15.2%} " for total in totals.values())
    print(f"{'of Eq. 2':<12}{counted / batch.equation:>15.2%} {shares}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    for name, default in asdict(Batch()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    batch = Batch(options.groups, options.samples, options.prompt, options.response)
    torch.set_num_threads(1)
    print_table_1()
    found = asyncio.run(measure(batch))
    print_iteration(batch, found)
    if options.json:
        record = {
            "table_1": [
                {
                    **asdict(row),
                    "computed": dict(zip(("gb", "slow", "fast"), row.computed, strict=True)),
                }
                for row in TABLE_1
            ],
            "iteration": {
                **asdict(batch),
                "equation_bytes": batch.equation,
                "counted_bytes": {step.name: batch.counted(step) for step in STEPS},
                "arms": {arm: [asdict(m) for m in moved] for arm, moved in found.items()},
            },
        }
        options.json.write(record)


if __name__ == "__main__":
    main()
