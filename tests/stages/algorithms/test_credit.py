"""What a step reports of its optimizer steps and of its critic, what whitening means, and errors of
a user's algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from stages.algorithms import Algorithm, LossOutput, TokenBatch
from stages.algorithms.batch import TrainBatch, over_steps
from stages.algorithms.named import AlgorithmError, NamedAlgorithm
from stages.algorithms.policy_gradient.ppo import PPO
from stages.flow.declarations import Drop


def ragged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


# ── metrics ──


def test_metrics_of_several_optimizer_steps_are_one_figure_each() -> None:
    steps = [
        {
            "loss": 1.0,
            "max_ratio": 3.0,
            "gap_max": 0.5,
            "fed_tokens": 10.0,
            "gap_mean_0": 0.1,
            "gap_mean_1": 0.2,
        },
        {
            "loss": 2.0,
            "max_ratio": 5.0,
            "gap_max": 0.1,
            "fed_tokens": 20.0,
            "gap_mean_0": 0.9,
            "gap_mean_1": 0.9,
        },
        {"loss": 6.0, "max_ratio": 4.0, "gap_max": 0.2, "fed_tokens": 30.0, "gap_mean_0": 0.8},
    ]
    assert over_steps(steps) == {
        "loss": pytest.approx(3.0),
        "max_ratio": 5.0,
        "gap_max": 0.5,
        "fed_tokens": 60.0,
        "gap_mean_0": 0.1,
        "gap_mean_1": 0.2,
    }
    assert over_steps(steps[:1]) == steps[0]


def test_a_metric_that_the_first_step_lacks_is_reported() -> None:
    """As the share of clipped tokens of a mini-batch without any trained token."""
    steps = [
        {"loss": 1.0},
        {"loss": 2.0, "clip_fraction": 0.25},
        {"loss": 3.0, "clip_fraction": 0.75, "max_ratio": 4.0},
    ]
    assert over_steps(steps) == {
        "loss": pytest.approx(2.0),
        "clip_fraction": pytest.approx(0.5),
        "max_ratio": 4.0,
    }


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**16), parts=st.integers(1, 4))
def test_explained_variance_is_that_of_all_tokens_however_they_are_batched(
    seed: int, parts: int
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(0.3, 1, 40)
    returns = rng.normal(-0.2, 2, 40)
    sums: dict[str, float] = {}
    for at in np.array_split(np.arange(40), parts):
        columns = {"values": torch.tensor(values[at]), "returns": torch.tensor(returns[at])}
        row = torch.zeros(len(at), dtype=torch.int64)
        tokens = TokenBatch(torch.zeros(len(at)), columns, row, torch.tensor([len(at)]), 40, 1)
        for name, value in PPO().value_metrics(tokens).items():
            sums[name] = sums.get(name, 0.0) + float(value)
    found = PPO().explained({**sums, "loss": 7.0})
    assert found["explained_variance"] == pytest.approx(
        1 - np.var(values - returns) / np.var(returns)
    )
    assert found["return_mean"] == pytest.approx(returns.mean())
    assert found.keys() == {"loss", "explained_variance", "return_mean"}


def test_returns_that_are_all_equal_have_no_variance_to_explain() -> None:
    columns = {"values": torch.tensor([0.0, 1.0]), "returns": torch.tensor([1.0, 1.0])}
    tokens = TokenBatch(torch.zeros(2), columns, torch.zeros(2).long(), torch.tensor([2]), 2, 1)
    sums = {name: float(value) for name, value in PPO().value_metrics(tokens).items()}
    assert PPO().explained(sums)["explained_variance"] == 0.0


def test_rounding_of_equal_returns_is_no_variance() -> None:
    """Means of 5,000 tokens in float32, as the engine adds them up: 0.7 squared is not exact."""
    returns = torch.full((5000,), 0.7)
    errors = torch.linspace(-1, 1, 5000)
    sums = {
        "value_error": float(errors.square().mean()),
        "value_bias": float(errors.mean()),
        "return_square": float((returns.square() / 5000).sum()) * (1 + 2e-7),
        "return_mean": float((returns / 5000).sum()),
    }
    assert PPO().explained(sums)["explained_variance"] == 0.0


@pytest.mark.parametrize(
    ("now", "before", "target", "error"),
    [
        (0.5, 0.4, 1.0, 0.125),  # half the square of 0.5: near enough to the value before
        (1.0, 0.4, 1.0, 0.08),  # it may have moved to 0.6 alone: half the square of 0.4
        (0.0, 0.4, 1.0, 0.5),  # farther away than the clipped one
    ],
)
def test_a_value_gains_nothing_far_from_the_one_before(
    now: float, before: float, target: float, error: float
) -> None:
    columns = {"values": torch.tensor([before]), "returns": torch.tensor([target])}
    tokens = TokenBatch(torch.zeros(1), columns, torch.zeros(1).long(), torch.tensor([1]), 1, 1)
    found = PPO(value_clip=0.2).value_errors(torch.tensor([now]), tokens)
    assert found.item() == pytest.approx(error)


# ── whitening ──


class Reading(Algorithm):
    """Its loss is of no matter here."""

    def loss(self, tokens: TokenBatch) -> LossOutput:
        return LossOutput(tokens.mean(-tokens.logprobs))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**16), of_rows=st.booleans(), masked=st.booleans())
def test_whitened_values_have_mean_0_and_variance_1_over_what_is_trained_on_all_ranks(
    seed: int, of_rows: bool, masked: bool
) -> None:
    rng = torch.Generator().manual_seed(seed)
    lengths = [3, 1, 4, 2]
    ranks = [[0, 1], [2, 3]]
    mask = [
        torch.rand(n, generator=rng) < 0.6 if masked else torch.ones(n, dtype=torch.bool)
        for n in lengths
    ]
    mask[0][:], mask[3][:] = True, not masked or of_rows
    values = [torch.randn(1 if of_rows else n, generator=rng).double() * 3 + 2 for n in lengths]
    trained = [
        values[r][: 1 if mask[r].any() else 0] if of_rows else values[r][mask[r]] for r in range(4)
    ]

    def batch_of(rows: list[int], total: Callable[[torch.Tensor], torch.Tensor]) -> TrainBatch:
        columns = {
            "response_ids": ragged([torch.zeros(lengths[r], dtype=torch.int64) for r in rows])
        }
        columns |= {"rollout_logprobs": ragged([torch.zeros(lengths[r]) for r in rows])}
        columns |= {"advantage": torch.zeros(len(rows))}
        if masked:
            columns["loss_mask"] = ragged([mask[r] for r in rows])
        return TrainBatch(TensorDict(columns, [len(rows)]), Reading(), total)

    def summed_with(other: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Adds what the rank that has the rows ``other`` gives: count and sum, then squares around
        the mean of all."""
        theirs = torch.cat([trained[r] for r in other])
        everything = torch.cat(trained)

        def total(own: torch.Tensor) -> torch.Tensor:
            if own.numel() == 2:
                return own + torch.stack([own.new_tensor(len(theirs)), theirs.sum()])
            return own + (theirs - everything.mean()).square().sum()

        return total

    found = [
        batch_of(rows, summed_with(other)).whitened(torch.cat([values[r] for r in rows]))
        for rows, other in ((ranks[0], ranks[1]), (ranks[1], ranks[0]))
    ]
    everything = torch.cat(trained)
    if len(everything) > 1:
        expected = (torch.cat(values) - everything.mean()) / (
            everything.var(correction=0).sqrt() + 1e-8
        )
        assert torch.allclose(torch.cat(found), expected)


# ── a user's algorithm ──


class Custom(Algorithm):
    """Returns what the test says."""

    out: Any = None

    def _given(self, *_: Any) -> Any:
        return self.out

    credit = prepare = signal = loss = finish = _given


GROUP = {"reward": torch.tensor([0.0, 1.0])}


@pytest.mark.parametrize(
    ("method", "out", "wanted"),
    [
        ("credit", None, r"a dict with the columns \['advantage'\], or a Drop"),
        (
            "credit",
            {"other": torch.zeros(2)},
            r"a dict with the columns \['advantage'\], or a "
            r"Drop",
        ),
        (
            "credit",
            {"advantage": torch.zeros(3)},
            "a tensor of 2 values .* one for each row of the group",
        ),
        (
            "credit",
            {"advantage": [0.0, 1.0]},
            "a tensor of 2 values .* one for each row of the group",
        ),
        (
            "credit",
            {"advantage": torch.tensor([0.0, float("nan")])},
            "finite numbers in 'advantage', for reward",
        ),
        ("credit", Drop("why", instead={"advantage": torch.zeros(1)}), "a tensor of 2 values"),
        ("prepare", {"unknown": torch.zeros(2)}, "a dict with some of the columns"),
        ("signal", 1.5, "a number from 0 to 1"),
        ("signal", -0.1, "a number from 0 to 1"),
        ("signal", "all", "a number from 0 to 1"),
        ("loss", torch.zeros(()), "a stages.algorithms.LossOutput"),
        ("loss", LossOutput(torch.zeros(2)), "a tensor of one number in LossOutput.loss"),
        (
            "loss",
            LossOutput(torch.zeros(())),
            "a loss with gradient: it must depend on tokens.logprobs",
        ),
        ("finish", {"a": "b"}, "a dict of numbers"),
        ("finish", [1.0], "a dict of numbers"),
    ],
)
def test_what_an_algorithm_may_not_return_is_an_error_that_says_what_it_may(
    method: str, out: Any, wanted: str
) -> None:
    tokens = TokenBatch(
        torch.zeros(1, requires_grad=True), {}, torch.zeros(1).long(), torch.tensor([1]), 1, 1
    )
    argument = {"credit": GROUP, "loss": tokens}.get(method, {})
    with pytest.raises(
        AlgorithmError,
        match=rf"algorithm 'mine' returned .* from {method} \(.*\); "
        rf"wanted is {wanted}",
    ):
        getattr(NamedAlgorithm("mine", Custom(out=out)), method)(argument)


@pytest.mark.parametrize(
    ("method", "out"),
    [
        ("credit", {"advantage": torch.zeros(2)}),
        ("credit", {"advantage": [torch.zeros(3), torch.zeros(1)]}),
        ("credit", Drop("why")),
        ("prepare", {}),
        ("signal", 0),
        ("signal", 1.0),
        ("finish", {"a": 1}),
    ],
)
def test_what_it_may_return_is_passed_on(method: str, out: Any) -> None:
    assert (
        getattr(NamedAlgorithm("mine", Custom(out=out)), method)(
            GROUP if method == "credit" else {}
        )
        == out
    )


def test_what_it_raises_names_the_algorithm_and_the_method() -> None:
    class Raising(Custom):
        def signal(self, batch: Any) -> float:
            return 1 / len(batch)

    named = NamedAlgorithm("mine", Raising())
    with pytest.raises(
        AlgorithmError,
        match=r"algorithm 'mine' raised ZeroDivisionError.* in signal "
        r"\(.*test_credit.py",
    ):
        named.signal({})  # type: ignore[arg-type]
