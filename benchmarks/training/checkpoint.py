"""What a checkpoint costs a training step: the seconds in which training waits, and those of the
steps beside the writing.

    python -m benchmarks.training.checkpoint [--model smollm2|tiny|PATH] [--dtype float32] [--steps 4] [--json FILE]

    steps alone ─▶ copy the state (exposed) ─▶ steps beside the writing, until it is whole ─▶ three times

The step is the update stage's: a train batch of 4 groups x 8 rows. ``exposed_share`` is the copy's
seconds over those of a median step alone, without the first copy, which also allocates its memory
(``first_exposed_share``). ``load_cold_ratio`` and ``load_warm_ratio`` are the seconds of a load
that verifies its files over those of one that does not, in turn: with files that are read from the
disk, and with files in memory. ``beside_share`` is the additional time of a step beside the writing
over a step alone: on a CPU both share the cores.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from tensordict import TensorDict

from benchmarks import harness
from orchestration.checkpoints import checkpoint
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.torch.train import TorchTrainEngine
from stages.model import manifest
from stages.model.load import load_model

GROUPS = 4
ROWS = 8
PROMPT = 45
RESPONSE = 16
TIMES = 3
LOADS = 5


def batch(vocabulary: int) -> TensorDict:
    count = GROUPS * ROWS
    drawn = torch.Generator().manual_seed(0)

    def jagged(rows: int, length: int, each: int) -> torch.Tensor:
        ids = torch.randint(0, vocabulary, (rows, length), generator=drawn).repeat_interleave(
            each, 0
        )
        return torch.nested.nested_tensor(list(ids), layout=torch.jagged)

    rows = TensorDict({}, batch_size=[count])
    rows["group"], rows["place"] = torch.arange(count) // ROWS, torch.arange(count) % ROWS
    rows["prompt_ids"], rows["response_ids"] = (
        jagged(GROUPS, PROMPT, ROWS),
        jagged(count, RESPONSE, 1),
    )
    logprobs = [torch.full((RESPONSE,), -2.0)] * count
    rows["rollout_logprobs"] = torch.nested.nested_tensor(logprobs, layout=torch.jagged)
    rows["advantage"] = torch.randn(count, generator=drawn)
    return rows


async def measure(source: str, dtype: torch.dtype, steps: int, folder: Path) -> dict[str, float]:
    model, tokenizer = load_model(source, dtype=dtype, seed=0)
    engine = TorchTrainEngine(model, learning_rate=1e-6, total_steps=10**6)
    writer = checkpoint.Writer(engine)
    rows = batch(len(tokenizer))
    algorithm = GRPO()

    async def step() -> float:
        began = time.perf_counter()
        await asyncio.to_thread(engine.train_batch, rows, algorithm)
        return time.perf_counter() - began

    await step()
    alone = []
    beside = list[float]()
    exposed = list[float]()
    whole = list[float]()
    for version in range(TIMES):
        alone += [await step() for _ in range(steps)]
        began = time.perf_counter()
        writing = await writer.begin(checkpoint.begin(folder, version))
        exposed.append(time.perf_counter() - began)
        while not writing.done():
            beside.append(await step())
        await writing
        state = {"counters": {}, "remake": []}
        await asyncio.to_thread(checkpoint.finish, folder, tokenizer, version, state, 1)
        whole.append(time.perf_counter() - began)
    usual = statistics.median(alone)
    saved = checkpoint.latest(folder)
    assert saved is not None
    return {
        "step_seconds": usual,
        "exposed_seconds": statistics.median(exposed[1:]),
        "exposed_share": statistics.median(exposed[1:]) / usual,
        "first_exposed_share": exposed[0] / usual,
        "beside_share": statistics.median(beside) / usual - 1,
        "whole_seconds": statistics.median(whole),
        **loading(saved, engine),
    }


def loading(saved: checkpoint.Checkpoint, engine: TorchTrainEngine) -> dict[str, float]:
    """Seconds of a load with digests and without them, in turn; from a disk, and from memory where
    its files were read before; and of hashing all files, as when it is written."""
    digests = saved.path / manifest.MANIFEST
    files = [path for path in saved.path.rglob("*") if path.is_file()]
    aside = digests.with_name("aside")
    seconds = defaultdict[str, list[float]](list)
    for _ in range(LOADS):
        for name in ("verified", "unverified"):
            if name == "unverified":
                digests.rename(aside)
            for where in ("cold", "warm"):
                if where == "cold":
                    forget(files)
                began = time.perf_counter()
                saved.load_into(engine)
                seconds[f"load_{where}_{name}"].append(time.perf_counter() - began)
            if name == "unverified":
                aside.rename(digests)
        began = time.perf_counter()
        manifest.write(saved.path)
        seconds["digests"].append(time.perf_counter() - began)
    found = {f"{name}_seconds": statistics.median(times) for name, times in seconds.items()}
    for where in ("cold", "warm"):
        found[f"load_{where}_ratio"] = (
            found[f"load_{where}_verified_seconds"] / found[f"load_{where}_unverified_seconds"]
        )
    return found


def forget(files: Sequence[Path]) -> None:
    """Make the system read ``files`` from the disk again."""
    for path in files:
        if path.exists():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(
        dir=Path.cwd()
    ) as folder:  # on a disk: the folder of temporary files may be memory
        found = asyncio.run(
            measure(options.model, getattr(torch, options.dtype), options.steps, Path(folder))
        )
    for name, value in found.items():
        print(f"{name:22} {value:,.3f}")
    if options.json:
        options.json.write(found)


if __name__ == "__main__":
    main()
