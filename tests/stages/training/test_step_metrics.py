"""What a step measures of its rows beside the loss: gaps by age, distinct responses, groups with
equal rewards."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from pipeline.data.columns import Packed
from stages.algorithms import build_algorithm
from stages.algorithms.named import LEAST_TOKENS, split_gap
from stages.algorithms.token_batch import AGES, TokenBatch
from stages.training.ranks import train_batch
from stages.training.token_versions import staleness_of
from stages.training.update import variety
from tests.stages.engines.contract_train import make_batch
from tests.stages.engines.torch.test_train import engine_of, tiny_llama


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ([5, 3], ["2", "2", "2"]),
        ([7, 2], ["0", "0"]),
        ([6, 1, 7, 2], ["1", "resumed", "resumed"]),
        ([1, 1, 2, 1, 6, 1], ["4", "4", "1"]),
    ],
)
def test_the_age_of_each_token_after_seven_steps(versions: list[int], expected: list[str]) -> None:
    column = Packed(torch.tensor(versions), torch.tensor([0, len(versions)]))
    assert [AGES[at] for at in staleness_of(column, 7)[1].values.tolist()] == expected


def test_a_batch_has_the_staleness_of_each_token_and_of_each_row() -> None:
    versions = [torch.tensor(row) for row in ([1, 2, 5, 1, 7, 1], [6, 3])]
    rows = TensorDict({"versions": torch.nested.nested_tensor(versions, layout=torch.jagged)}, [2])
    record = {"group": [3, 3], "place": [0, 1], "oldest_version": [1, 6]}
    claim = SimpleNamespace(**{name: np.array(values) for name, values in record.items()})
    batch = train_batch(claim, rows, 7)  # type: ignore[arg-type]
    assert batch["staleness"].tolist() == [6, 1]
    assert [row.tolist() for row in batch["token_staleness"].unbind()] == [[6, 6, 2, 0], [1, 1, 1]]
    assert "versions" not in batch
    unread = train_batch(claim, rows, 7, by_token=False)  # type: ignore[arg-type]
    assert set(unread.keys()) == set(batch.keys()) - {"token_staleness"}


def test_gaps_are_means_over_the_tokens_of_each_age_however_they_are_batched() -> None:
    torch.manual_seed(0)
    count = 90
    age = torch.randint(len(AGES), (count,))
    trained = torch.randn(count)
    recorded = torch.randn(count)
    age[age == 3] = 2  # no token of age 3
    kept = (age == 4).nonzero()[:5, 0]
    age[age == 4], age[kept] = 0, 4  # too few of age 4
    sums: dict[str, float] = {}
    for part in torch.arange(count).split(35):
        tokens = TokenBatch(
            trained[part],
            {"rollout_logprobs": recorded[part]},
            part * 0,
            part[:1],
            count,
            1,
            age=age[part],
        )
        for name, value in tokens.behaviour_gap().items():
            sums[name] = (
                max(sums.get(name, 0), float(value))
                if "max" in name
                else sums.get(name, 0) + float(value)
            )
    gap, rest = split_gap({**sums, "other": 1.0})
    assert rest == {"other": 1.0}
    off = (trained - recorded).abs()
    expected = {f"gap_mean_{AGES[at]}": float(off[age == at].mean()) for at in (0, 1, 2, 5)}
    assert {
        name: value for name, value in gap.items() if name.startswith("gap_mean_")
    } == pytest.approx(expected)
    assert LEAST_TOKENS > 5


def test_the_engine_reports_gaps_by_age_and_learns_the_same() -> None:
    batch = make_batch()
    lengths = [len(row) for row in batch["response_ids"].unbind()]
    aged = batch.copy()
    aged["age"] = torch.nested.nested_tensor(
        [torch.zeros(n, dtype=torch.int64) for n in lengths], layout=torch.jagged
    )
    one = engine_of(tiny_llama())
    other = engine_of(tiny_llama())
    algorithm = build_algorithm("grpo", {})
    plain = one.train_batch(batch, algorithm)
    found = other.train_batch(aged, algorithm)
    assert sum(lengths) >= LEAST_TOKENS
    assert found["gap_mean_0"] == pytest.approx(plain["gap_mean"], rel=1e-5)
    assert {name: value for name, value in found.items() if name != "gap_mean_0"} == dict(plain)
    for (name, a), (_, b) in zip(one.weights(), other.weights(), strict=True):
        assert torch.equal(a, b), name


def test_distinct_responses_and_groups_with_equal_rewards() -> None:
    class Claimed:
        group = np.array([3, 3, 4, 4])
        tokens = np.array([2, 2, 1, 3])

        def __len__(self) -> int:
            return 4

    rows = TensorDict({"reward": torch.tensor([1.0, 1.0, 0.0, 1.0])}, [4])
    texts = [torch.tensor(row) for row in ([1, 2], [1, 2], [1], [1, 2, 3])]
    rows["response_ids"] = torch.nested.nested_tensor(texts, layout=torch.jagged)
    assert variety(Claimed(), rows) == {  # type: ignore[arg-type]
        "distinct_responses": 0.75,
        "equal_groups": 0.5,
        "response_length_above": 3.0,
        "response_length_below": 1.0,
    }
    assert variety(Claimed(), TensorDict({}, [4])) == {}  # type: ignore[arg-type]
