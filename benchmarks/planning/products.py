"""The best product of parallel strategies for a model, by the formulas of the planner: memory of a
rank, and bytes it sends.

    every product over the ranks that `asyncdock check` would allow, with and without activation checkpointing
      ─▶ what its ranks take (orchestration/recipe/sizes/memory_parts.py); products that do not fit are left out
      ─▶ seconds of a step: compute, with the pipeline's bubble, and bytes over their link (rank_bytes.py)
      ─▶ the shortest

    python -m benchmarks.planning.products [--shape NAME ...] [--ranks 64] [--rows 256] [--tokens 32768]
                                           [--memory 72] [--tflops 400] [--node 8] [--within 200]
                                           [--between 25] [--show 3] [--json FILE]

Nothing is run: these are derived figures. ``--memory`` GB of a device, ``--tflops`` that matrices
really reach, GB/s of a rank ``--within`` a node of ``--node`` devices and ``--between`` nodes.
Bytes of a strategy go at the speed of the slowest link among its ranks. Weights are gathered, and
their gradients scattered, beside compute; all other bytes are waited for.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from benchmarks import harness
from benchmarks.planning.memory import recipe_of
from benchmarks.planning.rank_bytes import Step, sent, spans
from orchestration.recipe.model_files import experts_of
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.memory_parts import (
    CPU_PARTS,
    HOST_PARTS,
    ITEM_BYTES,
    Sizes,
    train_memory,
)
from stages.parallel.layout import Layout
from stages.parallel.placement import ModelState, model_state

MOCK = {"rollout.engine": "mock", "train.engine": "mock", "algorithm.options": {}}
PROMPT = 1024  # tokens of the prompts; responses have the rest of a row
SHAPES: dict[str, PretrainedConfig] = {
    "dense 7B": Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        tie_word_embeddings=False,
    ),
    "dense 32B": Qwen2Config(
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=152064,
        tie_word_embeddings=False,
    ),
    "MoE 30B-A3B": Qwen3MoeConfig(  # type: ignore[call-arg]  # head_dim
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        tie_word_embeddings=False,
    ),
}


@dataclass(frozen=True)
class Machine:
    """Bytes of a device, operations a second, devices of a node, and bytes a second of a rank
    within and between nodes."""

    memory: float
    flops: float
    node: int
    within: float
    between: float

    def seconds(self, nbytes: float, span: int) -> float:
        """Of ``nbytes`` among ranks that lie within ``span`` neighbours."""
        return nbytes / (self.within if span <= self.node else self.between)


@dataclass(frozen=True)
class Model:
    config: PretrainedConfig
    sizes: Sizes
    parameters: int
    active: int
    states: dict[int, ModelState] = field(default_factory=dict)

    @classmethod
    def of(cls, config: PretrainedConfig) -> Model:
        values = config.to_dict()
        sizes = Sizes.of(values)
        state = model_state(config)
        if sizes is None:
            raise ValueError(f"sizes of {type(config).__name__} are not known")
        experts = experts_of(values)[0]
        parameters = sum(parameter.nbytes for parameter in state.parameters) // 4
        idle = (
            sizes.experts * sizes.layers * (1 - values.get("num_experts_per_tok", 0) / experts)
            if experts
            else 0
        )
        return cls(
            config, sizes, parameters, int(parameters - idle - sizes.vocabulary * sizes.width)
        )

    def state(self, layers: int) -> ModelState:
        """Of this model with so many layers."""
        if layers not in self.states:
            values = self.config.to_dict() | {"num_hidden_layers": layers, "layer_types": None}
            self.states[layers] = model_state(type(self.config).from_dict(values))
        return self.states[layers]


def products(model: Model, world: int, node: int, rows: int) -> Iterator[dict[str, Any]]:
    """Recipe keys of every product over ``world`` ranks that divides.

    Tensor-parallel ranks are on one node.
    """
    powers = [2**power for power in range(world.bit_length())]
    experts = experts_of(model.config.to_dict())[0]
    for tp, cp, pp in itertools.product(powers, powers, powers):
        if (
            world % (tp * cp * pp)
            or tp > node
            or model.sizes.kv_heads % tp
            or (model.sizes.heads // tp) % cp
        ):
            continue
        dp = world // (tp * cp * pp)
        if rows % dp:
            continue
        for copies, ep, vpp in itertools.product(
            powers, powers if experts else [1], [1, 2] if pp > 1 else [1]
        ):
            among = dp // copies * cp
            shared = (among if among > 1 else copies) * tp
            if (
                dp % copies
                or shared % ep
                or model.sizes.layers % (pp * vpp)
                or (experts and experts % ep)
            ):
                continue
            yield {
                "dp": dp,
                "dp_replicate": copies,
                "tp": tp,
                "cp": cp,
                "ep": ep,
                "pp": pp,
                "vpp": vpp,
            }


def judged(
    model: Model, machine: Machine, recipe: Recipe, chosen: dict[str, Any], rows: int, length: int
) -> dict[str, Any] | None:
    """Memory and seconds of a product; None where its ranks do not fit their devices."""
    train = recipe.train.model_copy(
        update={k: v for k, v in chosen.items() if hasattr(recipe.train, k)}
    )
    of = recipe.model_copy(update={"train": train})
    sizes = model.sizes
    parts = train_memory(of, sizes, model.parameters, PROMPT, model.parameters)
    memory = sum(size for part, size in parts.items() if part not in (*HOST_PARTS, *CPU_PARTS))
    if memory > machine.memory:
        return None
    layout = Layout.for_training(**chosen)
    tokens = rows * length
    attention = 6 * sizes.layers * sizes.heads * sizes.head * length  # causal: half of all pairs
    again = 4 / 3 if train.activation_checkpointing else 1
    compute = again * tokens * (6 * model.active + attention) / layout.world / machine.flops
    passes = -(-rows * length // (train.token_budget * train.cp) // layout.replicas)
    bubble = (layout.pp - 1) / (passes * layout.vpp)
    return {
        "product": {k: v for k, v in chosen.items() if v != 1},
        "activation_checkpointing": train.activation_checkpointing,
        "token_budget": train.token_budget,
        "passes": passes,
        "memory": memory,
        "compute": compute,
        "bubble": bubble * compute,
    }


def with_waits(model: Model, machine: Machine, found: dict[str, Any]) -> dict[str, Any]:
    """``found`` by :func:`judged`, with the seconds of what ranks send, and of the step."""
    layout = Layout.for_training(**found["product"])
    sizes = model.sizes
    fed = (found["token_budget"] * layout.cp,) * found["passes"]
    routed = getattr(model.config, "num_experts_per_tok", 0)
    step = Step(fed, sizes.width, chosen=routed, head=sizes.head, item=ITEM_BYTES["bfloat16"])
    few = layout.virtual_stages  # bytes are linear in layers
    one, two = (sent(model.state(n), layout.coordinates(0), step) for n in (few, 2 * few))
    nbytes = {
        name: one.get(name, 0) + (two[name] - one.get(name, 0)) * (sizes.layers / few - 1)
        for name in two
    }
    span_of = spans(layout)
    waits = {name: machine.seconds(size, span_of[name]) for name, size in nbytes.items()}
    beside = waits.pop("dp", 0.0) + waits.pop("dp_replicate", 0.0)
    seconds = max(found["compute"] + found["bubble"], beside) + sum(waits.values())
    return {**found, "beside": beside, "waits": waits, "seconds": seconds}


def with_keys(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """``recipe`` with other values, which are not checked: no checkpoint of the model has to
    exist."""
    sections: dict[str, Any] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections[section] = sections.get(section, getattr(recipe, section)).model_copy(
            update={name: value}
        )
    return recipe.model_copy(update=sections)


def best(
    model: Model, machine: Machine, world: int, rows: int, length: int
) -> list[dict[str, Any]]:
    """Products that fit, the shortest step first; of the longer ones not all.

    Micro-batches hold one, two or four rows.
    """
    base = recipe_of("mock", MOCK)
    found = []
    for chosen in products(model, world, machine.node, rows):
        for again, at_once in itertools.product((False, True), (1, 2, 4)):
            if rows // chosen["dp"] % at_once:
                continue
            changes = {
                "model.dtype": "bfloat16",
                "prompts.max_prompt_tokens": PROMPT,
                "rollout.max_tokens": length - PROMPT + 1,
                "train.groups_per_step": rows // base.algorithm.group_size,
                "train.activation_checkpointing": again,
                "train.token_budget": at_once * length // chosen["cp"],
            }
            found.append(judged(model, machine, with_keys(base, changes), chosen, rows, length))
    fitting = [each for each in found if each is not None]
    timed: list[dict[str, Any]] = []
    for each in sorted(fitting, key=lambda each: float(each["compute"] + each["bubble"])):
        if (
            len(timed) > 2
            and each["compute"] + each["bubble"] > sorted(one["seconds"] for one in timed)[2]
        ):
            break  # three are shorter with all that they send
        timed.append(with_waits(model, machine, each))
    return sorted(timed, key=lambda each: float(each["seconds"]))


def main(argv: list[str]) -> int:
    """Derive, print, and write the file of ``--json``."""
    parser = harness.parser(__doc__)
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument(
        "--model", type=Path, help="a folder with a config.json, instead of the shapes"
    )
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rows", type=int, default=256, help="of a step")
    parser.add_argument("--tokens", type=int, default=32768, help="of a row, with its prompt")
    parser.add_argument("--memory", type=float, default=72.0, help="GB")
    parser.add_argument("--tflops", type=float, default=400.0)
    parser.add_argument("--node", type=int, default=8, help="devices")
    parser.add_argument("--within", type=float, default=200.0, help="GB/s")
    parser.add_argument("--between", type=float, default=25.0, help="GB/s")
    parser.add_argument("--show", type=int, default=3, help="products of each model")
    options = parser.parse_args(argv)
    machine = Machine(
        options.memory * 1e9,
        options.tflops * 1e12,
        options.node,
        options.within * 1e9,
        options.between * 1e9,
    )
    configs = {name: SHAPES[name] for name in options.shape}
    if options.model:
        configs = {options.model.name: AutoConfig.from_pretrained(options.model)}
    table = Table(
        "model",
        "product",
        "again",
        "budget",
        "memory, GB",
        "step, s",
        "compute",
        "bubble",
        "weights",
        "waits",
    )
    found = {}
    for name, config in configs.items():
        found[name] = best(Model.of(config), machine, options.ranks, options.rows, options.tokens)
        if not found[name]:
            table.add_row(name, "none fits")
        for each in found[name][: options.show]:
            seconds = (each[part] for part in ("seconds", "compute", "bubble", "beside"))
            waits = ", ".join(f"{part} {value:.1f}" for part, value in each["waits"].items())
            table.add_row(
                name,
                " ".join(f"{key}={size}" for key, size in each["product"].items()),
                "yes" if each["activation_checkpointing"] else "no",
                f"{each['token_budget']:,}",
                f"{each['memory'] / 1e9:.1f}",
                *(f"{value:.1f}" for value in seconds),
                waits,
            )
    Console(width=150).print(table)
    if options.json:
        options.json.write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
