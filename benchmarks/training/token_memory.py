"""Peak memory of one training pass against its tokens: a small model of a kind, forward and
backward of one row.

    python -m benchmarks.training.token_memory [--tokens 2048 4096 8192 16384 32768] [--layers 2] [--width 256] [--window W]
                                               [--dtype float32] [--json FILE]

Each number of tokens runs in a process of its own; peak memory is the high-water mark of its
resident memory above what it had before the pass (on an accelerator: of its allocated memory). The
vocabulary is small, so that attention and activations are what grows. Beside it:
what a dense mask of the response's tokens × all tokens would take.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from transformers import MistralConfig, MistralForCausalLM

from benchmarks import harness
from stages import device as devices
from stages.engines.torch.model.packing import pack
from stages.engines.torch.train import TorchTrainEngine

PROMPT = 256
HEAD = 64


def measure(
    tokens: int, layers: int, width: int, window: int | None, dtype: torch.dtype
) -> dict[str, float]:
    """Peak bytes and seconds of a forward and backward over a prompt of ``PROMPT`` and a response
    to ``tokens`` in all."""
    config = MistralConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD,
        num_key_value_heads=max(1, width // HEAD // 2),
        max_position_embeddings=tokens,
        sliding_window=window,
    )
    device = devices.select()
    model = MistralForCausalLM(config)
    torch.nn.Module.to(model, dtype)
    engine = TorchTrainEngine(model, learning_rate=1e-6, total_steps=1, device=device)
    random = torch.Generator().manual_seed(0)
    small = pack(
        [torch.randint(512, (16,), generator=random)],
        [[torch.randint(512, (16,), generator=random)]],
        device,
    )
    # libraries and gradients have their memory
    engine.packed_model.outputs(small)[0].sum().backward()
    prompt = torch.randint(512, (PROMPT,), generator=random)
    packed = pack(
        [prompt], [[torch.randint(512, (tokens - PROMPT + 1,), generator=random)]], device
    )
    before = _peak(device)
    began = time.perf_counter()
    engine.packed_model.outputs(packed)[0].sum().backward()
    seconds = time.perf_counter() - began
    return {"tokens": tokens, "peak": _peak(device) - before, "seconds": seconds}


def _peak(device: torch.device) -> int:
    """The most bytes that this process has had: resident, or allocated on an accelerator."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(
        torch.get_device_module(torch.accelerator.current_accelerator()).max_memory_allocated()
    )


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--window", type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    if options.one:
        print(
            json.dumps(
                measure(options.tokens[0], options.layers, options.width, options.window, dtype)
            )
        )
        return
    rows = []
    print(f"{'tokens':>8} {'peak MiB':>10} {'KiB a token':>12} {'a dense mask MiB':>17} {'s':>8}")
    for tokens in options.tokens:
        program = [sys.executable, "-m", "benchmarks.training.token_memory"]
        command = [*program, "--one", "--tokens", str(tokens), "--dtype", options.dtype]
        command += ["--layers", str(options.layers), "--width", str(options.width)]
        command += ["--window", str(options.window)] if options.window else []
        row = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[
                -1
            ]
        )
        row["mask"] = dtype.itemsize * (tokens - PROMPT) * tokens
        rows.append(row)
        peak = row["peak"] / 2**20
        mask = row["mask"] / 2**20
        print(
            f"{tokens:8} {peak:10.0f} {row['peak'] / tokens / 1024:12.1f} {mask:17.0f} "
            f"{row['seconds']:8.1f}",
            flush=True,
        )
    if options.json:
        kind = {name: getattr(options, name) for name in ("layers", "width", "window", "dtype")}
        options.json.write({"rows": rows, **kind})


if __name__ == "__main__":
    main()
