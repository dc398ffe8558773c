"""The derived memory of a step: the very bytes that autograd keeps, and refusals of what cannot
fit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.planning import memory as memory_benchmark
from orchestration.recipe.checks import memory as checks
from orchestration.recipe.loading.load import load_recipe
from orchestration.recipe.sizes import memory_parts
from orchestration.recipe.sizes.memory_parts import Engine, Sizes, layer_bytes, micro_batch
from orchestration.recipe.sizes.planner import memory_of, parameters_of_source, plan
from stages import device
from stages.engines.plans import GroupShape, plan_micro_batches
from stages.engines.torch.decoding import attention
from stages.engines.torch.model import token_logprobs
from stages.engines.torch.model.packing import pack
from stages.engines.torch.train import TorchTrainEngine
from stages.model.load import tiny_tokenizer
from tests.orchestration.recipe.minimal import problems

CONFIG: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_attention_heads": 6,
}
CONFIG |= {"num_key_value_heads": 2, "head_dim": 10}
SMOLLM2 = 134_515_008  # parameters
BIG = (
    "model.source=smollm2",
    "train.token_budget=4096",
    "rollout.max_tokens=512",
    "prompts.max_prompt_tokens=256",
)


def kept(layers: int, dtype: torch.dtype, checkpointing: bool) -> tuple[int, int]:
    """Bytes that autograd keeps of a forward pass beside parameters, and its tokens."""
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **CONFIG)).to(dtype)
    options: dict[str, Any] = {"learning_rate": 1e-3, "total_steps": 1, "device": "cpu"}
    engine = TorchTrainEngine(model, activation_checkpointing=checkpointing, **options)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, torch.Tensor] = {}

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        if (at := tensor.untyped_storage().data_ptr()) not in parameters:
            held[at] = tensor
        return tensor

    packed = pack([torch.arange(9)], [[torch.arange(n) for n in (31, 17, 17)]], engine.device)
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        engine.packed_model.hidden(packed)
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values()), packed.ids.shape[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_keeps_the_derived_bytes(dtype: torch.dtype) -> None:
    (two, tokens), (three, _) = kept(2, dtype, False), kept(3, dtype, False)
    sizes = Sizes.of({**CONFIG, "num_hidden_layers": 2})
    assert sizes is not None
    assert three - two == layer_bytes(sizes, dtype.itemsize, tokens)


def test_with_checkpointing_a_layer_keeps_its_input() -> None:
    (two, tokens), (three, _) = kept(2, torch.float32, True), kept(3, torch.float32, True)
    assert three - two == 4 * tokens * CONFIG["hidden_size"]


@pytest.mark.parametrize("budget", [40, 100, 250, 300, 600, 4096])
@pytest.mark.parametrize(("groups", "size"), [(1, 4), (4, 8), (5, 2)])
def test_the_largest_micro_batch_is_that_of_the_plan(
    minimal: Path, budget: int, groups: int, size: int
) -> None:
    prompt = 10
    response = 30
    sets = [
        f"train.token_budget={budget}",
        f"rollout.max_tokens={response}",
        f"prompts.max_prompt_tokens={prompt}",
    ]
    recipe = load_recipe(
        minimal, [*sets, f"train.groups_per_step={groups}", f"algorithm.group_size={size}"]
    )
    shapes = [GroupShape(prompt, (response,) * size)] * groups
    planned = plan_micro_batches(shapes, budget)
    tokens = [sum(shapes[piece.group].tokens(piece.rows) for piece in pieces) for pieces in planned]
    places = [sum(1 + len(piece.rows) * (response - 1) for piece in pieces) for pieces in planned]
    found = micro_batch(recipe, prompt)
    assert (found.tokens, found.places) == max(zip(tokens, places, strict=True))
    assert found.only == (len(planned) == 1)


def test_the_bound_of_the_logits_is_the_engine_s() -> None:
    assert memory_parts.LOGITS_BYTES == token_logprobs.LOGITS_BYTES


def test_the_parts_follow_the_recipe(minimal: Path) -> None:
    one, other = (
        memory_of(load_recipe(minimal, [*BIG, *more]))
        for more in ((), ("train.activation_checkpointing=true",))
    )
    assert one["train"]["weights"] == 4 * SMOLLM2
    assert one["train"]["optimizer"] == 2 * one["train"]["weights"]
    assert one["train"]["checkpoint copy"] == 3 * one["train"]["weights"]
    assert one["train"]["undo copy"] == 0
    for several in ("epochs=2", "mini_batches=2"):
        undone = memory_of(
            load_recipe(
                minimal,
                [*BIG, f"algorithm.options.{several}", "train.dp=2", "train.token_budget=1024"],
            )
        )["train"]
        assert undone["undo copy"] == one["train"]["checkpoint copy"] / 2
    assert one["train"]["activations"] > 4 * other["train"]["activations"]
    assert plan(load_recipe(minimal, list(BIG))).memory == one
    two = memory_of(load_recipe(minimal, [*BIG, "train.dp=2", "train.token_budget=2048"]))["train"]
    outside = 49152 * 576
    layers = SMOLLM2 - 49152 * 576
    assert two["weights"] == one["train"]["weights"] / 2
    assert two["gathered"] == 4 * (3 * (layers // 30) + 2 * outside)
    assert two["kept"] > 2 * 4 * (layers - 30), "freed layers are not all used again"
    staged = memory_of(load_recipe(minimal, [*BIG, "train.pp=2", "train.token_budget=2048"]))[
        "train"
    ]
    assert staged["weights"] == 4 * (outside + layers // 2), "both stages have the tied embedding"
    of_ranks = ["train.cp=2", "train.context_parallel=ring", "train.token_budget=1024"]
    divided, alone = (
        memory_of(load_recipe(minimal, [*BIG, *more]))["train"]
        for more in (of_ranks, ["train.token_budget=2048"])
    )
    assert alone["activations"] == pytest.approx(2 * divided["activations"], rel=0.01)
    assert not memory_of(
        load_recipe(minimal, ["model.source=mock", "rollout.engine=mock", "train.engine=mock"])
    )


def test_a_step_s_peak_is_at_the_head_or_in_a_layer(minimal: Path) -> None:
    """28 tokens are fed in one micro-batch: a prompt of 10, and 3 of each of 6 responses of 4."""
    sizes = Sizes(2, 8, 16, 0, 0, 2, 1, 4, 1000, True)
    batch = memory_parts.MicroBatch(28, 19, True)
    sets = [
        "train.groups_per_step=1",
        "algorithm.group_size=6",
        "rollout.max_tokens=4",
        "prompts.max_prompt_tokens=10",
    ]
    recipe = load_recipe(minimal, sets)
    layer = layer_bytes(sizes, 4, 28)
    assert micro_batch(recipe, 10) == batch
    assert list(memory_parts._moments_of_a_step(recipe, sizes, batch, 10**6)) == [
        (2 * layer + 2 * 28 * 8 * 8 + 19 * 8 * 8, 4 * 19 * 1000 + 4 * 19 * 1000, 0),
        (2 * layer + 28 * (4 * 8 + 8 * 16), 0, 4 * 8000),
        (layer + 28 * (4 * 8 + 8 * 16), 0, 10**6),
    ]


def test_a_rollout_engine_holds_three_sets_of_weights_while_it_swaps(minimal: Path) -> None:
    sets = [*BIG, "rollout.max_rows=16", "algorithm.group_size=8"]
    parts = memory_of(load_recipe(minimal, sets))["rollout"]
    head = 49152 * 576  # of its own in oneDNN's layout, where the model's is its embedding
    assert parts["weights"] == parts["new weights"] == 4 * (SMOLLM2 + head)
    assert parts["verified copy"] == 4 * SMOLLM2
    # Room for 729 tokens of 16 rows, grown from 486, and for prompts of 8 groups.
    assert parts["KV cache"] == 2 * 4 * 3 * 64 * (30 * (16 * 729 + 8 * 256) + 16 * 486)
    assert parts["logits"] == 2 * 4 * 16 * 49152
    frozen = memory_of(load_recipe(minimal, [*sets, "external.stages=['update']"]))
    assert "train" not in frozen


@pytest.mark.parametrize("tokens", [1, 16, 32, 33, 511, 1023, 4096])
def test_the_room_of_the_cache_is_the_engine_s(tokens: int) -> None:
    room = before = 0
    for need in range(1, tokens + 1):
        before, room = (room, attention._grow(need, room, 32)) if need > room else (before, room)
    assert memory_parts.grown(tokens) == (room, before)


def test_a_reference_computes_one_group_without_gradients(minimal: Path, tmp_path: Path) -> None:
    assert "reference" not in memory_of(load_recipe(minimal, list(BIG)))
    sets = [
        *BIG,
        "algorithm.options.kl_coef=0.1",
        "algorithm.group_size=4",
        "rollout.max_tokens=101",
    ]
    parts = memory_of(load_recipe(minimal, sets))["reference"]
    assert parts["weights"] == 4 * SMOLLM2
    assert parts["logits"] == 4 * 401 * 49152
    assert parts["activations"] == 4 * (256 + 400 + 401) * 576, (
        "the last hidden states, beside more logits than a layer takes"
    )
    LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=2, **(CONFIG | {"vocab_size": 49}))
    ).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    short = (
        "model.source=tiny",
        "prompts.max_prompt_tokens=16",
        "rollout.max_tokens=16",
        "algorithm.options.kl_coef=0.1",
    )
    other = memory_of(load_recipe(minimal, [*short, f"model.reference={tmp_path}"]))
    assert other["train"]["weights"] == 4 * 77_184
    assert other["reference"]["activations"] > 0 == other["reference"]["logits"], (
        "a layer takes more than few words"
    )
    assert (
        other["reference"]["weights"]
        == 4 * (parameters_of_source(str(tmp_path)) or 0)
        != 4 * 77_184
    )
    with_drafts = memory_of(load_recipe(minimal, [*short, f"rollout.draft_model={tmp_path}"]))
    keys_and_values = 2 * CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    layers, rows, tokens = 2, 16, 16 + 16
    assert with_drafts["rollout"]["draft model"] == other["reference"]["weights"] + (
        4 * keys_and_values * layers * rows * tokens
    )


@pytest.mark.parametrize(
    ("share", "more", "key", "fix"),
    [
        (0.8, ("rollout.max_rows=8",), "train.token_budget", "use a value <= "),
        (0.8, ("rollout.max_rows=1024",), "rollout.max_rows", "use a value <= "),
        (
            0.3,
            ("train.activation_checkpointing=true", "train.token_budget=1024"),
            "model.source",
            "smaller model",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_the_largest_part_and_a_fix_that_fits(
    minimal: Path,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    more: tuple[str, ...],
    key: str,
    fix: str,
) -> None:
    sets = [*BIG, "train.device=cpu", "rollout.device=cpu", "pipeline.arena=1GiB", *more]
    monkeypatch.setattr(checks, "host_bytes", lambda: None)
    recipe = load_recipe(minimal, sets)
    needed = sum(sum(parts.values()) for parts in memory_of(recipe).values())
    needed += recipe.pipeline.arena + plan(recipe).slot_bytes
    monkeypatch.setattr(checks, "host_bytes", lambda: int(needed * share))
    [blamed] = [
        problem for problem in problems(minimal, *sets) if "the largest part of" in problem.wrong
    ]
    assert blamed.key == key
    assert fix in blamed.fix
    if "<= " in blamed.fix:
        value = blamed.fix.split("<= ")[1].split(",")[0]
        load_recipe(minimal, [*sets, f"{key}={value}"])


def test_an_arena_that_takes_the_most_is_lowered_to_what_is_needed(minimal: Path) -> None:
    recipe = load_recipe(minimal, ["pipeline.arena=1GiB"])
    key, fix = checks._fix(recipe, checks.SHARED, "arena", share=0.5)
    value = fix.split("'")[1]
    assert key == "pipeline.arena"
    assert load_recipe(minimal, [f"{key}={value}"]).pipeline.arena < 2**29


def test_a_container_s_limit_counts(
    minimal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "sys/fs/cgroup/memory.max", str(2**30))
    monkeypatch.setattr(checks, "host_bytes", lambda of=checks.host_bytes: of(tmp_path))
    [blamed] = problems(minimal, *BIG, "train.device=cpu", "rollout.device=cpu")
    assert "this machine or container has 1 GiB" in blamed.wrong


@pytest.mark.parametrize(
    ("of", "limits", "least"),
    [
        ("0::/", {"sys/fs/cgroup/memory.max": "max"}, None),
        (
            "0::/a/b",
            {"sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/memory.max": "7000"},
            7000,
        ),
        ("4:memory:/a\n1:cpu:/", {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "5000"}, 5000),
        ("0::/not/here", {"sys/fs/cgroup/memory.max": "3000"}, 3000),
    ],
)
def test_the_least_limit_of_the_cgroups_is_found(
    tmp_path: Path, of: str, limits: dict[str, str], least: int | None
) -> None:
    for name, text in {"proc/self/cgroup": of, **limits}.items():
        write(tmp_path, name, text)
    assert checks.host_bytes(tmp_path) == (least or checks.host_bytes(tmp_path / "nothing"))


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text + "\n")


def test_an_accelerator_is_judged_by_its_own_memory(
    minimal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [*BIG, "rollout.device=cpu", "pipeline.arena=1GiB"]
    parts = memory_of(load_recipe(minimal, [*sets, "train.device=cpu"]))["train"]
    on_device = sum(size for part, size in parts.items() if part not in ("checkpoint copy", "kept"))
    monkeypatch.setattr(device, "on_cpu", lambda name: name == "cpu")
    for room, found in ((on_device - 1, ["train.token_budget"]), (on_device, [])):
        monkeypatch.setattr(device, "memory_bytes", lambda name, room=room: room)
        wrong = problems(minimal, *sets, "train.device=cuda")
        assert [
            problem.key for problem in wrong if "the device of train has" in problem.wrong
        ] == found


def test_a_model_of_unknown_sizes_is_not_judged() -> None:
    assert Sizes.of({"n_embd": 64, "n_head": 4}) is None


def test_what_glibc_keeps_is_of_blocks_that_it_does_not_return() -> None:
    assert (
        memory_parts._kept(1000.0, memory_parts.MAPPED_BYTES - 1)
        == memory_parts.KEPT_BUFFERS + 1000
    )
    assert memory_parts._kept(1000.0, memory_parts.MAPPED_BYTES) == memory_parts.KEPT_BUFFERS


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("side", ["train", "rollout"])
def test_a_process_takes_what_is_derived(side: Engine) -> None:
    """Within a wide margin, as other work on the machine does not change it but the C library
    may."""
    short = {"train.token_budget": 512, "rollout.max_tokens": 64, "train.groups_per_step": 1}
    [row] = memory_benchmark.compare(memory_benchmark.SMALL, short, [side])
    assert 0.75 <= row["derived"] / row["measured"] <= 1.3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "chosen",
    [{"train.tp": 2}, {"train.dp": 2, "train.ep": 2}, {"train.dp": 2, "train.dp_replicate": 2}],
    ids=str,
)
def test_a_rank_has_allocated_what_is_derived(chosen: dict[str, int]) -> None:
    changes = {"rollout.max_tokens": 64, "train.groups_per_step": 2, **chosen}
    model = memory_benchmark.EXPERTS if "train.ep" in chosen else memory_benchmark.SMALL
    [row] = memory_benchmark.compare(
        model | {"num_hidden_layers": 4}, changes, ["train"], of_torch=True
    )
    assert row["derived"] == pytest.approx(row["measured"], rel=0.1)
