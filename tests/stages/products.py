"""What ranks do in the tests of products of strategies.

Each function runs on every rank; arguments are small.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.training.parallel import model_of as larger_model
from stages.adapters.options import AdapterOptions
from stages.engines.torch.parallel.sharded import Sharded
from stages.engines.torch.train import TorchTrainEngine
from stages.flow.catalogue import ROUTED
from stages.parallel.layout import Layout, RankCoordinates
from stages.parallel.placement import model_state, place, train_placement
from stages.resharding.plan import plan_reshard
from stages.resharding.swap import Swap
from tests.allocations import Allocations
from tests.batches import make_batch, stack, unstack
from tests.stages.resharding.swaps import laid_out
from tests.stages.sharded import (
    OPTIONS,
    algorithm,
    differing,
    gradients_of_step,
    model_of,
    parallel_of,
    positions,
    share,
    weights_of,
)


def name_of(chosen: Mapping[str, int], options: Mapping[str, Any] | None = None) -> str:
    """As in ``dp4-dp_replicate2``."""
    return "-".join(
        [*(f"{name}{size}" for name, size in chosen.items()), *map(str, (options or {}).values())]
    )


def first_step(ranks: RankCoordinates, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A step in float32, and :func:`after_steps`, by a rank.

    Gradients are of the parameters that it has.
    """
    engine = TorchTrainEngine(model_of(kind), parallel=Sharded(ranks), **{**OPTIONS, **options})
    logprobs = [row.tolist() for row in engine.logprobs(share(ranks)).unbind()]
    gradients, metrics = gradients_of_step(engine, share(ranks), algorithm())
    of_rank = {name: value.numpy() for name, value in gradients.items()}
    return {
        "metrics": metrics,
        "logprobs": logprobs,
        "gradients": of_rank,
        "steps": after_steps(ranks, kind, options),
    }


def after_steps(
    ranks: RankCoordinates | None, kind: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    """All weights after three steps, in float64, by one process (None) or a rank."""
    model = model_of(kind, dtype=torch.float64)
    options = {**OPTIONS, "grad_clip": 0.5, "weight_decay": 0.1, **given}
    engine = TorchTrainEngine(model, parallel=parallel_of(ranks), **options)
    for seed in range(3):
        batch = make_batch(seed=seed) if ranks is None else share(ranks, seed=seed)
        engine.train_batch(batch, algorithm())
    return {name: value.numpy() for name, value in weights_of(engine).items()}


def of_context(ranks: RankCoordinates, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Gradients of a step, twice; of one whose activations are computed again; of one that computes
    in bfloat16. And the tokens that this rank is fed of each micro-batch."""
    found: dict[str, Any] = {"fed": []}
    variants: dict[str, dict[str, Any]] = {
        "first": {},
        "second": {},
        "again": {"activation_checkpointing": True},
    }
    for name, more in (variants | {"half": {"compute": torch.bfloat16}}).items():
        engine = TorchTrainEngine(
            model_of(kind), parallel=Sharded(ranks), **{**OPTIONS, **options, **more}
        )
        layer = engine.model.base_model.layers[0]
        fed = found["fed"] if name == "first" else []
        layer.register_forward_pre_hook(lambda _, given, fed=fed: fed.append(given[0].shape[1]))
        gradients, _ = gradients_of_step(engine, share(ranks), algorithm())
        found[name] = {key: value.float().numpy() for key, value in gradients.items()}
    return found


def of_tokens(ranks: RankCoordinates, kind: str) -> dict[str, Any]:
    """Gradients of a step, and of one whose activations are computed again; and the tokens of each
    forward of the embedding and, on this rank, of each norm between blocks."""
    found: dict[str, Any] = {"fed": [], "norms": []}
    for again in (True, False):
        engine = TorchTrainEngine(
            model_of(kind), parallel=Sharded(ranks), **OPTIONS, activation_checkpointing=again
        )
        decoder: Any = engine.model.base_model
        for seen in found["fed"], found["norms"]:
            seen.clear()
        decoder.embed_tokens.register_forward_hook(
            lambda _, __, out: found["fed"].append(out.shape[-2])
        )
        for layer in decoder.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.register_forward_hook(lambda _, __, out: found["norms"].append(out.shape[-2]))
        gradients, _ = gradients_of_step(engine, share(ranks), algorithm())
        found["again" if again else "first"] = {
            name: value.numpy() for name, value in gradients.items()
        }
    return found


def bytes_of_long_rows(ranks: RankCoordinates, tokens: int, options: Mapping[str, Any]) -> int:
    """The most bytes that a rank holds at one time in a step of two responses of so many tokens,
    beyond those before it."""
    of = {**OPTIONS, "token_budget": 1024, **options}
    engine = TorchTrainEngine(larger_model(128, False), parallel=Sharded(ranks), **of)
    batch = make_batch([(16, (tokens - 16, tokens - 16))])
    engine.train_batch(batch, algorithm())  # makes AdamW's moments
    memory = Allocations()
    engine.train_batch(batch, algorithm())
    memory.stop()
    return max(itertools.accumulate(memory.sizes()))


def replayed(ranks: RankCoordinates | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Logprobs and gradients of a batch with choices of experts that are followed, by one process
    (None) or a rank."""
    rng = torch.Generator().manual_seed(0)
    rows = unstack(make_batch())
    of_prompts = {
        int(row["group"]): torch.rand(len(row["prompt_ids"]), 2, 8, generator=rng) for row in rows
    }
    for row in rows:
        own = torch.rand(len(row["response_ids"]) - 1, 2, 8, generator=rng)
        order = torch.cat([of_prompts[int(row["group"])], own]).argsort(-1)
        row[ROUTED] = order[..., :2].flatten().to(torch.uint8)
    batch = stack(
        rows
        if ranks is None
        else [rows[at] for at in positions(ranks.layout.replicas)[ranks.replica]]
    )
    model = model_of("experts")
    engine = TorchTrainEngine(model, parallel=parallel_of(ranks), **OPTIONS, **options)
    logprobs = [row.tolist() for row in engine.logprobs(batch).unbind()]
    gradients, metrics = gradients_of_step(engine, batch, algorithm())
    of_rank = {name: value.numpy() for name, value in gradients.items()}
    return {"logprobs": logprobs, "gradients": of_rank, "agreement": metrics["routing_agreement"]}


def of_experts(ranks: RankCoordinates, folder: str) -> dict[str, Any]:
    """What else holds with experts on several ranks: gradients of a step whose activations are
    computed again and of one whose are not, and the latter's weights, twice; tensors that ranks
    read otherwise than transformers from ``folder``; tokens that were fed, and given to each expert
    of each layer."""
    found: dict[str, Any] = {"differing": differing(ranks, {"experts": folder}, torch.float32)}
    for name, again in (("again", True), ("first", False), ("second", False)):
        engine = TorchTrainEngine(
            model_of("experts"), parallel=Sharded(ranks), **OPTIONS, activation_checkpointing=again
        )
        gradients, metrics = gradients_of_step(engine, share(ranks), algorithm())
        found[name] = {key: value.numpy() for key, value in gradients.items()}
        found[f"{name} weights"] = {key: value.numpy() for key, value in weights_of(engine).items()}
        load = engine.packed_model.expert_load
        assert load is not None
        counts = engine.parallel.total_of_tokens(load.counts)
        found[f"{name} load"] = (metrics["fed_tokens"], counts.tolist(), metrics["max_expert_load"])
    return found


def figure_three(ranks: RankCoordinates, rollout: Layout) -> int:
    """Two steps, and after each the weights in the tensors of ``rollout`` and back again: the bits
    are those of the whole weights, and training ends with the weights that it has without. Returns
    the bytes that this rank received."""
    state = model_state(model_of("experts").config, torch.float32)
    ended = []
    plan = plan_reshard(
        train_placement(state, ranks.layout), place(state, rollout, names="vllm"), bucket_bytes=4096
    )
    for swapping in (False, True):
        engine = TorchTrainEngine(model_of("experts"), parallel=Sharded(ranks), **OPTIONS)
        swap = Swap(plan, ranks.rank, engine.shards(), engine.held, device=engine.device)
        for step in range(2):
            engine.train_batch(share(ranks, seed=step), algorithm())
            if swapping:
                whole = weights_of(engine)
                parts = [(t, whole[t.name].chunk(len(t.parts), t.dim)) for t in state.tensors]
                full = {
                    name: part
                    for t, values in parts
                    for name, part in zip(t.parts, values, strict=True)
                }
                wanted = laid_out(full, plan.target, ranks.rank)
                found = swap.to_rollout()
                assert found.keys() == wanted.keys()
                for name, value in wanted.items():
                    assert torch.equal(found[name], value), name
                assert swap.training_bytes() == 0
                swap.prefetch()
                swap.ready()
        ended.append(weights_of(engine))
    assert all(torch.equal(value, ended[1][name]) for name, value in ended[0].items())
    return plan.received[ranks.rank]


def of_stages(ranks: RankCoordinates, kind: str, folder: str) -> dict[str, Any]:
    """Gradients of a step, twice; of one whose activations are computed again, of one in bfloat16,
    and of adapters; and the
    weights that the first one publishes, after it has written them below ``folder``."""
    found: dict[str, Any] = {}
    adapters = AdapterOptions(rank=4, alpha=8, targets=(), seed=0, dtype="float32")
    variants: dict[str, dict[str, Any]] = {
        "first": {},
        "second": {},
        "again": {"activation_checkpointing": True},
    }
    variants["half"] = {"compute": torch.bfloat16}
    variants["adapters"] = {"adapters": adapters}
    for name, more in variants.items():
        engine = TorchTrainEngine(model_of(kind), parallel=Sharded(ranks), **{**OPTIONS, **more})
        gradients, _ = gradients_of_step(engine, share(ranks), algorithm())
        found[name] = {key: value.float().numpy() for key, value in gradients.items()}
        if name == "first":
            found["published"] = {key: value.numpy() for key, value in weights_of(engine).items()}
            engine.save_pretrained(Path(folder) / "written")
        if name == "adapters":
            engine.save_pretrained(Path(folder) / "merged" / "model")
    return found


def swapped_stages(ranks: RankCoordinates, kind: str) -> None:
    """Two steps, with a swap after each, as :func:`figure_three`."""
    state = model_state(model_of(kind).config, torch.float32)
    ended = []
    target = place(state, Layout(dp_replicate=ranks.world // 2, tp=2), names="vllm")
    plan = plan_reshard(train_placement(state, ranks.layout), target, bucket_bytes=4096)
    for swapping in (False, True):
        engine = TorchTrainEngine(model_of(kind), parallel=Sharded(ranks), **OPTIONS)
        swap = Swap(plan, ranks.rank, engine.shards(), engine.held, device=engine.device)
        for step in range(2):
            engine.train_batch(share(ranks, seed=step), algorithm())
            if swapping:
                wanted = laid_out(weights_of(engine), plan.target, ranks.rank)
                found = swap.to_rollout()
                assert found.keys() == wanted.keys()
                assert all(torch.equal(found[name], value) for name, value in wanted.items())
                swap.prefetch()
                swap.ready()
        ended.append(weights_of(engine))
    assert all(torch.equal(value, ended[1][name]) for name, value in ended[0].items())
