"""Mixed precision on one rank: bfloat16 arithmetic, float32 master weights, gradient sums and
moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from orchestration.checkpoints.checkpoint import Checkpoint, Writer
from stages.engines.torch.decoding.decoder import TorchDecoder
from stages.engines.torch.optimizers import weights
from stages.engines.torch.train import TorchTrainEngine
from stages.parallel.layout import Layout
from stages.parallel.placement import model_state, place
from stages.resharding.plan import plan_reshard
from stages.resharding.swap import Swap
from stages.resharding.tensors import live_bytes
from tests.batches import make_batch
from tests.ranks import on_ranks
from tests.stages.engines.torch.test_sharded import assert_same_state
from tests.stages.sharded import (
    OPTIONS,
    algorithm,
    gradients_of_step,
    model_of,
    resumed,
    saved,
    weights_of,
    whole_state,
)

MIXED: dict[str, Any] = {**OPTIONS, "compute": torch.bfloat16}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def engine_of(kind: str = "qwen3", seed: int = 0, **options: Any) -> TorchTrainEngine:
    return TorchTrainEngine(model_of(kind, seed=seed), **{**MIXED, **options})


def masters(engine: TorchTrainEngine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.state_dict()["model"].items()}


@pytest.mark.parametrize(
    ("compute", "least", "most"), [(None, 0.0, 0.1), (torch.bfloat16, 0.98, 1.0)]
)
def test_small_updates_move_master_weights_and_are_rounded_away_without(
    compute: torch.dtype | None, least: float, most: float
) -> None:
    kept = torch.bfloat16 if compute is None else torch.float32
    options = {**OPTIONS, "learning_rate": 1e-6, "total_steps": 30, "compute": compute}
    engine = TorchTrainEngine(model_of("qwen3", dtype=kept), **options)
    before = masters(engine)
    for seed in range(30):
        engine.train_batch(make_batch(seed=seed), algorithm())
    # Rows of the embedding whose token never occurs have a gradient from the softmax alone, which
    # may be 0 in bfloat16.
    trained = {name: value for name, value in masters(engine).items() if "embed" not in name}
    moved = sum(int((value != before[name]).sum()) for name, value in trained.items())
    share = moved / sum(value.numel() for value in trained.values())
    assert least <= share <= most


def test_it_computes_as_the_bfloat16_model_and_publishes_its_weights() -> None:
    engine = engine_of()
    half = TorchTrainEngine(model_of("qwen3", dtype=torch.bfloat16), **OPTIONS)
    assert [row.tolist() for row in engine.logprobs(make_batch()).unbind()] == [
        row.tolist() for row in half.logprobs(make_batch()).unbind()
    ]
    for seed in range(3):
        engine.train_batch(make_batch(seed=seed), algorithm())
    state = engine.state_dict()
    assert {
        value.dtype for part in ("model", "exp_avg", "exp_avg_sq") for value in state[part].values()
    } == {torch.float32}
    published = weights_of(engine)
    assert published.keys() == state["model"].keys()
    for name, master in state["model"].items():
        assert torch.equal(published[name], master.bfloat16()), name
        assert not torch.equal(master, master.bfloat16().float()), (
            f"{name}: no more than bfloat16 holds"
        )


def test_micro_batches_are_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is the float32 sum of those that the micro-batches give in bfloat16
    arithmetic."""
    parts: dict[int, list[torch.Tensor]] = {}
    pass_on = weights._pass_gradient_on

    def record(master: torch.nn.Parameter, copy: torch.Tensor) -> None:
        assert copy.grad is not None
        assert copy.grad.dtype == torch.bfloat16
        parts.setdefault(id(master), []).append(copy.grad.float())
        pass_on(master, copy)

    monkeypatch.setattr(weights, "_pass_gradient_on", record)
    engine = engine_of(grad_clip=None)
    gradients, _ = gradients_of_step(engine, make_batch(), algorithm())
    for name, gradient in gradients.items():
        first, *others = parts[id(engine.trained[name])]
        assert others, "several micro-batches"
        for part in others:
            first = first + part
        assert torch.equal(gradient, first), name
        assert not torch.equal(gradient, gradient.bfloat16().float()), (
            f"{name}: no more than bfloat16 holds"
        )
    assert not any(copy.grad is not None for copy in engine.parallel.copies.values())


def test_the_gradient_of_embeddings_that_are_the_output_layer_too_is_whole() -> None:
    """Master weights take a gradient away when it has come: that of the words is in it by then."""
    words = "model.embed_tokens.weight"
    fast, plain = (
        gradients_of_step(engine_of(kernels=kernels), make_batch(), algorithm())[0][words].float()
        for kernels in ("auto", "plain")
    )
    assert (fast - plain).norm() / plain.norm() < 0.001


def test_a_checkpoint_of_one_rank_resumes_on_two_and_back(tmp_path: Path) -> None:
    options = {"compute": torch.bfloat16}
    one = engine_of()
    one.train_batch(make_batch(), algorithm())
    writer = Writer(one)
    writer.copy()
    writer.write(tmp_path / "one")
    assert {
        v.dtype for v in load_file(tmp_path / "one" / "model" / "model.safetensors").values()
    } == {torch.bfloat16}
    before, _ = on_ranks(2, 1, resumed, "qwen3", str(tmp_path / "one"), options)[0]
    assert_same_state(before, whole_state(one))
    expected = on_ranks(2, 1, saved, "qwen3", str(tmp_path / "two"), options)[0]
    back = engine_of(seed=9)
    Checkpoint(tmp_path / "two", 1, {}, []).load_into(back)
    assert_same_state(whole_state(back), expected)
    for name, weight in back.weights():
        np.testing.assert_array_equal(
            weight.float().numpy(),
            torch.from_numpy(expected[f"model/{name}"]).bfloat16().float().numpy(),
        )


def test_it_saves_a_model_in_the_dtype_in_which_it_computes(tmp_path: Path) -> None:
    engine = engine_of("llama")
    engine.train_batch(make_batch(), algorithm())
    engine.save_pretrained(tmp_path)
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {
        torch.bfloat16
    }
    assert '"dtype": "bfloat16"' in (tmp_path / "config.json").read_text()


def test_a_colocated_swap_takes_master_weights_and_copies_off_the_device() -> None:
    """Two steps with and without swaps end at the same weights, and the rollout's tensors are those
    that are published."""
    ended = []
    state = model_state(model_of("llama").config, torch.float32)
    for swapping in (False, True):
        engine = engine_of("llama")
        decoder = TorchDecoder(
            model_of("llama", dtype=torch.bfloat16), torch.device("cpu"), packed=False
        )
        names = "vllm" if decoder.fused else "hf"
        plan = plan_reshard(
            place(state, Layout()),
            place(state, Layout(), names=names, dtype=torch.bfloat16),
            bucket_bytes=4096,
        )
        tensors = decoder.weights.tensors()
        swap = Swap(plan, 0, engine.shards(), engine.held, device=engine.device, rollout=tensors)
        for seed in range(2):
            engine.train_batch(make_batch(seed=seed), algorithm())
            if swapping:
                weights = weights_of(engine)
                own = [*engine.shards().values(), *engine.held()]
                swap.to_rollout()
                assert live_bytes(own) == swap.training_bytes() == 0
                for name, parameter in decoder.model.named_parameters():
                    assert torch.equal(parameter, weights[name]), name
                swap.prefetch()
                swap.ready()
        ended.append(whole_state(engine))
    assert_same_state(ended[1], ended[0])
