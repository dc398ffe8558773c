"""The entropy terms of a loss: a bonus that is steered to a target, and a policy gradient of the
tokens with the highest entropies; each against formulas in plain Python, and over checkpoints."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from orchestration.checkpoints.checkpoint import Checkpoint, Writer
from stages.algorithms import Algorithm, build_algorithm
from stages.algorithms.batch import TrainBatch
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.algorithms.policy_gradient.terms.entropy import BEFORE, COEF, HIGH, LEVEL
from stages.algorithms.token_batch import TokenBatch
from stages.engines.mock.engines import MockTrainEngine
from stages.engines.mock.options import MockTrainOptions
from stages.engines.torch.train import TorchTrainEngine
from tests.batches import make_batch
from tests.stages.algorithms.test_policy_gradient import pack, random_rows
from tests.stages.sharded import OPTIONS, model_of, weights_of

STEERED: dict[str, Any] = {"entropy_coef": 0.02, "entropy_target": 4.0, "entropy_coef_step": 0.01}


def test_the_weight_rises_below_the_target_and_is_left_out_above() -> None:
    algorithm = build_algorithm("grpo", STEERED | {"entropy_coef_max": 0.035})
    numbers = algorithm.control_begins
    weights = []
    levels = []
    for entropy in (3.0, 3.9, 4.0, 4.1, 5.0, 6.0, 7.0, 4.0, 3.0):
        numbers = algorithm.control(numbers, {"entropy": entropy})
        weights.append(numbers[COEF])
        levels.append(numbers[LEVEL])
    assert levels == pytest.approx([0.03, 0.035, 0.035, 0.025, 0.015, 0.005, 0.0, 0.0, 0.01])
    assert weights == pytest.approx([0.03, 0.035, 0.035, 0.0, 0.0, 0.0, 0.0, 0.0, 0.01])
    fixed = build_algorithm("grpo", {"entropy_coef": 0.02})
    assert fixed.control_begins == fixed.control({}, {"entropy": 1.0}) == {}


def packed(algorithm: Algorithm, seed: int = 0) -> TokenBatch:
    rows = random_rows(seed, rows=6, spread=0.3)
    tokens = pack(rows, algorithm, 6, sum(len(row["now"]) for row in rows))
    return replace(tokens, entropy=tokens.logprobs.square())


def test_the_loss_has_the_bonus_of_the_present_weight() -> None:
    algorithm = build_algorithm("grpo", STEERED)
    tokens = packed(algorithm)
    plain = build_algorithm("grpo", {}).loss(tokens).loss.item()
    assert tokens.entropy is not None
    assert tokens.weight is not None
    entropy = (tokens.entropy * tokens.weight).sum().item() / tokens.total_tokens
    for weight in (0.3, 0.0):
        steered = algorithm.loss(replace(tokens, control={COEF: weight, LEVEL: 0.3}))
        assert steered.loss.item() == pytest.approx(plain - weight * entropy, rel=1e-12)
    with pytest.raises(ValueError, match="keeps no numbers of control"):
        algorithm.loss(tokens)


def test_a_beginning_above_the_largest_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"entropy_coef\n  is above entropy_coef_max = 0.01"):
        build_algorithm("grpo", STEERED | {"entropy_coef_max": 0.01})


def test_a_resumed_run_goes_on_with_the_weight_that_it_had(tmp_path: Path) -> None:
    """The reported weights follow from the reported entropies; and the fourth step is the same to
    the bit after a checkpoint, by an engine that was made anew."""
    algorithm = GRPO(**STEERED | {"entropy_target": 3.6})
    engine = TorchTrainEngine(model_of("llama"), **OPTIONS)
    level = expected = algorithm.entropy_coef
    entropies = []
    for seed in range(3):
        metrics = engine.train_batch(make_batch(seed=seed), algorithm)
        assert metrics[COEF] == expected
        entropies.append(metrics["entropy"])
        below = metrics["entropy"] < 3.6
        level = level + 0.01 if below else max(0.0, level - 0.01)
        expected = level if below else 0.0
    assert min(entropies) < 3.6 < max(entropies), "both ways are gone"
    writer = Writer(engine)
    writer.copy()
    writer.write(tmp_path)
    resumed = TorchTrainEngine(model_of("llama", seed=9), **OPTIONS)
    Checkpoint(tmp_path, 3, {}, []).load_into(resumed)
    results = [each.train_batch(make_batch(seed=3), algorithm) for each in (engine, resumed)]
    assert results[0] == results[1]
    assert results[0][COEF] == expected
    assert results[0][LEVEL] == level
    weights = weights_of(engine)
    assert all(torch.equal(value, weights[name]) for name, value in weights_of(resumed).items())


def test_a_checkpoint_without_numbers_of_control_is_gone_on_from(tmp_path: Path) -> None:
    """As a fork with other options does; and options that were taken out leave nothing."""
    before = TorchTrainEngine(model_of("llama"), **OPTIONS)
    before.train_batch(make_batch(), GRPO())
    writer = Writer(before)
    writer.copy()
    writer.write(tmp_path / "plain")
    engine = TorchTrainEngine(model_of("llama"), **OPTIONS)
    engine.train_batch(make_batch(), GRPO(**STEERED))
    assert "control" in engine.state_dict()
    Checkpoint(tmp_path / "plain", 1, {}, []).load_into(engine)
    assert engine.train_batch(make_batch(seed=1), GRPO(**STEERED))[COEF] == 0.02
    assert COEF not in engine.train_batch(make_batch(seed=1), GRPO())
    assert "control" not in engine.state_dict()


def test_a_batch_that_is_undone_leaves_the_weight_as_it_was() -> None:
    engine = TorchTrainEngine(model_of("llama"), **OPTIONS, undoable=True)
    first = engine.train_batch(make_batch(), GRPO(**STEERED))
    engine.undo()
    assert engine.train_batch(make_batch(), GRPO(**STEERED)) == first


def test_a_critic_that_warms_up_leaves_the_weight_as_it_is() -> None:
    algorithm = build_algorithm("ppo", STEERED | {"critic_warmup_steps": 1, "epochs": 1})
    engine = TorchTrainEngine(model_of("llama"), **OPTIONS, value_head=True)
    weights = []
    for seed in range(3):
        batch = make_batch(seed=seed)
        batch["reward"] = batch["advantage"]
        metrics = engine.train_batch(batch, algorithm)
        weights.append(metrics[LEVEL])
    assert weights[:2] == [0.02, 0.02]
    assert weights[2] != 0.02


# --- the tokens with the highest entropies


def of_entropies(
    entropies: list[list[float]], masks: list[list[bool]], share: float, total: Any = None
) -> list[bool]:
    algorithm = build_algorithm("dr_grpo", {"high_entropy_share": share})
    rows = [torch.tensor(row, dtype=torch.float64) for row in entropies]
    zeros = torch.nested.nested_tensor([row * 0 for row in rows], layout=torch.jagged)
    data = {
        "response_ids": zeros.long(),
        "rollout_logprobs": zeros.float(),
        "advantage": torch.ones(len(rows)),
        "loss_mask": torch.nested.nested_tensor(
            [torch.tensor(mask) for mask in masks], layout=torch.jagged
        ),
    }
    batch = TrainBatch(
        TensorDict(data, [len(rows)]),
        algorithm,
        *([total] if total else []),
        computed={BEFORE: torch.cat(rows)},
    )
    return [bool(value) for value in batch[HIGH]]


def quantile(values: list[float], at: float) -> float:
    """Interpolated linearly."""
    ordered = sorted(values)
    place = at * (len(ordered) - 1)
    low = math.floor(place + 1e-9)
    high = min(low + 1, len(ordered) - 1)
    part = max(0.0, place - low)
    return ordered[low] * (1 - part) + ordered[high] * part if part > 1e-9 else ordered[low]


@given(st.integers(0, 10_000), st.sampled_from([0.01, 0.1, 0.2, 0.3, 0.5, 0.99, 1.0]))
def test_the_tokens_at_and_above_the_quantile_of_the_trained_ones_are_selected(
    seed: int, share: float
) -> None:
    drawn = random.Random(seed)
    lengths = [drawn.randint(1, 6) for _ in range(drawn.randint(1, 6))]
    # some are equal, and certain tokens have next to none
    entropies = [
        [drawn.choice([0.0, 1e-7, drawn.uniform(0, 5)]) for _ in range(n)] for n in lengths
    ]
    masks = [[drawn.random() < 0.8 for _ in range(n)] for n in lengths]
    masks[0][0] = True
    pairs = [
        (entropy, is_trained)
        for row, mask in zip(entropies, masks, strict=True)
        for entropy, is_trained in zip(row, mask, strict=True)
    ]
    cut = quantile([entropy for entropy, is_trained in pairs if is_trained], 1 - share)
    expected = [is_trained and entropy >= cut for entropy, is_trained in pairs]
    assert of_entropies(entropies, masks, share) == expected


def test_the_tokens_are_those_of_trl() -> None:
    trainers = pytest.importorskip("trl.trainer", reason="pip install 'asyncdock[bench]'")
    drawn = random.Random(1)
    entropies = [[drawn.uniform(0, 5) for _ in range(9)] for _ in range(7)]
    masks = [[place < 9 - row for place in range(9)] for row in range(7)]
    accelerator = type(
        "Alone", (), {"gather": lambda _, x: x, "pad_across_processes": lambda _, x, **__: x}
    )()
    mask = trainers.GRPOTrainer.get_high_entropy_mask(
        type("Trainer", (), {"accelerator": accelerator})(),
        torch.tensor(entropies),
        torch.tensor(masks).float(),
        1 - 0.2,
    )
    assert of_entropies(entropies, masks, 0.2) == mask.flatten().tolist()


@pytest.mark.parametrize("name", ["grpo", "cispo", "reinforce_pp", "m2po"])
def test_the_other_tokens_have_no_policy_gradient(name: str) -> None:
    """The KL to the reference, and the bonus, stay those of all tokens."""
    algorithm = build_algorithm(name, {"high_entropy_share": 0.2, "kl_coef": 0.1})
    tokens = packed(algorithm, seed=3)
    selected = torch.arange(len(tokens.logprobs)) % 3 == 0
    columns = {**tokens.columns, HIGH: selected.double()}
    (masked,) = torch.autograd.grad(
        algorithm.loss(replace(tokens, columns=columns)).loss, tokens.logprobs
    )
    gradients = {}
    for part, options in (("both", {"kl_coef": 0.1}), ("policy", {})):
        plain = build_algorithm(name, options)
        (gradients[part],) = torch.autograd.grad(plain.loss(tokens).loss, tokens.logprobs)
    expected = gradients["both"] - gradients["policy"] * ~selected
    torch.testing.assert_close(masked, expected, rtol=1e-12, atol=1e-15)
    assert gradients["policy"][~selected].abs().max() > 0


def test_a_step_learns_from_a_fifth_of_the_tokens_of_the_model_before_it() -> None:
    algorithm = GRPO(high_entropy_share=0.2, mini_batches=2)
    engine = TorchTrainEngine(model_of("llama"), **OPTIONS)
    batch = make_batch()
    tokens = len(batch["response_ids"].values())
    train_batch, _ = engine.prepare(batch, algorithm)
    entropies = train_batch[BEFORE]
    expected = (entropies >= quantile(entropies.tolist(), 0.8)).to(torch.float32)
    assert torch.equal(train_batch[HIGH], expected)
    _, (whole,) = TorchTrainEngine(model_of("llama"), **OPTIONS).prepare(batch, GRPO())
    plain = TorchTrainEngine(model_of("llama"), **OPTIONS)
    assert float(entropies.mean()) == pytest.approx(
        plain.forward_backward(whole, GRPO())["entropy"], rel=1e-5
    )
    metrics = engine.train_batch(batch, GRPO(high_entropy_share=0.2))
    assert metrics["high_entropy_fraction"] == pytest.approx(
        (1 + math.floor(0.2 * (tokens - 1))) / tokens, rel=1e-6
    )


def test_an_engine_without_entropies_says_so() -> None:
    engine = MockTrainEngine(MockTrainOptions())
    with pytest.raises(ValueError, match="entropy_target: this train engine keeps no numbers"):
        engine.train_batch(make_batch(), GRPO(**STEERED))
