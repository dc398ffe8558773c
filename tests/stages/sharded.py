"""What ranks do in the tests of the sharded train engine.

Each function runs on every rank; arguments are small.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.engines.families import model_of as family_model
from orchestration.checkpoints import checkpoint
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.algorithms.policy_gradient.ppo import PPO
from stages.algorithms.policy_gradient.shuffle_r1 import ShuffleR1
from stages.algorithms.supervised.dpo import DPO
from stages.engines.plans import GroupShape, deal
from stages.engines.torch.critic import TorchCriticEngine
from stages.engines.torch.decoding.decoder import TorchDecoder
from stages.engines.torch.model import layers as torch_layers
from stages.engines.torch.model.layers import rms_norm
from stages.engines.torch.parallel import sharded as torch_sharded
from stages.engines.torch.parallel.sharded import Sharded
from stages.engines.torch.train import TorchTrainEngine
from stages.model.files import WeightFiles, in_one_dtype
from stages.model.load import model_skeleton
from stages.parallel.layout import Layout, RankCoordinates
from stages.parallel.placement import model_state, place, train_placement
from stages.resharding.plan import plan_reshard
from stages.resharding.swap import Swap
from stages.resharding.tensors import whole
from tests.allocations import Allocations
from tests.batches import RAGGED, VOCABULARY, make_batch, stack, unstack

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,  # large enough that every gradient is far above the rounding
}
OPTIONS: dict[str, Any] = {
    "learning_rate": 1e-2,
    "total_steps": 10,
    "token_budget": 25,
    "device": "cpu",
}


def model_of(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """``llama``: tied embeddings. ``biased``: a head of its own, and biases everywhere. ``qwen3``:
    norms of queries and keys, whose gradients each rank sees for its own heads alone; sizes that no
    number of ranks divides. ``moe``: a buffer that decides on experts, shared experts, and experts
    that checkpoints have one by one. ``experts``: a Qwen3-MoE.
    ``gathered``: norms over all heads. ``fused``: several matrices in one. ``grouped``: eight heads
    of queries, two of keys.
    ``sinks``: attention sinks, and windows."""
    torch.manual_seed(seed)
    model: PreTrainedModel
    kind, _, layers = kind.partition("-")
    sizes = SIZES | {"num_hidden_layers": int(layers or 2)}
    if kind in ("moe", "experts"):
        family = {"moe": "DeepSeek-V3", "experts": "Qwen3-MoE"}[kind]
        experts = {"moe": {"n_routed_experts": 8}, "experts": {"num_experts": 8}}[kind]
        model = family_model(
            family,
            seed=seed,
            dtype=dtype,
            num_hidden_layers=int(layers or 2),
            vocab_size=VOCABULARY,
            **experts,
        )
        return _computed_one_by_one(model) if dtype == torch.float64 else model
    if kind in ("gathered", "fused", "sinks"):
        family = {"gathered": "OLMo 2", "fused": "Phi-3", "sinks": "gpt-oss"}[kind]
        model = family_model(family, seed=seed, dtype=dtype, vocab_size=VOCABULARY)
        return _computed_one_by_one(model) if kind == "sinks" and dtype == torch.float64 else model
    if kind in ("qwen3", "grouped"):
        heads = {"num_attention_heads": 8} if kind == "grouped" else {}
        config = Qwen3Config(
            **{**sizes, **heads}, intermediate_size=90, head_dim=8, tie_word_embeddings=True
        )
        model = Qwen3ForCausalLM(config)
    else:
        biased = {"attention_bias": True, "mlp_bias": True} if kind == "biased" else {}
        tied = kind == "llama"
        model = LlamaForCausalLM(
            LlamaConfig(**sizes, intermediate_size=80, tie_word_embeddings=tied, **biased)
        )
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # not all ones or zeros, so that a permuted or missing one shows
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    # not the buffers: from_pretrained leaves the rotary frequencies in float32
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval()


def _computed_one_by_one(model: PreTrainedModel) -> PreTrainedModel:
    model.set_experts_implementation("eager")  # torch's grouped matmul has no float64
    return model


def positions(dp: int, how: str = "dealt") -> list[list[int]]:
    """Positions in ``make_batch()`` of each replica's share; ``lopsided`` gives the first ones a
    row each."""
    count = sum(len(lengths) for _, lengths in RAGGED)
    if how == "lopsided":
        return [[at] for at in range(dp - 1)] + [list(range(dp - 1, count))]
    first = [0]
    for _, lengths in RAGGED:
        first.append(first[-1] + len(lengths))
    shares = deal([GroupShape(prompt, tuple(lengths)) for prompt, lengths in RAGGED], dp)
    return [[first[piece.group] + row for piece in share for row in piece.rows] for share in shares]


def share(ranks: RankCoordinates, how: str = "dealt", seed: int = 0) -> TensorDict:
    rows = unstack(make_batch(seed=seed))
    return stack([rows[at] for at in positions(ranks.layout.replicas, how)[ranks.replica]])


def parallel_of(ranks: RankCoordinates | None) -> Sharded | None:
    """What shares an engine's work: None in one process."""
    return Sharded(ranks) if ranks is not None else None


def algorithm(normalization: Any = "token") -> GRPO:
    return GRPO(kl_coef=0.1, loss_normalization=normalization)


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in engine.weights()}


def gradients_of_step(
    engine: Any, batch: TensorDict, of: Any
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """What reaches the optimizer in one train step, whole, by parameter name; and the step's
    metrics."""
    seen: dict[str, torch.Tensor] = {}

    def record(*_: Any) -> None:
        for name, parameter in engine.model.named_parameters():
            trained = engine.trained[name] if name in engine.parallel.copies else parameter
            if parameter.requires_grad:
                seen[name] = whole(trained.grad).clone()

    handle = engine._optimizer.register_step_pre_hook(record)
    metrics = dict(engine.train_batch(batch, of))
    handle.remove()
    return seen, metrics


def one_step(
    ranks: RankCoordinates, kind: str, how: str, normalization: str, options: dict[str, Any]
) -> dict[str, Any]:
    """A step on this rank's share, with what one would want to know of it."""
    torch.manual_seed(0)
    engine = TorchTrainEngine(model_of(kind), parallel=Sharded(ranks), **{**OPTIONS, **options})
    batch = share(ranks, how)
    logprobs = engine.logprobs(batch).unbind()
    gradients, metrics = gradients_of_step(engine, batch, algorithm(normalization))
    passes: list[int] = []
    engine.model.register_forward_pre_hook(lambda *_: passes.append(1))
    norms: list[int] = []
    torch_layers.rms_norm = lambda *given: norms.append(1) or rms_norm(*given)  # type: ignore[func-returns-value]
    again = engine.train_batch(batch, algorithm(normalization))
    state = engine.state_dict()
    shards = {name: tuple(value.to_local().shape) for name, value in state["exp_avg"].items()}
    parallel = engine.parallel
    copies = {
        n: p.to_local().clone()
        for n, p in parallel.sharded.items()
        if parallel.meshes.copies(p) > 1
    }
    return {
        "metrics": metrics,
        "again": dict(again),
        "logprobs": [row.tolist() for row in logprobs],
        "gradients": _plain(gradients) if ranks.rank == 0 else {},
        "weights": _plain(weights_of(engine)),
        "shards": shards,
        "held": sum(p.untyped_storage().nbytes() for p in engine.trained.values()),
        "copies": _plain(copies),
        "passes": len(passes),
        "fast_norms": len(norms),
    }


def _plain(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """numpy, which crosses processes by value."""
    return {name: value.detach().float().cpu().numpy().copy() for name, value in tensors.items()}


ENTROPY: dict[str, Any] = {
    "high_entropy_share": 0.3,
    "entropy_coef": 0.02,
    "entropy_target": 9.0,
    "mini_batches": 2,
}


def value_steps(
    ranks: RankCoordinates | None, folder: str, options: dict[str, Any], of_ppo: dict[str, Any]
) -> dict[str, Any]:
    """Two steps of PPO with a value head on the trunk, by one process (None) or a rank: metrics,
    value head, weights; and with a ``folder`` a checkpoint in it."""
    made = model_of("llama")
    of = {**OPTIONS, **options, "value_head": True}
    engine = TorchTrainEngine(made, parallel=parallel_of(ranks), **of)
    metrics = []
    for seed in range(2):
        rows = unstack(make_batch(seed=seed))
        for row, reward in zip(rows, torch.linspace(-1, 1, len(rows)), strict=True):
            row["reward"] = reward
        kept = (
            range(len(rows)) if ranks is None else positions(ranks.layout.replicas)[ranks.replica]
        )
        metrics.append(
            dict(engine.train_batch(stack([rows[at] for at in kept]), PPO(epochs=1, **of_ppo)))
        )
    if folder:
        writer = checkpoint.Writer(engine, ranks.rank if ranks else 0)
        writer.copy()
        writer.write(Path(folder))
    head = {name: value.detach() for name, value in engine.value_head.items()}
    return {"metrics": metrics, "head": _plain(head), "weights": _plain(weights_of(engine))}


def drawn_steps(ranks: RankCoordinates | None) -> dict[str, Any]:
    """Two steps on pairs that are drawn of the rows of all ranks, by one process (None) or a
    rank."""
    engine = TorchTrainEngine(model_of("llama"), parallel=parallel_of(ranks), **OPTIONS)
    drawing = ShuffleR1(shuffle_rounds=4, mini_batches=2, seed=1)
    metrics = []
    for seed in range(2):
        rows = unstack(make_batch(seed=seed))
        kept = (
            range(len(rows)) if ranks is None else positions(ranks.layout.replicas)[ranks.replica]
        )
        metrics.append(dict(engine.train_batch(stack([rows[at] for at in kept]), drawing)))
    return {"metrics": metrics, "weights": _plain(weights_of(engine))}


def critic_steps(
    ranks: RankCoordinates | None, kind: str, folder: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Two steps of a critic of its own, by one process (None) or a rank: metrics, and the values
    before each step and after the last one. A rank writes a checkpoint into ``folder``."""
    made = model_of(kind)
    of = {**OPTIONS, **options}
    engine = TorchCriticEngine(made, parallel=parallel_of(ranks), **of)
    learning = PPO(critic="own").critic_algorithm()
    metrics = []
    values = []
    for seed in range(3):
        rows = unstack(make_batch(seed=seed))
        for row, reward in zip(rows, torch.linspace(-1, 1, len(rows)), strict=True):
            row["reward"] = reward
        for row, found in zip(rows, engine.values(stack(rows)).unbind(), strict=True):
            row["values"] = found
            values.append(found.tolist())
        if seed < 2:
            kept = (
                range(len(rows))
                if ranks is None
                else positions(ranks.layout.replicas)[ranks.replica]
            )
            metrics.append(dict(engine.train_batch(stack([rows[at] for at in kept]), learning)))
    one_group = [row for row in rows if int(row["group"]) == int(rows[0]["group"])]
    alone = [row.tolist() for row in engine.values(stack(one_group)).unbind()]
    if ranks is not None:
        writer = checkpoint.Writer(engine, ranks.rank)
        writer.copy()
        writer.write(Path(folder))
    return {"metrics": metrics, "values": values, "alone": alone}


def steps(
    ranks: RankCoordinates, kind: str, count: int, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """``count`` steps; metrics of each and the weights at the end."""
    engine = TorchTrainEngine(model_of(kind), parallel=Sharded(ranks), **{**OPTIONS, **options})
    metrics = [
        dict(engine.train_batch(share(ranks, seed=seed), algorithm())) for seed in range(count)
    ]
    return [*metrics, _plain(weights_of(engine))]


def saved(
    ranks: RankCoordinates, kind: str, folder: str, options: dict[str, Any]
) -> dict[str, Any]:
    """A step, and a checkpoint after it, as the ranks of a run write it: beside the next step."""
    engine = TorchTrainEngine(model_of(kind), parallel=Sharded(ranks), **{**OPTIONS, **options})
    engine.train_batch(share(ranks, seed=0), algorithm())
    state = whole_state(engine)
    writer = checkpoint.Writer(engine, ranks.rank)
    writer.copy()
    engine.model.state_dict = None  # it would free layers that FSDP has gathered for the next step
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(writer.write, Path(folder))
        engine.train_batch(share(ranks, seed=3), algorithm())
        writing.result()
    return state


def resumed(
    ranks: RankCoordinates, kind: str, folder: str, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of other weights after that checkpoint was loaded into them, and after one step
    more."""
    engine = TorchTrainEngine(
        model_of(kind, seed=9), parallel=Sharded(ranks), **{**OPTIONS, **options}
    )
    checkpoint.Checkpoint(Path(folder), 1, {}, []).load_into(engine)
    before = whole_state(engine)
    engine.train_batch(share(ranks, seed=1), algorithm())
    return before, whole_state(engine)


def whole_state(engine: Any) -> dict[str, Any]:
    """``engine.state_dict()`` with whole tensors, flat."""
    state = engine.state_dict()
    tensors = {
        f"{part}/{name}": whole(value)
        for part, values in state.items()
        if isinstance(values, dict)
        for name, value in values.items()
    }
    return {**_plain(tensors), "step": state["step"]}


def written(ranks: RankCoordinates, kind: str, folder: str, file_bytes: int) -> None:
    """A Hugging Face checkpoint of bfloat16 compute over float32 weights, in files of at most
    ``file_bytes``."""
    torch_sharded.FILE_BYTES = file_bytes
    engine = TorchTrainEngine(
        model_of(kind), parallel=Sharded(ranks), compute=torch.bfloat16, **OPTIONS
    )
    engine.save_pretrained(Path(folder))


def opened(ranks: RankCoordinates, folder: str) -> dict[str, Any]:
    """The weights of an engine whose model was read from ``folder``."""
    return _plain(weights_of(sharded_by_files(ranks, folder, torch.float32)))


def sharded_by_files(
    ranks: RankCoordinates, folder: str, dtype: torch.dtype, **options: Any
) -> TorchTrainEngine:
    """An engine that reads its shards of the checkpoint itself."""
    skeleton = model_skeleton(folder, dtype=dtype)
    assert skeleton is not None
    model, files = skeleton
    return TorchTrainEngine(model, parallel=Sharded(ranks, weights=files), **{**OPTIONS, **options})


def differing(ranks: RankCoordinates, folders: dict[str, str], dtype: torch.dtype) -> list[str]:
    """The tensors that ranks with shards of each checkpoint have otherwise than ``from_pretrained``
    reads them. Every parameter has ``dtype``."""
    found = []
    for family, folder in folders.items():
        expected = in_one_dtype(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), dtype)
        engine = sharded_by_files(ranks, folder, dtype)
        for (name, wanted), (other, shard) in zip(
            [*expected.named_parameters(), *expected.named_buffers()],
            [*engine.model.named_parameters(), *engine.model.named_buffers()],
            strict=True,
        ):
            value = whole(shard.detach())
            if name != other or value.dtype != wanted.dtype or not torch.equal(value, wanted):
                found.append(f"{family}: {name}")
    return found


class CountingFiles(WeightFiles):
    """Counts the bytes of the tensors of files that are mapped at one time."""

    def __init__(self, files: WeightFiles) -> None:
        self.__dict__.update(files.__dict__)
        self._mapped: list[tuple[StorageWeakRef, int]] = []
        self.most = 0

    def _tensor(self, *arguments: Any) -> torch.Tensor:
        value = super()._tensor(*arguments)
        self._mapped = [(one, size) for one, size in self._mapped if not one.expired()]
        self._mapped.append(
            (StorageWeakRef(value.untyped_storage()), value.untyped_storage().nbytes())
        )
        self.most = max(self.most, sum(size for _, size in self._mapped))
        return value


def bytes_at_loading(ranks: RankCoordinates, folder: str, dtype: torch.dtype) -> tuple[int, int]:
    """The most bytes that this rank holds at one time until its weights are read, of mapped files
    and of torch's CPU allocator, and the bytes of its shard."""
    memory = Allocations()
    skeleton = model_skeleton(folder, dtype=dtype)
    assert skeleton is not None
    model, files = skeleton
    counting = CountingFiles(files)
    torch_sharded.install_packed_attention = lambda *_: memory.stop()
    engine = TorchTrainEngine(model, parallel=Sharded(ranks, weights=counting), **OPTIONS)
    mapping = (
        (Path(folder) / "model.safetensors").stat().st_size
    )  # counted by tensor: pages that nobody reads take no memory
    sizes = [size for size in memory.sizes() if abs(size) != mapping]
    shard = sum(p.to_local().untyped_storage().nbytes() for p in engine.parallel.sharded.values())
    assert sum(sizes) >= shard, "the profiler has seen what the shard takes"
    return max(itertools.accumulate(sizes)) + counting.most, shard


def mixed_steps(ranks: RankCoordinates, count: int) -> dict[str, Any]:
    """Steps in mixed precision: dtypes of what is computed, kept and published, and what came of
    it."""
    options: dict[str, Any] = {**OPTIONS, "learning_rate": 1e-4, "compute": torch.bfloat16}
    if ranks.world == 1:
        engine = TorchTrainEngine(model_of("qwen3"), **options)
    else:
        engine = TorchTrainEngine(model_of("qwen3"), parallel=Sharded(ranks), **options)
    seen: dict[str, str] = {}
    layer = engine.model.model.layers[0]
    layer.mlp.register_forward_hook(lambda module, args, out: seen.update(computed=str(out.dtype)))
    first = [row.tolist() for row in engine.logprobs(share(ranks)).unbind()]
    gradients, metrics = gradients_of_step(engine, share(ranks, seed=0), algorithm())
    for seed in range(1, count):
        metrics = engine.train_batch(share(ranks, seed=seed), algorithm())
    published = weights_of(engine)
    return {
        "computed": seen["computed"],
        "kept": {str(value.dtype) for value in engine.state_dict()["exp_avg"].values()}
        | {str(value.dtype) for value in engine.state_dict()["model"].values()},
        "published": {str(value.dtype) for value in published.values()},
        "logprobs": first,
        "gradients": _plain(gradients),
        "loss": metrics["loss"],
        "masters": _plain(
            {name: whole(value) for name, value in engine.state_dict()["model"].items()}
        ),
        "weights": _plain(published),
    }


def left_alone(ranks: RankCoordinates) -> str:
    """Rank 0 makes a step that rank 1 does not make; what it is metrics then."""
    engine = TorchTrainEngine(model_of("llama"), parallel=Sharded(ranks), **OPTIONS)
    message = ""
    if ranks.rank == 0:
        try:
            engine.train_batch(share(ranks), algorithm())
        except RuntimeError as error:
            message = str(error)
    return message


def taking_turns(ranks: RankCoordinates, kind: str, compute: str, device: str = "cpu") -> list[str]:
    """Two steps with an allgather-swap after each, into the tensors of a decoder: it has the
    engine's weights, and training goes on as it does without."""
    state = model_state(model_of(kind).config, torch.float32)
    ended = []
    for swapping in (False, True):
        options = {**OPTIONS, "device": device, "compute": getattr(torch, compute)}
        engine = TorchTrainEngine(model_of(kind), parallel=Sharded(ranks), **options)
        decoder = TorchDecoder(
            model_of(kind, dtype=getattr(torch, compute)), engine.device, packed=False
        )
        names = "vllm" if decoder.fused else "hf"
        dtype = getattr(torch, compute)
        plan = plan_reshard(
            train_placement(state, ranks.layout),
            place(state, Layout(dp_replicate=ranks.world), names=names, dtype=dtype),
            bucket_bytes=4096,
        )
        swap = Swap(
            plan,
            ranks.rank,
            engine.shards(),
            engine.held,
            device=engine.device,
            rollout=decoder.weights.tensors(),
        )
        for step in range(2):
            engine.train_batch(share(ranks, seed=step), algorithm())
            if swapping:
                weights = weights_of(engine)
                swap.to_rollout()
                assert swap.training_bytes() == 0
                for name, parameter in decoder.model.named_parameters():
                    assert torch.equal(parameter, weights[name]), name
                swap.prefetch()
                swap.ready()
        ended.append(weights_of(engine))
    assert all(torch.equal(value, ended[1][name]) for name, value in ended[0].items())
    return sorted(decoder.weights.tensors())


def of_masked(ranks: RankCoordinates | None) -> TensorDict:
    """This rank's share of a batch whose second share is masked; None: the first share, which alone
    is trained."""
    rows = unstack(make_batch())
    half = len(rows) // 2
    first = stack(rows[:half] if ranks is None or ranks.replica == 0 else rows[half:])
    trained = ranks is None or ranks.replica == 0
    mask = [torch.full((len(row),), trained) for row in first["response_ids"].unbind()]
    first["loss_mask"] = torch.nested.nested_tensor(mask, layout=torch.jagged)
    return first


def masked_step(ranks: RankCoordinates) -> dict[str, float]:
    from tests.stages.engines.torch.test_train import tiny_llama

    engine = TorchTrainEngine(tiny_llama(), parallel=Sharded(ranks), **OPTIONS)
    return dict(engine.train_batch(of_masked(ranks), GRPO()))


def drawn_case(seed: int) -> dict[str, Any]:
    """A batch of log-normal lengths, some rows of it masked, and what is trained on it."""
    made = random.Random(seed)
    kind = ("grpo", "dpo", "ppo")[seed % 3]
    groups = made.randint(2, 6)
    size = 2 if kind == "dpo" else made.randint(1, 4)
    lengths = [
        [1 + min(40, int(made.lognormvariate(1.5, 1.0))) for _ in range(size)]
        for _ in range(groups)
    ]
    masked = [[made.random() < 0.3 for _ in of] for of in lengths]
    masked[0][0] = False
    return {
        "kind": kind,
        "groups": [(made.randint(1, 12), of) for of in lengths],
        "masked": masked if made.random() < 0.6 else [[False for _ in of] for of in lengths],
        "epochs": made.randint(1, 2),
        "mini_batches": made.randint(1, 4),
        "seed": seed,
    }


def batch_of_case(case: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """The rows of a case, in the order of groups and places."""
    rows = unstack(make_batch(case["groups"], case["seed"]))
    masked = itertools.chain(*case["masked"])
    for number, (row, is_masked) in enumerate(zip(rows, masked, strict=True)):
        row["loss_mask"] = torch.full(row["response_ids"].shape, not is_masked)
        row["reward"] = torch.tensor(number % 3 - 1.0)
        row["preference"] = 1.0 - 2.0 * row["place"].clamp(max=1)
    return rows


def algorithm_of_case(case: dict[str, Any]) -> Any:
    algorithm = {"grpo": GRPO(kl_coef=0.1), "dpo": DPO(), "ppo": PPO()}[case["kind"]]
    return algorithm.model_copy(
        update={"epochs": case["epochs"], "mini_batches": case["mini_batches"]}
    )


def optimizer_steps(
    ranks: RankCoordinates | None, cases: list[dict[str, Any]], how: str, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Of each case, in float64: the gradient's norm of each optimizer step, its metrics, and the
    weights after it; by one process (None) or a rank. ``how``: as a run deals the rows, or
    ``lopsided``: the first replicas get one row each."""
    found = []
    for case in cases:
        of = {**OPTIONS, **options, "value_head": case["kind"] == "ppo"}
        model = model_of("llama", dtype=torch.float64)
        engine = TorchTrainEngine(model, parallel=parallel_of(ranks), **of)
        rows = batch_of_case(case)
        algorithm = algorithm_of_case(case)
        if ranks is not None and how == "lopsided":
            rows = (
                rows[ranks.replica :][:1]
                if ranks.replica < ranks.layout.replicas - 1
                else rows[ranks.layout.replicas - 1 :]
            )
        elif ranks is not None:
            shapes = [GroupShape(prompt, tuple(lengths)) for prompt, lengths in case["groups"]]
            trained = [
                [
                    0 if is_masked else length
                    for length, is_masked in zip(lengths, masked, strict=True)
                ]
                for (_, lengths), masked in zip(case["groups"], case["masked"], strict=True)
            ]
            whole = algorithm.unit == "group"
            count = algorithm.mini_batches
            shares = deal(
                shapes, ranks.layout.replicas, whole=whole, mini_batches=count, trained=trained
            )
            own = {(piece.group + 40, row) for piece in shares[ranks.replica] for row in piece.rows}
            rows = [row for row in rows if (int(row["group"]), int(row["place"])) in own]
        norms: list[float] = []
        parallel: Any = engine.parallel
        clip = parallel.clip
        parallel.clip = lambda *of, norms=norms, clip=clip: norms.append(clip(*of)) or norms[-1]
        metrics = dict(engine.train_batch(stack(rows), algorithm))
        weights = {name: value.numpy().copy() for name, value in weights_of(engine).items()}
        found.append({"norms": norms, "metrics": metrics, "weights": weights})
    return found


def batch_with_rewards(seed: int) -> TensorDict:
    rows = unstack(make_batch(seed=seed))
    for row, reward in zip(rows, torch.linspace(-1, 1, len(rows)), strict=True):
        row["reward"] = reward
    return stack(rows)


@contextmanager
def spoiled(engine: Any, at: int, what: str = "gradient") -> Iterator[None]:
    """Meanwhile this process has a gradient, or a loss, that is no number in optimizer step ``at``,
    counted from 1."""
    parallel = engine.parallel
    calls = itertools.count(1)
    clip = parallel.clip
    add_up = parallel.reduce_metrics

    def spoiling_clip(*of: Any) -> float:
        if what == "gradient" and next(calls) == at:
            owner = parallel.sharded or engine.trained
            gradients = [
                parameter.grad for parameter in owner.values() if parameter.grad is not None
            ]
            getattr(gradients[0], "_local_tensor", gradients[0]).fill_(torch.nan)
        return float(clip(*of))

    def spoiling_sums(metrics: dict[str, float], everywhere: bool) -> dict[str, float]:
        added: dict[str, float] = add_up(metrics, everywhere)
        return added | {"loss": torch.nan} if what == "loss" and next(calls) == at else added

    parallel.clip = spoiling_clip
    parallel.reduce_metrics = spoiling_sums
    try:
        yield
    finally:
        parallel.clip = clip
        parallel.reduce_metrics = add_up


def skipped_on_ranks(ranks: RankCoordinates, where: str) -> dict[str, Any]:
    """Three batches of two epochs and two mini-batches.

    Of the second one the last rank has something that is no number: the rows of its last group, a
    gradient or a loss.
    """
    engine = TorchTrainEngine(
        model_of("llama"),
        parallel=Sharded(ranks),
        **OPTIONS,
        warmup_steps=8,
        compute=torch.bfloat16,
    )
    several = algorithm().model_copy(update={"epochs": 2, "mini_batches": 2})
    is_last = ranks.rank == ranks.world - 1
    engine.train_batch(share(ranks, seed=0), several)
    before = whole_state(engine)
    batch = share(ranks, seed=1)
    error = ""
    if where == "rows":
        numbers = batch["group"]
        last = max(int(number) for number in make_batch()["group"])
        batch["advantage"][numbers == last] = torch.nan
    try:
        with spoiled(engine, 2, where if is_last else ""):
            engine.train_batch(batch, several)
    except FloatingPointError as refused:
        error = str(refused)
    after = whole_state(engine)
    differs = [name for name, value in before.items() if not np.array_equal(value, after[name])]
    counts = {"step": engine.step, "version": engine.version}
    metrics = dict(engine.train_batch(share(ranks, seed=2), several))
    rate = metrics["learning_rate"]
    return {"error": error, "differs": differs, **counts, "learning_rate": rate, "next": metrics}
