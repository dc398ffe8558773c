"""The calls of `docs/sample-flow.md`, timed: TransferQueue's own and ours, by turns in one
run.

    python -m benchmarks.flow.calls [--rounds 7]      needs transferqueue==0.1.11 and ray

Each case puts a batch, gets it and clears it; µs a sample, medians over the rounds, and how many
times faster ours is. Columns are those of the sample flow's benchmark: three of int64 and two of
float32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import harness
from pipeline.compat import transfer_queue as ours

CASES = {
    "64 x 8192": (64, 8192),
    "1024 x 128": (1024, 128),
    "1024 x U(16-240)": (1024, 0),
    "1 x 8192": (1, 8192),
}
DTYPES = {
    "ids": torch.int64,
    "mask": torch.int64,
    "positions": torch.int64,
    "old": torch.float32,
    "ref": torch.float32,
}


def rows(count: int, length: int) -> TensorDict:
    if length:
        return TensorDict(
            {name: torch.ones(count, length).to(d) for name, d in DTYPES.items()},
            batch_size=[count],
        )
    lengths = torch.randint(16, 241, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    fields = {
        name: torch.nested.as_nested_tensor(
            [torch.ones(n).to(dtype) for n in lengths], layout=torch.jagged
        )
        for name, dtype in DTYPES.items()
    }
    return TensorDict(fields, batch_size=[count])


def turn(queue: Any, fields: TensorDict, partition: str) -> dict[str, float]:
    """Seconds of one put, get and clear."""
    keys = [f"{partition}-{i}" for i in range(fields.batch_size[0])]
    calls = {
        "put": lambda: queue.kv_batch_put(keys, partition, fields),
        "get": lambda: queue.kv_batch_get(keys, partition),
        "clear": lambda: queue.kv_clear(keys, partition),
    }
    spent = {}
    for name, call in calls.items():
        began = time.perf_counter()
        call()
        spent[name] = time.perf_counter() - began
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with harness.needs("bench"):
        import ray  # noqa: F401
        import transfer_queue  # noqa: F401
    from tests.pipeline.compat import transfer_queue_calls as calls

    torch.set_num_threads(1)
    theirs = calls.start()
    ours.init({"arena": 1 << 28})
    try:
        print(f"{'case':18} {'call':6} {'TransferQueue':>14} {'ours':>10}   ratio   (µs a sample)")
        for case, (count, length) in CASES.items():
            fields = rows(count, length)
            both = [
                (turn(theirs, fields, case), turn(ours, fields, case)) for _ in range(rounds + 1)
            ][1:]
            for call in ("put", "get", "clear"):
                a, b = (
                    statistics.median(pair[i][call] for pair in both) / count * 1e6 for i in (0, 1)
                )
                print(f"{case:18} {call:6} {a:14.1f} {b:10.2f} {a / b:7.1f}")
    finally:
        ours.close()
        calls.stop(theirs)


if __name__ == "__main__":
    main()
