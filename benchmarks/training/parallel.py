"""What parallel strategies of the train engine cost: bytes that are sent, counted and by formula;
seconds over links.

    python -m benchmarks.training.parallel [--world 1 2 4 8] [--hidden 256] [--json FILE]
    sudo python -m benchmarks.training.parallel --links [--mbit 200] [--delay-ms 0] [--layer-ms 40] [...]

**bytes**: real ranks (gloo) train one step of a small model; each collective call is seen as torch
dispatches it and its bytes are counted as a ring would send them; the mean of the ranks, whose
experts do not get equally many tokens. Beside it the formula (benchmarks/planning/rank_bytes.py), which
knows sizes alone.

**links**: each rank is in a network namespace of its own, whose link has ``--mbit`` both ways and a
delay. A layer's compute is a clock's: ``--layer-ms`` for 100 tokens forward and twice that
backward, divided by tp; the real compute of the small model is beside it. ``apart`` is what compute
and sending take one after the other, by the formulas; where a step takes less, sending overlaps
with compute.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks import harness
from benchmarks.flow.scale import Network
from benchmarks.planning.rank_bytes import Step, sent
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.plans import GroupShape, deal, plan_micro_batches
from stages.engines.torch.parallel.sharded import Sharded
from stages.engines.torch.train import TorchTrainEngine
from stages.parallel.layout import ContextParallel, Layout, RankCoordinates
from stages.parallel.placement import model_state
from tests.batches import make_batch, stack, unstack
from tests.ranks import of_product

PRODUCTS: list[dict[str, Any]] = [
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
    {"pp": 2},
    {"dp": 2, "pp": 2},
    {"pp": 4},
    {"pp": 2, "vpp": 2},
    {"dp": 2, "pp": 2, "vpp": 2},
    {"dp": 2, "tp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "ep": 2},
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 2},
    {"dp": 2, "tp": 2, "ep": 4},
    {"dp": 8, "dp_replicate": 2, "ep": 4},
    {"cp": 2},
    {"dp": 2, "cp": 2},
    {"cp": 2, "tp": 2},
    {"cp": 4},
    {"cp": 2, "dp": 2, "tp": 2},
]
GROUPS = [(24, (40,) * 4)] * 16  # prompts of 24 tokens with 4 responses of 40 each
BUDGET = 400  # tokens of a micro-batch, for each context-parallel rank
SENDS = {  # what a rank sends of a call over n ranks: by which argument, how many times its bytes
    "allgather_base": (1, lambda n: n - 1),
    "reduce_scatter_base": (0, lambda n: n - 1),
    "reduce_scatter": (0, lambda n: n - 1),
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
        if space in ("c10d", "_c10d_functional") and (
            known := SENDS.get(name.strip("_").removesuffix("_"))
        ):
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


EXPERTS = 8
CHOSEN = 2


def model_of(hidden: int, experts: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": 4,
        "vocab_size": 512,
    }
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    if experts:
        routed = {
            "num_experts": EXPERTS,
            "num_experts_per_tok": CHOSEN,
            "moe_intermediate_size": hidden,
        }
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **routed, head_dim=hidden // 8))  # type: ignore[arg-type, call-arg]
    return LlamaForCausalLM(LlamaConfig(**sizes))  # type: ignore[arg-type]


def products(worlds: Sequence[int]) -> list[tuple[dict[str, int], ContextParallel]]:
    """Those of so many ranks, each with the ways in which its ranks may compute attention."""
    methods: tuple[ContextParallel, ...] = ("ulysses", "ring")
    chosen_ones = [chosen for chosen in PRODUCTS if Layout.for_training(**chosen).world in worlds]
    return [
        (chosen, method) for chosen in chosen_ones for method in methods[: 1 + ("cp" in chosen)]
    ]


def costs_of(ranks: RankCoordinates, hidden: int, step: Step) -> dict[str, float]:
    """By formula."""
    return sent(model_state(model_of(hidden, ranks.layout.ep > 1).config), ranks, step)


def step_of(ranks: RankCoordinates, hidden: int) -> tuple[dict[str, int], Step]:
    """What this rank sends in a step, by call; and the step of its replica."""
    engine, (batch, step) = engine_of(ranks, hidden), share_of(ranks, hidden)
    with Counted() as counted:
        engine.train_batch(batch, GRPO())
    return dict(counted.bytes), step


def engine_of(ranks: RankCoordinates, hidden: int) -> TorchTrainEngine:
    options: dict[str, Any] = {
        "learning_rate": 1e-4,
        "total_steps": 9,
        "token_budget": BUDGET,
        "device": "cpu",
    }
    return TorchTrainEngine(
        model_of(hidden, ranks.layout.ep > 1), parallel=Sharded(ranks), **options
    )


def share_of(ranks: RankCoordinates, hidden: int) -> tuple[TensorDict, Step]:
    """The rows of a rank's replica, and its step."""
    shapes = [GroupShape(prompt, responses) for prompt, responses in GROUPS]
    share = deal(shapes, ranks.layout.replicas)[ranks.replica]
    rows = unstack(make_batch(GROUPS))
    first = [4 * group for group in range(len(GROUPS))]
    kept = [rows[first[piece.group] + row] for piece in share for row in piece.rows]
    groups = [GroupShape(24, (40,) * len(piece.rows)) for piece in share]
    plan = plan_micro_batches(groups, BUDGET * ranks.layout.cp)
    tokens = tuple(sum(groups[p.group].tokens(p.rows) for p in pieces) for pieces in plan)
    chosen = CHOSEN if ranks.layout.ep > 1 else 0
    return stack(kept), Step(
        tokens, hidden, chosen, prompts=24 * sum(map(len, plan)), head=hidden // 8
    )


def timed_step(
    ranks: RankCoordinates, hidden: int, layer_ms: float, steps: int
) -> tuple[list[float], float, Step]:
    """Seconds of each step, those of its compute by the clock, and the step of the replica."""
    engine = engine_of(ranks, hidden)
    batch, step = share_of(ranks, hidden)
    spent = [0.0]

    def clock(times: int) -> Any:
        def wait(_: Any, given: Any, kwargs: Any = None) -> None:
            hidden_states = given[0] if given else (kwargs or {})["hidden_states"]
            # of its 1 / tp of the tokens
            seconds = times * layer_ms / 1e3 * hidden_states.shape[1] / 100
            spent[0] += seconds
            time.sleep(seconds)

        return wait

    for layer in engine.model.base_model.layers:
        layer.register_forward_pre_hook(clock(1), with_kwargs=True)
        layer.register_full_backward_pre_hook(clock(2))
    took = []
    for _ in range(steps + 1):  # the first one makes AdamW's moments
        dist.barrier()
        spent[0], began = 0.0, time.perf_counter()
        engine.train_batch(batch, GRPO())
        took.append(time.perf_counter() - began)
    return took[1:], spent[0], step


def over_links(
    worlds: Sequence[int], hidden: int, mbit: float, delay: float, layer_ms: float
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with Network(max(worlds), mbit, delay) as network:
        for chosen, method in products(worlds):
            ranks = Layout.for_training(**chosen, context_parallel=method).coordinates(0)
            there = [network.name(f"host{rank}") for rank in range(ranks.world)]
            results = of_product(
                {**chosen, "context_parallel": method},
                timed_step,
                hidden,
                layer_ms,
                3,
                namespaces=there,
            )
            nbytes = sum(costs_of(ranks, hidden, results[0][2]).values())
            seconds = statistics.median(
                max(times) for times in zip(*(took for took, *_ in results), strict=True)
            )
            clock = max(spent for _, spent, _ in results)
            found.append({"product": chosen, "method": method, "seconds": seconds, "clock": clock})
            found[-1]["sending"] = nbytes * 8 / mbit / 1e6
            print(found[-1], file=sys.stderr)
    return found


def measure(worlds: Sequence[int], hidden: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for chosen, method in products(worlds):
        layout = Layout.for_training(**chosen, context_parallel=method)
        ranks = of_product({**chosen, "context_parallel": method}, step_of, hidden)
        total: Counter[str] = sum((Counter(calls) for calls, _ in ranks), Counter())
        calls = {name: nbytes / len(ranks) for name, nbytes in total.items()}
        parts = [
            costs_of(layout.coordinates(rank), hidden, step) for rank, (_, step) in enumerate(ranks)
        ]
        names = dict.fromkeys(name for of in parts for name in of)
        formula = {name: statistics.mean(of.get(name, 0.0) for of in parts) for name in names}
        found.append(
            {"product": chosen, "method": method, "counted": sum(calls.values()), "calls": calls}
        )
        found[-1]["formula"] = formula
    return found


def main(argv: list[str]) -> int:
    """Measure, print, and write the file of ``--json``."""
    parser = harness.parser(__doc__)
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--links", action="store_true")
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="needs the kernel's netem")
    parser.add_argument("--layer-ms", type=float, default=40.0)
    options = parser.parse_args(argv)
    if options.links:
        found = over_links(
            options.world, options.hidden, options.mbit, options.delay_ms, options.layer_ms
        )
        table = Table("product", "a step, s", "compute, s", "sending, s", "apart, s", "of one rank")
        alone = next(
            (
                cell["seconds"]
                for cell in found
                if Layout.for_training(**cell["product"]).world == 1
            ),
            math.nan,
        )
        for cell in found:
            parts = cell["seconds"], cell["clock"], cell["sending"], cell["clock"] + cell["sending"]
            table.add_row(
                name_of(cell), *(f"{value:.2f}" for value in parts), f"{parts[0] / alone:.2f}"
            )
    else:
        found = measure(options.world, options.hidden)
        table = Table("product", "sent, MB", "by formula", "ratio", "of it")
        for cell in found:
            total = cell["counted"]
            formula = sum(cell["formula"].values())
            shares = ", ".join(
                f"{name} {nbytes / 1e6:.2f}" for name, nbytes in cell["formula"].items()
            )
            ratio = f"{total / formula:.4f}" if formula else "-"
            table.add_row(
                name_of(cell), f"{total / 1e6:.3f}", f"{formula / 1e6:.3f}", ratio, shares
            )
    Console(width=120).print(table)
    if options.json:
        options.json.write(found)
    return 0


def name_of(cell: dict[str, Any]) -> str:
    of = cell["product"]
    return " ".join(
        [*(f"{key}={size}" for key, size in of.items()), *([cell["method"]] if "cp" in of else [])]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
