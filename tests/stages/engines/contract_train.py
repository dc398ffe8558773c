"""What every train engine keeps, whatever it is built on.

An adapter's tests are a class that makes one:

class TestMine(TrainEngineContract):
    def make(self, seed: int) -> TrainEngine: ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from orchestration.checkpoints import checkpoint
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.protocols import TrainEngine
from tests.batches import VOCABULARY, make_batch, stack, unstack

Weights = dict[str, torch.Tensor]


class TrainEngineContract:
    """``make`` gives an engine for token ids below ``tests.batches.VOCABULARY``; another seed has
    other weights, the same one the same. ``transformers``: whether transformers opens what it
    saves."""

    transformers = True

    def make(self, seed: int) -> TrainEngine:
        raise NotImplementedError

    def test_a_step_moves_the_weights_and_returns_the_metrics(self) -> None:
        engine = self.make(0)
        before = weights_of(engine)
        metrics = engine.train_batch(make_batch(), GRPO())
        after = weights_of(engine)
        assert before.keys() == after.keys()
        assert any(not torch.equal(before[name], after[name]) for name in before)
        assert {
            "loss",
            "grad_norm",
            "learning_rate",
            "ess",
            "kl_behaviour",
            "max_ratio",
        } <= metrics.keys()
        assert all(type(value) is float for value in metrics.values())
        assert metrics["grad_norm"] > 0
        assert metrics["learning_rate"] > 0
        engine.close()

    def test_a_batch_without_a_token_to_train_on_is_refused_and_changes_nothing(self) -> None:
        """Such as one whose trajectories all failed before their first turns."""
        engine = self.make(0)
        before = {name: value.clone() for name, value in weights_of(engine).items()}
        rows = [
            {**row, "loss_mask": torch.zeros(row["response_ids"].shape, dtype=torch.bool)}
            for row in unstack(make_batch())
        ]
        with pytest.raises(FloatingPointError, match="loss_mask leaves no token of the batch"):
            engine.train_batch(stack(rows), GRPO())
        after = weights_of(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)
        engine.close()

    def test_the_gap_to_the_rollout_engine_is_told(self) -> None:
        """Engines that compute: one whose steps cost time alone takes the recorded logprobs for its
        own."""
        engine = self.make(0)
        batch = make_batch()
        own = engine.logprobs(batch)
        offsets = own.offsets()
        shifted = own.values().clone()
        shifted[3] -= 0.25
        batch["rollout_logprobs"] = torch.nested.nested_tensor_from_jagged(shifted, offsets)
        metrics = engine.train_batch(batch, GRPO())
        tokens = len(shifted)
        wanted = (
            (0.25, 0.25 / tokens, (math.exp(0.25) - 1.25) / tokens)
            if self.transformers
            else (0.0, 0.0, 0.0)
        )
        found = [metrics[name] for name in ("gap_max", "gap_mean", "gap_k3")]
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5)

    def test_the_algorithm_decides_what_is_computed(self) -> None:
        """Its loss, its metrics and the columns that it reads."""
        bare = make_batch().exclude("ref_logprobs")
        metrics = [
            self.make(0).train_batch(batch, GRPO(kl_coef=kl))
            for batch, kl in ((bare, 0.0), (make_batch(), 0.5))
        ]
        assert "kl_reference" not in metrics[0]
        assert metrics[1]["kl_reference"] > 0
        assert metrics[0]["loss"] != metrics[1]["loss"]

    def test_the_same_engine_on_the_same_batches_has_the_same_bits(self) -> None:
        ends = []
        for _ in range(2):
            engine = self.make(0)
            metrics = [dict(engine.train_batch(make_batch(seed=seed), GRPO())) for seed in range(3)]
            ends.append((metrics, weights_of(engine)))
        assert ends[0][0] == ends[1][0]
        assert_same_bits(ends[0][1], ends[1][1])
        other = self.make(0)
        other.train_batch(make_batch(seed=7), GRPO())
        assert differ(weights_of(other), ends[0][1]), "what is trained on matters"

    def test_a_batch_is_left_as_it_was(self) -> None:
        batch = make_batch()
        kept = unstack(make_batch())
        engine = self.make(0)
        engine.logprobs(batch)
        engine.train_batch(batch, GRPO())
        for row, other in zip(unstack(batch), kept, strict=True):
            assert_same_bits(row, other)

    def test_logprobs_are_of_the_responses_row_by_row(self) -> None:
        engine = self.make(0)
        rows = unstack(make_batch())
        before = weights_of(engine)
        found = engine.logprobs(make_batch())
        assert found.dtype == torch.float32
        assert not found.requires_grad
        assert found.device.type == "cpu"
        together = found.unbind()
        for row, own in zip(rows, together, strict=True):
            assert own.shape == row["response_ids"].shape
            assert bool((own <= 0).all())
        for group in {int(row["group"]) for row in rows}:
            members = [at for at, row in enumerate(rows) if row["group"] == group]
            alone = engine.logprobs(stack([rows[at] for at in members])).unbind()
            assert all(
                torch.equal(together[at], own) for at, own in zip(members, alone, strict=True)
            )
        assert_same_bits(weights_of(engine), before)

    def test_weights_are_whole_detached_and_named_once_in_a_fixed_order(self) -> None:
        engine = self.make(0)
        first = list(engine.weights())
        names = [name for name, _ in first]
        assert len(names) == len(set(names))
        for name, weight in first:
            assert isinstance(name, str)
            assert type(weight) is torch.Tensor, (
                f"{name} is a {type(weight).__name__}: publishing copies its bytes"
            )
            assert not weight.requires_grad
        engine.train_batch(make_batch(), GRPO())
        assert [(name, w.shape, w.dtype) for name, w in engine.weights()] == [
            (n, w.shape, w.dtype) for n, w in first
        ]
        assert differ(weights_of(self.make(1)), weights_of(self.make(0))), (
            "another seed has other weights"
        )

    def test_looking_at_the_state_changes_nothing(self) -> None:
        looked = self.make(0)
        left = self.make(0)
        for seed in range(2):
            looked.state_dict()
            assert looked.train_batch(make_batch(seed=seed), GRPO()) == left.train_batch(
                make_batch(seed=seed), GRPO()
            )
        assert_same_bits(weights_of(looked), weights_of(left))

    def test_a_checkpoint_continues_bit_for_bit(self, tmp_path: Path) -> None:
        straight = self.make(0)
        straight.train_batch(make_batch(seed=0), GRPO())
        writer = checkpoint.Writer(straight)
        writer.copy()
        writer.write(tmp_path)
        resumed = self.make(1)
        resumed.train_batch(make_batch(seed=5), GRPO())  # it has been elsewhere
        checkpoint.Checkpoint(tmp_path, 1, {}, []).load_into(resumed)
        assert_same_bits(weights_of(resumed), weights_of(straight))
        for seed in (1, 2):
            batch = make_batch(seed=seed)
            assert dict(resumed.train_batch(batch, GRPO())) == dict(
                straight.train_batch(batch, GRPO())
            )
        assert_same_bits(weights_of(resumed), weights_of(straight))

    def test_what_is_saved_are_the_weights(self, tmp_path: Path) -> None:
        engine = self.make(0)
        engine.train_batch(make_batch(), GRPO())
        expected = {n: value.clone() for n, value in weights_of(engine).items()}
        writer = checkpoint.Writer(engine)
        writer.copy()
        engine.train_batch(make_batch(seed=1), GRPO())  # what is written is the copy
        writer.write(tmp_path / "written")
        tmp_path = tmp_path / "written" / "model"
        files = sorted(tmp_path.glob("*.safetensors"))
        saved = {name: value for file in files for name, value in load_file(file).items()}
        assert_same_bits(saved, expected)
        if self.transformers:
            from transformers import AutoModelForCausalLM

            opened = AutoModelForCausalLM.from_pretrained(tmp_path)
            assert opened.config.get_text_config().vocab_size == VOCABULARY
            assert_same_bits({name: p.detach() for name, p in opened.named_parameters()}, expected)

    def test_one_group_of_one_token_is_a_batch(self) -> None:
        engine = self.make(0)
        metrics = engine.train_batch(make_batch([(1, (1,))]), GRPO())
        assert all(value == value for value in metrics.values())
        assert len(engine.logprobs(make_batch([(1, (1,))])).unbind()[0]) == 1

    def test_closing_can_be_repeated(self) -> None:
        engine = self.make(0)
        engine.train_batch(make_batch(), GRPO())
        engine.close()
        engine.close()


def weights_of(engine: TrainEngine) -> Weights:
    return {name: weight.clone() for name, weight in engine.weights()}


def differ(left: Weights, right: Weights) -> bool:
    return any(not torch.equal(left[name], right[name]) for name in left)


def assert_same_bits(left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
