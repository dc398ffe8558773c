"""What parallel strategies of the train engine cost: bytes that are sent, counted and by formula.

    python -m benchmarks.parallel [--world 1 2 4 8] [--hidden 256] [--json FILE]

**bytes**: real ranks (gloo) train one step of a small model; each collective call is seen as torch dispatches it and its
bytes are counted as a ring would send them. Beside it the formula (stages/engines/costs.py), which knows sizes alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.costs import Step, sent
from stages.engines.plans import GroupShape, deal, plan_micro_batches
from stages.engines.strategies import Ranks
from stages.engines.torch.sharded import ShardedTrainEngine
from stages.resharding.layout import model_state
from tests.batches import make_batch, stack, unstack
from tests.ranks import of_product

PRODUCTS: list[dict[str, int]] = [
    {"dp": 1},
    {"dp": 2},
    {"tp": 2},
    {"dp": 4},
    {"dp": 4, "dp_replicate": 2},
    {"dp": 2, "tp": 2},
    {"tp": 4},
    {"dp": 8},
    {"dp": 8, "dp_replicate": 2},
    {"dp": 4, "tp": 2},
    {"dp": 2, "tp": 4},
]
GROUPS = [(24, (40,) * 4)] * 16  # prompts of 24 tokens with 4 responses of 40 each
BUDGET = 400  # tokens of a micro-batch
SENDS = {  # what a rank sends of a call over n ranks: by which argument, how many times its bytes
    "allgather_base": (1, lambda n: n - 1),
    "reduce_scatter_base": (0, lambda n: n - 1),
    "all_gather_into_tensor": (0, lambda n: n - 1),
    "reduce_scatter_tensor": (0, lambda n: (n - 1) / n),
    "all_reduce": (0, lambda n: 2 * (n - 1) / n),
    "allreduce": (0, lambda n: 2 * (n - 1) / n),
    "allgather": (1, lambda n: n - 1),
    "all_to_all_single": (0, lambda n: (n - 1) / n),
    "alltoall_base": (1, lambda n: (n - 1) / n),
    "send": (0, lambda n: 1),
}


class Counted(TorchDispatchMode):
    """Bytes that this rank sends, by call, while it lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and (known := SENDS.get(name.strip("_").removesuffix("_"))):
            at, times = known
            self.bytes[name.strip("_")] += int(_nbytes(args[at]) * times(_group_size(args)))
        return func(*args, **(kwargs or {}))


def _nbytes(given: Any) -> int:
    return given.nbytes if isinstance(given, torch.Tensor) else sum(map(_nbytes, given))


def _group_size(args: Sequence[Any]) -> int:
    for given in args:
        if isinstance(given, str) and given.isdecimal():
            return dist.get_world_size(_resolve_process_group(given))
        if isinstance(given, torch.ScriptObject) and hasattr(dist.ProcessGroup, "unbox"):
            try:
                return int(dist.ProcessGroup.unbox(given).size())
            except (RuntimeError, TypeError):
                continue
    raise ValueError(f"no group among {args}")


def model_of(hidden: int) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 4, "vocab_size": 512}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4))  # type: ignore[arg-type]


def step_of(ranks: Ranks, hidden: int) -> tuple[dict[str, int], list[int]]:
    """What this rank sends in a step, by call; and the tokens of its replica's micro-batches."""
    engine = ShardedTrainEngine(
        model_of(hidden), ranks, learning_rate=1e-4, total_steps=1, token_budget=BUDGET, device="cpu"
    )
    shapes = [GroupShape(prompt, responses) for prompt, responses in GROUPS]
    share = deal(shapes, ranks.dp)[ranks.replica]
    rows = unstack(make_batch(GROUPS))
    first = [4 * group for group in range(len(GROUPS))]
    kept = [rows[first[piece.group] + row] for piece in share for row in piece.rows]
    groups = [GroupShape(24, (40,) * len(piece.rows)) for piece in share]
    plan = plan_micro_batches(groups, BUDGET)
    with Counted() as counted:
        engine.train_batch(stack(kept), GRPO())
    return dict(counted.bytes), [sum(groups[p.group].tokens(p.rows) for p in pieces) for pieces in plan]


def measure(worlds: Sequence[int], hidden: int) -> list[dict[str, Any]]:
    state, found = model_state(model_of(hidden).config), []
    for chosen in PRODUCTS:
        if Ranks(0, **chosen).world not in worlds:
            continue
        calls, tokens = of_product(chosen, step_of, hidden)[0]
        parts = sent(state, Ranks(0, **chosen), Step(tuple(tokens), hidden))
        found.append({"product": chosen, "counted": sum(calls.values()), "calls": calls, "formula": parts})
    return found


def main(argv: list[str]) -> int:
    """Measure, print, and write the file of ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    found = measure(options.world, options.hidden)
    table = Table("product", "sent, MB", "by formula", "ratio", "of it")
    for cell in found:
        total, formula = cell["counted"], sum(cell["formula"].values())
        shares = ", ".join(f"{name} {nbytes / 1e6:.2f}" for name, nbytes in cell["formula"].items())
        ratio = f"{total / formula:.4f}" if formula else "-"
        name = " ".join(f"{key}={size}" for key, size in cell["product"].items())
        table.add_row(name, f"{total / 1e6:.3f}", f"{formula / 1e6:.3f}", ratio, shares)
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
