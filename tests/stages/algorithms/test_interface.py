"""Small algorithms, each using one part of the interface that GRPO does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from pydantic import Field
from tensordict import TensorDict

from pipeline.data.columns import Packed
from stages.algorithms import Algorithm, LossOutput, TokenBatch
from stages.algorithms.batch import TrainBatch
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.flow.declarations import Columns, RunsOn
from stages.flow.groups import outputs_of
from stages.training.advantage import credits
from tests.batches import make_batch
from tests.stages.engines.torch.test_train import engine_of, tiny_llama


class Observing(Algorithm):
    """Keeps the token batches that its loss gets."""

    batches: list[Any] = Field(default_factory=list)

    def loss(self, tokens: TokenBatch) -> LossOutput:
        self.batches.append(tokens)
        return LossOutput(tokens.mean(-tokens.logprobs * tokens["advantage"]))


class Whitened(Observing):
    def prepare(self, batch: Any) -> Mapping[str, torch.Tensor]:
        values = batch["advantage"]
        count = batch.total(torch.tensor([float(len(values))]))
        mean = batch.total(values.sum()[None]) / count
        std = (batch.total((values - mean).square().sum()[None]) / count).sqrt()
        return {"advantage": (values - mean) / std}


class Proximal(Observing):
    @property
    def scores(self) -> Mapping[str, RunsOn]:
        return {"old_logprobs": "policy"}

    @property
    def loss_reads(self) -> Columns:
        return {**super().loss_reads, "old_logprobs": "float32 ragged"}


class Pairs(Observing):
    unit: ClassVar = "group"


class Discounted(Observing):
    """Ragged credit, as GAE gives."""

    @property
    def credit_reads(self) -> Columns:
        return {"reward": "float32", "values": "float32 ragged"}

    @property
    def credit_makes(self) -> Columns:
        return {"advantage": "float32 ragged", "returns": "float32 ragged"}

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        returns = [
            torch.full_like(row, float(r))
            for r, row in zip(group["reward"], group["values"], strict=True)
        ]
        return {
            "returns": returns,
            "advantage": [a - b for a, b in zip(returns, group["values"], strict=True)],
        }


def test_prepare_whitens_the_whole_batch() -> None:
    algorithm = Whitened()
    engine_of(tiny_llama(), token_budget=20).train_batch(make_batch(), algorithm)
    assert len(algorithm.batches) > 1
    seen = torch.cat([tokens.rows["advantage"] for tokens in algorithm.batches])
    assert float(seen.mean()) == pytest.approx(0, abs=1e-6)
    assert float(seen.std(correction=0)) == pytest.approx(1, abs=1e-5)


def test_the_policy_scores_before_the_first_step_and_not_again() -> None:
    algorithm = Proximal(epochs=2)
    engine_of(tiny_llama()).train_batch(make_batch(), algorithm)
    first, second = algorithm.batches
    torch.testing.assert_close(first["old_logprobs"], first.logprobs.detach())
    torch.testing.assert_close(second["old_logprobs"], first["old_logprobs"])
    assert not torch.allclose(second["old_logprobs"], second.logprobs.detach())


def test_a_pair_is_never_cut() -> None:
    algorithm = Pairs()
    engine_of(tiny_llama(), token_budget=8).train_batch(make_batch(), algorithm)
    batch = make_batch()
    sizes = sorted(torch.bincount(batch["group"] - batch["group"].min()).tolist())
    found = sorted(int(n) for tokens in algorithm.batches for n in torch.bincount(tokens.group))  # type: ignore[arg-type]
    assert found == [size for size in sizes if size]


class Scaling(Observing):
    """Writes into what it reads of the batch, where a warehouse may have it."""

    @property
    def loss_reads(self) -> Columns:
        return {"rollout_logprobs": "float32 ragged", "advantage": "float32"}

    def prepare(self, batch: TrainBatch) -> Mapping[str, torch.Tensor]:
        return {
            "advantage": batch["advantage"].mul_(3),
            "rollout_logprobs": batch["rollout_logprobs"].sub_(1),
        }


def test_what_an_algorithm_writes_into_a_column_is_not_written_into_the_batch() -> None:
    batch = make_batch()
    memory = Packed.of(batch["rollout_logprobs"]).values
    before = memory.clone(), batch["advantage"].clone()
    changed = TrainBatch(batch, Scaling())
    assert torch.equal(changed["rollout_logprobs"], before[0] - 1)
    assert torch.equal(changed["advantage"], before[1] * 3)
    assert torch.equal(memory, before[0])
    assert torch.equal(batch["advantage"], before[1])


def test_a_micro_batch_has_its_rows_in_its_own_order() -> None:
    batch = make_batch()
    rows = [torch.arange(len(row)) % 3 != 1 for row in batch["response_ids"].unbind()]
    batch["loss_mask"] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    whole = TrainBatch(batch, Scaling())
    numbers = [4, 0, 3]
    logprobs = [row - 1 for row in batch["rollout_logprobs"].unbind()]
    sizes = {"total_tokens": 1, "total_rows": 1, "total_groups": 1}
    given = torch.cat([logprobs[number] for number in numbers])
    tokens = whole.tokens(numbers, [0, 0, 1], given, **sizes)
    expected = torch.cat([logprobs[number][rows[number]] for number in numbers])
    assert torch.equal(tokens["rollout_logprobs"], expected)
    assert torch.equal(tokens.logprobs, expected)
    assert tokens.row.tolist() == [
        at for at, number in enumerate(numbers) for _ in range(int(rows[number].sum()))
    ]
    assert tokens.row_tokens.tolist() == [int(rows[number].sum()) for number in numbers]
    assert tokens.rows["advantage"].tolist() == (batch["advantage"][numbers] * 3).tolist()


def test_masked_tokens_are_not_trained_on() -> None:
    batch = make_batch()
    algorithm = Observing()
    rows = [torch.arange(len(row)) % 2 == 0 for row in batch["response_ids"].unbind()]
    batch["loss_mask"] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    engine_of(tiny_llama()).train_batch(batch, algorithm)
    (tokens,) = algorithm.batches
    kept = sum(int(row.sum()) for row in rows)
    assert (
        len(tokens.logprobs)
        == len(tokens["advantage"])
        == len(tokens.row)
        == tokens.total_tokens
        == kept
    )
    assert int(tokens.row_tokens.sum()) == kept


def test_rows_of_weight_zero_change_nothing() -> None:
    weights = []
    for changed in (False, True):
        batch = make_batch()
        batch["row_weight"] = torch.ones(len(batch))
        batch["row_weight"][0] = 0.0
        if changed:
            batch["advantage"][0] = 100.0
        engine = engine_of(tiny_llama())
        engine.train_batch(batch, GRPO())
        weights.append({name: value.clone() for name, value in engine.weights()})
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_credit_may_be_ragged() -> None:
    values = [torch.zeros(n) for n in (3, 1, 2, 5)]
    rows = TensorDict({"reward": torch.arange(4.0)}, [4])
    rows["values"] = torch.nested.nested_tensor(values, layout=torch.jagged)
    members, results = credits(Discounted(), rows, [7, 7, 9, 9])
    (output,) = outputs_of(members, results, [3, 1, 2, 5])
    assert output.rows is not None
    assert [row.tolist() for row in output.rows["returns"]] == [
        [0.0] * 3,
        [1.0],
        [2.0] * 2,
        [3.0] * 5,
    ]


def test_columns_keep_the_order_in_which_the_loss_declares_them() -> None:
    """A set has another order in each process, and the mock engine draws its weights from the bytes
    of the columns."""
    names = [f"column_{number}" for number in range(8)]

    class Reading(Observing):
        @property
        def loss_reads(self) -> Columns:
            return dict.fromkeys(names, "float32")

    batch = make_batch()
    for name in reversed(names):
        batch[name] = torch.zeros(len(batch))
    given = TrainBatch(batch, Reading())
    total = int(given.lengths.sum())
    tokens = given.tokens(
        [0],
        [0],
        torch.zeros(len(batch["response_ids"][0])),
        total_tokens=total,
        total_rows=1,
        total_groups=1,
    )
    assert list(tokens.rows) == names
