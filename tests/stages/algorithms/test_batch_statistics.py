"""What algorithms know of a whole train batch: deviations, selected tokens, normalised rewards; each
against numbers computed apart, and the same on ranks that have a part of the batch each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from stages.algorithms import Algorithm, Drop, build_algorithm
from stages.algorithms.batch import TrainBatch
from stages.algorithms.policy_gradient.base import PROXIMAL
from stages.algorithms.policy_gradient.selected import SELECTED, Selecting

LENGTHS = (3, 1, 4, 2, 5, 2)
REWARDS = (1.0, 0.0, 0.25, 2.0, 0.5, 0.5)


def ragged(values: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor(list(values.split(LENGTHS)), layout=torch.jagged)


def batch_of(
    algorithm: Algorithm,
    columns: Mapping[str, torch.Tensor],
    computed: Mapping[str, torch.Tensor] | None = None,
    total: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
) -> TrainBatch:
    ids = ragged(torch.zeros(sum(LENGTHS), dtype=torch.int64))
    data = TensorDict({"response_ids": ids, **columns}, [len(LENGTHS)])
    return TrainBatch(data, algorithm, total, computed)


def plain_columns() -> dict[str, torch.Tensor]:
    logprobs = -torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(1)) * 3
    return {
        "rollout_logprobs": ragged(logprobs),
        "advantage": torch.tensor(REWARDS) - 0.5,
        "reward": torch.tensor(REWARDS),
    }


def test_a_group_is_divided_by_the_deviation_of_the_batch() -> None:
    algorithm = build_algorithm("grpo", {"deviation_of": "batch"})
    made = algorithm.credit({"reward": torch.tensor([1.0, 0.0])})
    assert not isinstance(made, Drop)
    assert made["advantage"].tolist() == [0.5, -0.5]
    batch = batch_of(algorithm, plain_columns())
    deviation = statistics.stdev(REWARDS) + 1e-4
    assert batch["advantage"].tolist() == pytest.approx([(r - 0.5) / deviation for r in REWARDS])


def test_each_functions_scores_are_normalised_before_they_are_added() -> None:
    algorithm = build_algorithm("gdpo", {"reward_weights": (1.0, 0.5)})
    assert algorithm.credit_reads == {"scores": "float32 [2]"}
    nan, failed = float("nan"), -0.0
    first, second = [1.0, 0.0, 0.0, nan], [10.0, 30.0, failed, 20.0]
    made = algorithm.credit({"scores": torch.tensor([first, second]).T})
    assert not isinstance(made, Drop)

    def normalised(of: list[float], value: float) -> float:
        return (value - statistics.fmean(of)) / (statistics.stdev(of) + 1e-4)

    expected = [
        normalised([1, 0, 0], 1) + 0.5 * normalised([10, 30, 20], 10),
        normalised([1, 0, 0], 0) + 0.5 * normalised([10, 30, 20], 30),
        normalised([1, 0, 0], 0),
        0.5 * normalised([10, 30, 20], 20),
    ]
    assert made["advantage"].tolist() == pytest.approx(expected, rel=1e-5)
    columns = {**plain_columns(), "advantage": torch.tensor(REWARDS)}
    deviation = statistics.stdev(REWARDS) + 1e-4
    mean = statistics.fmean(REWARDS)
    assert batch_of(algorithm, columns)["advantage"].tolist() == pytest.approx(
        [(r - mean) / deviation for r in REWARDS]
    )


def test_a_group_is_dropped_where_no_function_differs() -> None:
    algorithm = build_algorithm("gdpo", {"reward_weights": (1.0, 0.0), "drop_equal": True})
    assert isinstance(algorithm.credit({"scores": torch.tensor([[1.0, 0.0], [1.0, 1.0]])}), Drop)
    made = algorithm.credit({"scores": torch.tensor([[1.0, 0.0], [0.0, 0.0]])})
    assert not isinstance(made, Drop)


def selected(name: str, options: dict[str, Any], now: torch.Tensor) -> torch.Tensor:
    algorithm = build_algorithm(name, options)
    assert isinstance(algorithm, Selecting)
    return batch_of(algorithm, plain_columns(), {PROXIMAL: now})[SELECTED] > 0


def test_m2po_leaves_out_the_largest_log_ratios_until_the_second_moment_fits() -> None:
    rollout = plain_columns()["rollout_logprobs"].values()
    away = torch.linspace(-0.6, 0.8, len(rollout))
    stays = selected("m2po", {"second_moment": 0.04}, rollout + away)
    moments = sorted(away.square().tolist())
    most = max(
        count for count in range(1, len(moments) + 1) if sum(moments[:count]) / count <= 0.04
    )
    assert stays.sum() == most
    assert away[stays].square().max() == pytest.approx(moments[most - 1])
    assert selected("m2po", {}, rollout).all()


def test_kl_cov_selects_the_tokens_of_the_highest_covariance() -> None:
    rollout = plain_columns()["rollout_logprobs"].values()
    advantage = (torch.tensor(REWARDS) - 0.5).repeat_interleave(torch.tensor(LENGTHS))
    covariance = (rollout - rollout.mean()) * (advantage - advantage.mean())
    chosen = selected("kl_cov", {"cov_share": 0.2}, rollout)
    assert {*chosen.nonzero()[:, 0].tolist()} == {*covariance.topk(3).indices.tolist()} or (
        chosen.sum() == 4 and covariance[chosen].min() >= covariance.topk(4).values.min()
    )


def test_clip_cov_draws_the_same_tokens_of_the_band_each_time() -> None:
    rollout = plain_columns()["rollout_logprobs"].values()
    advantage = (torch.tensor(REWARDS) - 0.5).repeat_interleave(torch.tensor(LENGTHS))
    covariance = (rollout - rollout.mean()) * (advantage - advantage.mean())
    options = {"cov_share": 0.15, "cov_low": 0.0, "cov_high": 2.0}
    drawn = selected("clip_cov", options, rollout)
    assert ((covariance > 0) & (covariance < 2))[drawn].all()
    assert torch.equal(drawn, selected("clip_cov", options, rollout))
    everything = selected("clip_cov", options | {"cov_share": 0.99}, rollout)
    assert torch.equal(everything, (covariance > 0) & (covariance < 2))


def test_the_share_of_drawn_tokens_is_right_over_many() -> None:
    algorithm = build_algorithm("clip_cov", {"cov_share": 0.05, "cov_low": 0.0, "cov_high": 1e9})
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(20_000, generator=generator) * 3
    rows = 200
    parts = list(logprobs.split(len(logprobs) // rows))
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    data = {
        "response_ids": torch.nested.nested_tensor([p.long() for p in parts], layout=torch.jagged),
        "rollout_logprobs": jagged,
        "advantage": torch.randn(rows, generator=generator),
    }
    batch = TrainBatch(TensorDict(data, [rows]), algorithm, computed={PROXIMAL: logprobs})
    assert float(batch[SELECTED].mean()) == pytest.approx(0.05, abs=0.005)


@pytest.mark.parametrize("name", ["m2po", "kl_cov", "clip_cov", "gdpo"])
def test_ranks_select_as_one_process_does(name: str) -> None:
    """Each rank adds its sums to those of the others: here the other rank has the same rows."""
    options = {"cov_share": 0.3} if "cov" in name else {}
    algorithm = build_algorithm(name, options)
    columns = plain_columns()
    rollout = columns["rollout_logprobs"].values()
    now = rollout + torch.linspace(-0.6, 0.8, len(rollout))
    column = SELECTED if isinstance(algorithm, Selecting) else "advantage"
    computed = {PROXIMAL: now}
    alone = batch_of(algorithm, columns, computed)[column]
    together = batch_of(algorithm, columns, computed, lambda values: values * 2)[column]
    torch.testing.assert_close(alone, together, rtol=0.06, atol=1e-6)
