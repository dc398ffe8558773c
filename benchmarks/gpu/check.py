"""What only a machine with an accelerator can measure: the torch engines' numbers against the
CPU's, and their speed.

    make gpu-check                                  # or: python -m benchmarks.gpu.check [--json FILE]
    python -m benchmarks.gpu.check --part rollout   # one part, without a limit of time
    python -m benchmarks.gpu.check --rehearse       # on a CPU, small: does it run; its speeds then mean nothing
    make gpu-wheels                                 # what to carry to a machine that has torch and no network

Each part has a process and a limit of time of its own, so that one that fails leaves the others.
The command ends with exit code 1 when a part failed or a gap passed its limit.

  numbers    tiny models, float32. Rollout: the device's responses, scored by transformers' plain forward on the CPU,
             before and after a swap of weights. Update: one step on the device and one on the CPU from equal weights.
             Replay: the same three steps by two engines of the device, in float32 and in mixed precision; no weight may
             differ in a bit.
  rollout    a model of 0.5 billion random weights (the sizes of Qwen2.5-0.5B), bfloat16. Tokens/s, each beside its
             floor: operations / matmul rate and bytes / bandwidth of this device, measured here; with decode steps
             recorded, and without. Swap: new weights from host memory into the running engine: bytes, exposed and
             hidden seconds, and the rate beside that of a page-locked copy.
  update     the same model's train step, and with its layers compiled.
  turns      both engines on one device, one after the other: the bytes that training takes away and brings back, their
             rates beside those of page-locked copies, and what is left of training while the other has the device
             (it fails when that is anything).
  Qwen3-…    a GRPO step by both engines, with the MFU of training and the share of the bandwidth of decoding, beside
             transformers' generate and a plain step (benchmarks/gpu/step.py).
  colocated  GRPO with the first model as a colocated run, with and without prefetch (benchmarks/runs/colocated.py): seconds
             a step, exposed and hidden seconds of a step's swaps, bytes on the device in either turn.
  tiny, …    the recipe `tiny`, both stages on the device, apart and in turns (it fails when the reward falls).

Decode steps are recorded and replayed by the device where torch can (``stages.device.new_graph``).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict

from benchmarks import harness
from benchmarks.gpu.wheels import missing

if problem := missing():  # before anything of it is imported
    print(problem, file=sys.stderr)
    sys.exit(2)

import torch

from benchmarks.gpu.parts import PARTS, Failed, command_of, limit_of, marked, of_process
from benchmarks.gpu.work import Figure, Setting, line
from orchestration.logs import configure
from stages import device as devices


async def of_parts(setting: Setting) -> AsyncIterator[tuple[str, Figure | Failed]]:
    """Yield what each part finds, one after the other."""
    for name in PARTS:
        async for found in of_process(command_of(name, setting), limit_of(name, setting)):
            yield name, found


async def of_part(name: str, setting: Setting) -> AsyncIterator[tuple[str, Figure | Failed]]:
    """Yield what one part finds, in this process."""
    async for figures in PARTS[name].measure(setting):
        for figure in figures:
            yield name, figure


async def report(
    found: AsyncIterator[tuple[str, Figure | Failed]], setting: Setting, *, is_marked: bool
) -> tuple[list[Figure], dict[str, str]]:
    """Print what is found, as it comes. Return all figures, and why parts failed."""
    figures: list[Figure] = []
    failures: dict[str, str] = {}
    async for part, one in found:
        if isinstance(one, Failed):
            failures[part] = one.reason
            print(f"{part} FAILED: {one.reason}", flush=True)
            continue
        figures.append(one)
        print(marked(one) if is_marked else line(one, setting.device), flush=True)
    return figures, failures


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--device", help="auto, cpu, cuda, npu (default: auto; cpu to rehearse)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--part", choices=PARTS, help="this part alone, in this process")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny models and cases everywhere: does it run"
    )
    parser.add_argument("--marked", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    device = devices.select(args.device or ("cpu" if args.rehearse else "auto"))
    if device.type == "cpu" and not args.rehearse:
        parser.error(
            "no accelerator here; --rehearse shows that the command runs, its speeds mean nothing"
        )
    configure(terminal=False)  # what the runs log is not for standard output
    graphs = "not recorded" if devices.new_graph(device) is None else "recorded"
    if not args.marked:
        print(
            f"torch {torch.__version__}, device {device}, decode steps {graphs}, medians of "
            f"{args.repeat}",
            flush=True,
        )
    setting = Setting(device, args.rehearse, args.repeat)
    found = of_part(args.part, setting) if args.part else of_parts(setting)
    figures, failures = asyncio.run(report(found, setting, is_marked=args.marked))
    if args.json:
        record = {
            "device": str(device),
            "figures": [asdict(figure) for figure in figures],
            "failed": failures,
        }
        args.json.write(record)
    return int(bool(failures) or any(figure.failed for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
