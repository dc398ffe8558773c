"""The KL to the reference: its gradient on samples of an older policy, over all responses of a
small vocabulary, in float64.

every response y of the rollout policy ─▶ loss of y alone, times its probability ─▶ gradient: the expectation, exactly
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from stages.algorithms import TokenBatch, build_algorithm
from stages.algorithms.policy_gradient.base import PROXIMAL, PolicyGradient
from stages.flow.catalogue import TOKEN_STALENESS

VOCABULARY = 4
LENGTH = 2
COMBINATIONS = [("rollout", "none"), ("rollout", "mask")] + [
    (proximal, correction)
    for proximal in ("recomputed", "interpolated")
    for correction in ("none", "truncate", "mask")
]


def policies(seed: int) -> tuple[torch.Tensor, ...]:
    """Logits of the rollout, proximal, current and reference policy, [states, V]: a state is the
    tokens before."""
    draw = torch.Generator().manual_seed(seed)
    states = sum(VOCABULARY**place for place in range(LENGTH))
    first = torch.randn(states, VOCABULARY, generator=draw, dtype=torch.float64)
    moved = [0.4 * torch.randn(first.shape, generator=draw, dtype=torch.float64) for _ in range(2)]
    reference = torch.randn(first.shape, generator=draw, dtype=torch.float64)
    return first, first + moved[0], first + moved[0] + moved[1], reference


def states_of(response: tuple[int, ...]) -> list[int]:
    """The number of the state before each token."""
    return [0, *(1 + token for token in response[:-1])]


def logprobs_of(logits: torch.Tensor, response: tuple[int, ...]) -> torch.Tensor:
    return logits.log_softmax(-1)[states_of(response), list(response)]


def token_batch(
    algorithm: PolicyGradient, response: tuple[int, ...], now: torch.Tensor, *others: torch.Tensor
) -> Any:
    rollout, proximal, reference = (logprobs_of(logits, response) for logits in others)
    columns = {"rollout_logprobs": rollout, PROXIMAL: proximal, "ref_logprobs": reference}
    columns |= {"advantage": torch.zeros(LENGTH).double(), TOKEN_STALENESS: torch.tensor([3, 1])}
    read = {name: column for name, column in columns.items() if name in algorithm.loss_reads}
    row = torch.zeros(LENGTH, dtype=torch.int64)
    return TokenBatch(logprobs_of(now, response), read, row, torch.tensor([LENGTH]), LENGTH, 1)


def expected_gradient(algorithm: PolicyGradient, seed: int) -> torch.Tensor:
    """The expectation over the rollout policy of the gradient of the loss, by the current policy's
    logits."""
    rollout, proximal, now, reference = policies(seed)
    now.requires_grad_()
    total = torch.zeros_like(now)
    for response in product(range(VOCABULARY), repeat=LENGTH):
        probability = logprobs_of(rollout, response).sum().exp()
        loss = algorithm.loss(
            token_batch(algorithm, response, now, rollout, proximal, reference)
        ).loss
        total += probability * torch.autograd.grad(loss, now)[0]
    return total


def exact_gradient(seed: int, of_sequence: bool) -> torch.Tensor:
    """The gradient of the mean over the tokens of KL(policy || reference), in the states that the
    rollout policy reaches;
    ``of_sequence``: in those that the policy itself reaches, whose probabilities have a gradient
    too."""
    rollout, _, now, reference = policies(seed)
    now.requires_grad_()
    ahead = now.log_softmax(-1)
    behind = reference.log_softmax(-1)
    kl = (ahead.exp() * (ahead - behind)).sum(-1)  # of each state
    reaching = (now if of_sequence else rollout).log_softmax(-1)[0].exp()
    reached = torch.cat([torch.ones(1, dtype=torch.float64), reaching])
    return torch.autograd.grad((reached * kl).sum() / LENGTH, now)[0]


def kl_alone(**options: Any) -> PolicyGradient:
    made = build_algorithm("grpo", {"kl_coef": 1.0, "correction": "none", **options})
    assert isinstance(made, PolicyGradient)
    return made


@pytest.mark.parametrize(("proximal", "correction"), COMBINATIONS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("level", ["token", "geometric"])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_the_weighted_gradient_is_that_of_the_kl(
    proximal: str, correction: str, estimator: str, level: str, mini_batches: int
) -> None:
    options = {
        "proximal": proximal,
        "correction": correction,
        "kl_estimator": estimator,
        "ratio_level": level,
    }
    algorithm = kl_alone(**options, mini_batches=mini_batches, kl_weighted=True)
    for seed in range(2):
        found = expected_gradient(algorithm, seed)
        exact = exact_gradient(seed, of_sequence=False)
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("proximal", "correction"), COMBINATIONS)
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_with_ratios_of_responses_it_is_that_of_the_kl_of_whole_responses(
    proximal: str, correction: str, estimator: str
) -> None:
    options = {
        "proximal": proximal,
        "correction": correction,
        "kl_estimator": estimator,
        "ratio_level": "sequence",
    }
    found = expected_gradient(kl_alone(**options, kl_weighted=True), 0)
    torch.testing.assert_close(found, exact_gradient(0, of_sequence=True), rtol=1e-9, atol=1e-12)


def test_without_weights_k2_is_right_on_policy_and_k3_estimates_the_other_kl() -> None:
    """What docs/stages.md says of the estimators.

    On policy: the rollout policy is the current one.
    """
    _, _, now, reference = policies(0)
    now.requires_grad_()
    ahead = now.log_softmax(-1)
    behind = reference.log_softmax(-1)
    reached = torch.cat([torch.ones(1).double(), ahead[0].exp()]).detach()

    def exact(kl: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((reached * kl.sum(-1)).sum() / LENGTH, now, retain_graph=True)[0]

    def expected(estimator: str) -> torch.Tensor:
        algorithm = kl_alone(kl_estimator=estimator)
        total = torch.zeros_like(now)
        for response in product(range(VOCABULARY), repeat=LENGTH):
            probability = logprobs_of(now, response).sum().exp().detach()
            batch = token_batch(algorithm, response, now, now.detach(), now.detach(), reference)
            total += probability * torch.autograd.grad(algorithm.loss(batch).loss, now)[0]
        return total

    reverse = exact(ahead.exp() * (ahead - behind))
    forward = exact(behind.exp() * (behind - ahead))
    torch.testing.assert_close(expected("k2"), reverse, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(expected("k3"), forward, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(reverse, forward, rtol=0.1)


def test_k1_without_a_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kl_estimator\n  has a gradient whose mean is zero"):
        build_algorithm("grpo", {"kl_coef": 0.1, "kl_estimator": "k1"})
    assert build_algorithm("grpo", {"kl_estimator": "k1"})  # unused
