"""Peak memory of each process while an engine is made from a checkpoint: read whole by
transformers, and read by shards.

    python -m benchmarks.engines.load_memory [--model smollm2] [--ranks 1 2] [--dtype float32 bfloat16] [--json FILE]

For each dtype: the torch rollout engine, and the torch train engine on one rank and on several that
shard layers (dp, gloo). Each process is a new one; peak memory is the high-water mark of its
resident memory above what it had when torch and transformers were imported and the ranks had met.
"read": until the weights are in their place; "ready": until the engine is, which has compared its
logits with the plain forward's, and for that gathered layers, embeddings and head. Pages of a
mapped file count once they are touched. "shard": bytes of the parameters that a process holds. The
command fails when the two ways end with other weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed import FileStore
from transformers import AutoModelForCausalLM

from benchmarks import harness
from orchestration.processes.forkserver import ENVIRONMENT
from stages.engines.torch.decoding.decoder import TorchDecoder
from stages.engines.torch.parallel import interface, sharded
from stages.engines.torch.parallel.mesh import join
from stages.engines.torch.parallel.sharded import Sharded
from stages.engines.torch.train import TorchTrainEngine
from stages.model.load import load_model, model_folder, model_skeleton
from stages.parallel.layout import Layout, RankCoordinates

WAYS = ("whole", "by shards")
MIB = 2**20
OPTIONS: dict[str, Any] = {"learning_rate": 1e-6, "total_steps": 1, "device": "cpu"}


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def measure(
    way: str, engine: str, folder: Path, dtype: torch.dtype, ranks: RankCoordinates, meeting: Path
) -> dict[str, Any]:
    """Make ``engine`` in this process, one of ``ranks``.

    Returns bytes, and a digest of the weights that it holds.
    """
    read: list[int] = []
    # The model is compared with its plain forward when its weights are in their place.
    installs = "install_packed_attention"
    for place, name in ((interface, installs), (sharded, installs), (TorchDecoder, "_take_over")):
        after = getattr(place, name)
        setattr(
            place, name, lambda *given, after=after: (read.append(status("VmHWM")), after(*given))
        )
    if ranks.world > 1:
        join(ranks, FileStore(str(meeting), ranks.world), torch.device("cpu"), 300.0)
    torch.ones(64, 64) @ torch.ones(64, 64)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins again
    before = status("VmRSS")
    weights = None
    if way == "whole":
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True
        ).eval()
    elif ranks.world > 1:
        opened = model_skeleton(str(folder), dtype=dtype)
        assert opened is not None
        model, weights = opened
    else:
        model, _ = load_model(str(folder), dtype=dtype, seed=0)
    shard = sum(parameter.nbytes for parameter in model.parameters())
    digest = hashlib.sha256()
    if engine == "rollout":
        digest_of(digest, model.named_parameters())
        TorchDecoder(model, torch.device("cpu"))
    elif ranks.world == 1:
        digest_of(digest, TorchTrainEngine(model, **OPTIONS).shards().items())
    else:
        held = TorchTrainEngine(model, parallel=Sharded(ranks, weights=weights), **OPTIONS).shards()
        shard = sum(tensor.nbytes for tensor in held.values())
        digest_of(digest, held.items())
    return {
        "shard": shard,
        "read": read[0] - before,
        "ready": status("VmHWM") - before,
        "digest": digest.hexdigest(),
    }


def digest_of(digest: Any, tensors: Any) -> None:
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy())


def processes(way: str, engine: str, folder: Path, dtype: str, count: int) -> list[dict[str, Any]]:
    """:func:`measure` in ``count`` new processes."""
    with tempfile.TemporaryDirectory(prefix="adk-load-") as home:
        program = [sys.executable, "-m", "benchmarks.engines.load_memory"]
        command = [*program, "--one", way, engine, str(folder), dtype, str(count), home]
        env = {**os.environ, **ENVIRONMENT}  # as workers have
        begun = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, env=env)
            for rank in range(count)
        ]
        printed = [process.communicate()[0] for process in begun]
    assert not any(process.returncode for process in begun)
    return [json.loads(text.splitlines()[-1]) for text in printed]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--one", nargs=7, help=argparse.SUPPRESS)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    if options.one:
        way, engine, folder, dtype, count, home, rank = options.one
        ranks = Layout.for_training(dp=int(count)).coordinates(int(rank))
        print(
            json.dumps(
                measure(
                    way, engine, Path(folder), getattr(torch, dtype), ranks, Path(home) / "meeting"
                )
            )
        )
        return
    folder = model_folder(options.model)
    rows = []
    print(
        f"{'dtype':9} {'engine':10} {'rank':>5} {'shard MiB':>10} "
        + " ".join(f"{way + ': read ready':>22}" for way in WAYS)
    )
    for dtype in options.dtype:
        for engine, count in [("rollout", 1), *(("train", count) for count in options.ranks)]:
            found = {way: processes(way, engine, folder, dtype, count) for way in WAYS}
            for rank in range(count):
                at = {way: found[way][rank] for way in WAYS}
                assert len({one["digest"] for one in at.values()}) == 1, "the weights differ"
                figures = [
                    f"{at[way]['read'] / MIB:14.0f} {at[way]['ready'] / MIB:7.0f}" for way in WAYS
                ]
                name = engine if count == 1 else f"{engine} dp={count}"
                print(
                    f"{dtype:9} {name:10} {rank:5} {at[WAYS[0]]['shard'] / MIB:10.0f} "
                    f"{' '.join(figures)}",
                    flush=True,
                )
                rows.append({"dtype": dtype, "engine": engine, "ranks": count, "rank": rank, **at})
    if options.json:
        options.json.write(rows)


if __name__ == "__main__":
    main()
