"""Each optimizer of ``train.optimizer``: its step beside float64 formulas and libraries, its state
in undo, checkpoints and memory, and its ranks."""

from __future__ import annotations

import math
from collections import ChainMap
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from orchestration.checkpoints import checkpoint
from pipeline.compat.extras import is_installed
from stages.engines.optimizers import OPTIMIZERS
from stages.engines.torch.optimizers.muon import orthogonal
from stages.engines.torch.train import TorchTrainEngine
from stages.parallel.layout import RankCoordinates
from stages.resharding.tensors import live_bytes
from tests.batches import make_batch
from tests.ranks import of_product
from tests.stages.sharded import (
    OPTIONS,
    algorithm,
    gradients_of_step,
    model_of,
    parallel_of,
    resumed,
    saved,
    share,
    weights_of,
)

RATE = 1e-2
DECAY = 0.1
# torchao is not of the environment of the tests: transformers imports it into every process
EIGHT_BITS = pytest.mark.skipif(not is_installed("torchao"), reason="needs the extra optimizers")
each = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=EIGHT_BITS if k.package else ()) for n, k in OPTIMIZERS.items()]
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def blocked_model(seed: int = 0) -> PreTrainedModel:
    """A model whose matrices have whole blocks of 256 numbers, 4096 at least."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            tie_word_embeddings=False,
        )
    )


def engine_of(name: str, model: PreTrainedModel | None = None, **options: Any) -> TorchTrainEngine:
    of = {**OPTIONS, "learning_rate": RATE, "weight_decay": DECAY, "optimizer": name, **options}
    return TorchTrainEngine(model or blocked_model(), **of)


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """Five steps of the quintic iteration, in float64."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def in_layers(model: PreTrainedModel) -> set[str]:
    return {name for name, p in model.named_parameters() if ".layers." in name and p.ndim >= 2}


@pytest.mark.parametrize("kind", ["biased", "llama", "experts"])
def test_muon_makes_the_steps_of_its_formula_and_of_torch(kind: str) -> None:
    """The matrices in layers beside float64 within the rounding of bfloat16, and beside
    torch.optim.Muon on plain parameters; all else is exactly AdamW's."""
    model = model_of(kind)
    engine = engine_of("muon", model)
    hidden = in_layers(model)
    assert 0 < len(hidden) < len(engine.trained)
    before = weights_of(engine)
    momentum = {name: np.zeros(before[name].shape) for name in hidden}
    exact = {name: before[name].double().numpy() for name in hidden}
    plain: dict[str, list[torch.nn.Parameter]] = {}
    for name in hidden:  # of stacked experts each by itself
        matrices = before[name].reshape(-1, *before[name].shape[-2:])
        plain[name] = [torch.nn.Parameter(matrix.clone()) for matrix in matrices]
    muon = torch.optim.Muon(
        chain.from_iterable(plain.values()),
        lr=RATE,
        weight_decay=DECAY,
        adjust_lr_fn="match_rms_adamw",
    )
    others = {n: torch.nn.Parameter(w.clone()) for n, w in before.items() if n not in hidden}
    decayed = [p for n, p in others.items() if p.ndim == 2]
    groups = [
        {"params": decayed, "weight_decay": DECAY},
        {"params": [p for p in others.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=RATE, fused=True)
    for seed in range(2):
        gradients, metrics = gradients_of_step(engine, make_batch(seed=seed), algorithm())
        assert metrics["learning_rate"] == RATE
        for name, gradient in gradients.items():
            if name not in hidden:
                others[name].grad = gradient
                continue
            parts = gradient.reshape(-1, *gradient.shape[-2:])
            for parameter, part in zip(plain[name], parts, strict=True):
                parameter.grad = part.contiguous()
            momentum[name] = 0.95 * momentum[name] + 0.05 * gradient.double().numpy()
            update = 0.95 * momentum[name] + 0.05 * gradient.double().numpy()
            rows, columns = update.shape[-2:]
            stacked = [newton_schulz(each) for each in update.reshape(-1, rows, columns)]
            factor = RATE * 0.2 * math.sqrt(max(rows, columns))
            exact[name] *= 1 - RATE * DECAY
            exact[name] -= factor * np.reshape(stacked, update.shape)
        muon.step()
        adamw.step()
    after = weights_of(engine)
    for name, weight in others.items():
        torch.testing.assert_close(after[name], weight.detach(), rtol=0, atol=0)
    for name in hidden:
        moved = float((after[name] - before[name]).norm())
        of_torch = torch.stack([p.detach() for p in plain[name]]).view_as(after[name])
        assert float((after[name] - of_torch).norm()) < 1e-2 * moved, name
        gap = np.linalg.norm(after[name].double().numpy() - exact[name])
        assert gap < 0.25 * moved, name  # the rounding of bfloat16, in five iterations


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (3, 32, 32)])
def test_singular_values_come_near_one_and_a_matrix_of_zeros_stays(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrices).double())
    assert values.min() > 0.3
    assert values.max() < 1.3
    assert not orthogonal(torch.zeros(shape)).any()


def muon_step(ranks: RankCoordinates | None, kind: str) -> dict[str, Any]:
    """The weights after a step, by one process (None) or a rank."""
    engine = engine_of("muon", model_of(kind), parallel=parallel_of(ranks))
    engine.train_batch(make_batch() if ranks is None else share(ranks), algorithm())
    return {name: value.detach().numpy().copy() for name, value in weights_of(engine).items()}


@pytest.mark.parametrize(
    ("kind", "product"),
    [
        ("qwen3", {"dp": 4, "dp_replicate": 2}),
        ("biased", {"dp": 2, "tp": 2}),
        ("experts", {"dp": 2, "ep": 2}),
        ("llama-4", {"dp": 2, "pp": 2}),
    ],
)
def test_ranks_orthogonalise_whole_matrices(kind: str, product: dict[str, Any]) -> None:
    """Gradients differ by the order of sums, which bfloat16 lets show."""
    before = {name: weight.detach().numpy() for name, weight in model_of(kind).named_parameters()}
    alone = muon_step(None, kind)
    for found in of_product(product, muon_step, kind):
        for name, weight in alone.items():
            gap = np.linalg.norm(found[name] - weight) / np.linalg.norm(weight - before[name])
            assert gap < 0.05, f"{name}: {gap} of the way"


def test_muon_of_ranks_resumes_at_another_layout_bit_for_bit(tmp_path: Path) -> None:
    options = {"optimizer": "muon"}
    arguments = ("qwen3", str(tmp_path), options)
    before = ChainMap(*of_product({"dp": 2, "tp": 2}, saved, *arguments))
    after = ChainMap(*(state for state, _ in of_product({"dp": 2}, resumed, *arguments)))
    assert after.keys() == before.keys()
    assert any(name.startswith("momentum_buffer/") and value.any() for name, value in after.items())
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


@each
def test_a_checkpoint_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    first = engine_of(name)
    for seed in range(2):
        first.train_batch(make_batch(seed=seed), algorithm())
    writer = checkpoint.Writer(first)
    writer.copy()
    writer.write(tmp_path)
    second = engine_of(name, blocked_model(seed=9))
    checkpoint.Checkpoint(tmp_path, 2, {}, []).load_into(second)
    for engine in (first, second):
        engine.train_batch(make_batch(seed=2), algorithm())
    assert_same(first, second)


@each
def test_undo_brings_all_state_back(name: str) -> None:
    engine = engine_of(name, undoable=True)
    other = engine_of(name)
    for trained in (engine, other):
        trained.train_batch(make_batch(seed=0), algorithm())
    engine.train_batch(make_batch(seed=1), algorithm())
    engine.undo()
    for trained in (engine, other):
        trained.train_batch(make_batch(seed=2), algorithm())
    assert_same(engine, other)


def assert_same(one: TorchTrainEngine, other: TorchTrainEngine) -> None:
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    for part in states[0].keys() - {"step", "version"}:
        assert states[0][part].keys() == states[1][part].keys()
        for name, value in states[0][part].items():
            torch.testing.assert_close(states[1][part][name], value, rtol=0, atol=0)


@each
def test_the_bytes_of_its_state_are_those_that_plans_count(name: str) -> None:
    engine = engine_of(name)
    engine.train_batch(make_batch(), algorithm())
    counts = [p.numel() for n, p in engine.trained.items() if n in in_layers(engine.model)]
    others = sum(p.numel() for p in engine.trained.values()) - sum(counts)
    planned = OPTIMIZERS[name].state_bytes(sum(counts), others, 4)
    beside = 2 * (2 * 256 * 4 + 2 * 4)  # of each parameter: tables of 256 codes, a count
    extra = live_bytes(engine.held()) - planned
    assert 0 <= extra <= beside * len(engine.trained)


@EIGHT_BITS
def test_eight_bits_make_nearly_the_steps_of_adamw() -> None:
    """The first step is AdamW's, as its moments are rounded after it; later ones are near."""
    engines = [engine_of(name) for name in ("adamw", "adamw8bit")]
    before = weights_of(engines[0])
    for seed in range(4):
        for engine in engines:
            engine.train_batch(make_batch(seed=seed), algorithm())
        exact, rounded = map(weights_of, engines)
        for name, weight in exact.items():
            moved = float((weight - before[name]).norm())
            gap = float((rounded[name] - weight).norm()) / moved
            assert gap < (0.1 if seed else 1e-4), name
    state = engines[1].state_dict()
    assert state["exp_avg.codes"]["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8


def test_a_name_that_is_not_known_names_the_others() -> None:
    with pytest.raises(ValueError, match=r"optimizer: 'sgd' is not known; use one of adamw, ad"):
        engine_of("sgd")


def test_the_state_of_another_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"of another model or optimizer"):
        engine_of("muon").load_state_dict(engine_of("adamw").state_dict())
