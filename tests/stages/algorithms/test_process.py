"""Credit of rewards within a response, against formulas in plain float64 Python: GRPO with process
supervision, and PPO whose rewards come with turns or tokens, with masks and branches."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from stages.algorithms import Drop, build_algorithm
from stages.algorithms.batch import TrainBatch
from stages.algorithms.policy_gradient.ppo import PPO

Rewards = list[list[float | None]]
EPS = 1e-4


def drawn_rewards(rng: random.Random, rows: int, *, equal: bool = False) -> Rewards:
    """Of each token a reward or none; some rows have none at all."""
    made = []
    for _ in range(rows):
        length = rng.randint(1, 7)
        share = rng.choice([0.0, 0.4, 1.0])
        made.append(
            [
                (1.0 if equal else rng.gauss(0, 1)) if rng.random() < share else None
                for _ in range(length)
            ]
        )
    return made


def tensors(rewards: Rewards) -> list[torch.Tensor]:
    return [torch.tensor([math.nan if x is None else x for x in row]) for row in rewards]


def normalised(values: list[float], *, scaled: bool = True) -> list[float]:
    if len(values) < 2 or len({*values}) == 1:
        return [0.0] * len(values)
    centre = statistics.fmean(values)
    deviation = statistics.stdev(values) + EPS if scaled else 1.0
    return [(value - centre) / deviation for value in values]


def credit_of(rewards: Rewards, mask: list[list[bool]], a: Any) -> list[list[float]]:
    """Token by token: the discounted sum over the steps that end at it or later."""
    steps = [[(t, x) for t, x in enumerate(row) if x is not None] for row in rewards]
    numbers = [[float(torch.tensor(x)) for _, x in row] for row in steps]  # float32, as the column

    def to_go(row: list[float], step: int) -> float:
        return sum(a.gamma**k * x for k, x in enumerate(row[step:]))

    if a.normalize == "rewards":
        flat = iter(normalised([x for row in numbers for x in row], scaled=a.scale_rewards))
        compared = [[next(flat) for _ in row] for row in numbers]
        values = [[to_go(row, k) for k in range(len(row))] for row in compared]
    else:
        returns = [[to_go(row, k) for k in range(len(row))] for row in numbers]
        values = [[0.0] * len(row) for row in returns]
        for k in range(max(map(len, returns))):
            there = [row for row, of in enumerate(returns) if len(of) > k]
            of_step = normalised([returns[row][k] for row in there], scaled=a.scale_rewards)
            for row, value in zip(there, of_step, strict=True):
                values[row][k] = value
    advantages = []
    for row, of_row, kept, at in zip(rewards, values, mask, steps, strict=True):
        advantages.append(
            [
                next((v for v, (end, _) in zip(of_row, at, strict=True) if end >= t), 0.0) * kept[t]
                for t in range(len(row))
            ]
        )
    return advantages


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    normalize=st.sampled_from(["rewards", "returns"]),
    gamma=st.sampled_from([1.0, 0.8]),
    scaled=st.booleans(),
    masked=st.booleans(),
)
def test_each_token_has_the_sum_of_the_normalised_rewards_from_it_on(
    seed: int, normalize: str, gamma: float, scaled: bool, masked: bool
) -> None:
    rng = random.Random(seed)
    rewards = drawn_rewards(rng, rng.randint(2, 5))
    mask = [[not masked or rng.random() < 0.7 for _ in row] for row in rewards]
    algorithm = build_algorithm(
        "process_grpo", {"normalize": normalize, "gamma": gamma, "scale_rewards": scaled}
    )
    group: dict[str, Any] = {"token_rewards": tensors(rewards)}
    if masked:
        group["loss_mask"] = [torch.tensor(row) for row in mask]
    made = algorithm.credit(group)
    assert not isinstance(made, Drop)
    for row, expected in zip(made["advantage"], credit_of(rewards, mask, algorithm), strict=True):
        assert row.tolist() == pytest.approx(expected, rel=2e-4, abs=2e-4)


@pytest.mark.parametrize("normalize", ["rewards", "returns"])
def test_with_a_reward_for_each_response_it_is_grpo(normalize: str) -> None:
    rewards = [0.5, 0.0, 2.0, 0.5]
    lengths = [3, 1, 4, 2]
    rows: Rewards = [[*[None] * (n - 1), r] for n, r in zip(lengths, rewards, strict=True)]
    made = build_algorithm("process_grpo", {"normalize": normalize}).credit(
        {"token_rewards": tensors(rows)}
    )
    plain = build_algorithm("grpo", {}).credit({"reward": torch.tensor(rewards)})
    assert not isinstance(made, Drop)
    assert not isinstance(plain, Drop)
    for row, advantage in zip(made["advantage"], plain["advantage"].tolist(), strict=True):
        assert row.tolist() == pytest.approx([advantage] * len(row), rel=1e-6)


def test_what_all_responses_have_alike_teaches_nothing_and_may_be_dropped() -> None:
    alike = {"token_rewards": tensors([[1.0, None, 0.0], [None, 1.0, 0.0]])}
    by_step = build_algorithm("process_grpo", {"normalize": "returns", "drop_equal": True})
    dropped = by_step.credit(alike)
    assert isinstance(dropped, Drop)
    assert dropped.instead is not None
    assert [row.tolist() for row in dropped.instead["advantage"]] == [[0.0] * 3] * 2
    by_reward = build_algorithm("process_grpo", {"drop_equal": True}).credit(alike)
    assert not isinstance(by_reward, Drop), "the steps of each response differ"
    nothing = build_algorithm("process_grpo", {}).credit({"token_rewards": tensors([[None]] * 2)})
    assert not isinstance(nothing, Drop)
    assert [row.tolist() for row in nothing["advantage"]] == [[0.0]] * 2


def test_the_penalty_of_a_response_comes_with_its_last_reward() -> None:
    algorithm = build_algorithm("process_grpo", {"kl_reward": 0.5})
    rollout = [torch.tensor([-1.0, -2.0]), torch.tensor([-1.0])]
    ref = [torch.tensor([-1.5, -1.0]), torch.tensor([-3.0])]
    rewards = {"token_rewards": tensors([[1.0, 0.5], [0.0]])}
    made = algorithm.credit({**rewards, "rollout_logprobs": rollout, "ref_logprobs": ref})
    expected = build_algorithm("process_grpo", {}).credit(
        {"token_rewards": tensors([[1.0, 0.5 - 0.5 * -0.5], [0.0 - 0.5 * 2.0]])}
    )
    assert not isinstance(made, Drop)
    assert not isinstance(expected, Drop)
    for row, other in zip(made["advantage"], expected["advantage"], strict=True):
        torch.testing.assert_close(row, other)


# --- batches


def ragged(rows: list[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.nested.nested_tensor(
        [torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged
    )


def test_the_learning_rate_goes_by_the_rows_with_a_trained_token_that_teaches() -> None:
    algorithm = build_algorithm("process_grpo", {})
    mask = [[True, True], [True, False], [False, False], [True, True]]
    advantage = [[0.0, 1.0], [0.0, 2.0], [3.0, 3.0], [0.0, 0.0]]
    data = {
        "response_ids": ragged([[0, 0]] * 4, torch.int64),
        "rollout_logprobs": ragged([[0.0, 0.0]] * 4, torch.float32),
        "advantage": ragged(advantage, torch.float32),
        "loss_mask": ragged(mask, torch.bool),
    }
    assert algorithm.signal(TrainBatch(TensorDict(data, [4]), algorithm)) == pytest.approx(1 / 3)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    masked=st.booleans(),
    branched=st.booleans(),
)
def test_ppos_rewards_come_with_the_tokens_that_earned_them(
    seed: int, gamma: float, lam: float, masked: bool, branched: bool
) -> None:
    """Of a branch those of later branches come with its last token."""
    rng = random.Random(seed)
    rewards = drawn_rewards(rng, 5)
    rewards[0] = [1.0, None, -0.5]
    mask = [[not masked or rng.random() < 0.6 for _ in row] for row in rewards]
    mask[0] = [True] * 3
    begins = [
        [at for at in range(1, len(row)) if branched and rng.random() < 0.4] for row in rewards
    ]
    values = [[rng.gauss(0, 1) for _ in row] for row in rewards]
    data = {
        "response_ids": ragged([[0] * len(row) for row in rewards], torch.int64),
        "rollout_logprobs": ragged(values, torch.float32),
        "token_rewards": torch.nested.nested_tensor(tensors(rewards), layout=torch.jagged),
        "loss_mask": ragged(mask, torch.bool),
        "branches": ragged([[n for at in row for n in (at, 1)] for row in begins], torch.int64),
    }
    ppo = PPO(gamma=gamma, gae_lambda=lam, reward_level="token", whiten=False)
    flat = torch.tensor([value for row in values for value in row], dtype=torch.float64)
    batch = TrainBatch(TensorDict(data, [5]), ppo, computed={"values": flat})
    expected = []
    for row, kept, of_row, starts in zip(rewards, mask, values, begins, strict=True):
        tokens = [t for t, is_kept in enumerate(kept) if is_kept]
        at = dict.fromkeys(tokens, 0.0)
        for token, reward in enumerate(row):
            if reward is not None and tokens:
                before = [t for t in tokens if t <= token]
                at[before[-1] if before else tokens[0]] += float(torch.tensor(reward))
        for begin, end in zip([0, *starts], [*starts, len(row)], strict=True):
            branch = [t for t in tokens if begin <= t < end]
            if not branch:
                continue
            earned = [at[t] for t in branch]
            earned[-1] += sum(at[t] for t in tokens if t >= end)
            following = [*(of_row[t] for t in branch[1:]), 0.0]
            errors = [
                r + gamma * n - of_row[t] for r, n, t in zip(earned, following, branch, strict=True)
            ]
            expected += [
                sum((gamma * lam) ** k * error for k, error in enumerate(errors[step:]))
                for step in range(len(errors))
            ]
    trained = torch.tensor([is_kept for row in mask for is_kept in row])
    assert batch["advantage"][trained].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert batch["advantage"][~trained].abs().sum() == 0
    learning = PPO(**ppo.model_dump() | {"critic": "own"}).critic_algorithm()
    assert learning is not None
    assert "token_rewards" in learning.loss_reads
    assert "reward" not in learning.loss_reads
    columns = {
        **data,
        "values": torch.nested.nested_tensor_from_jagged(flat, data["response_ids"].offsets()),
    }
    returns = TrainBatch(TensorDict(columns, [5]), learning)["returns"]
    torch.testing.assert_close(returns, batch["returns"])


def test_with_a_reward_at_the_last_token_ppo_is_as_before() -> None:
    rewards: Rewards = [[None, None, 0.5], [2.0], [None, -1.0]]
    values = torch.randn(6, generator=torch.Generator().manual_seed(0)).double()
    batches = []
    for level, column in (
        ("token", torch.nested.nested_tensor(tensors(rewards), layout=torch.jagged)),
        ("response", torch.tensor([0.5, 2.0, -1.0])),
    ):
        data = {
            "response_ids": ragged([[0] * len(row) for row in rewards], torch.int64),
            "rollout_logprobs": ragged([[0.0] * len(row) for row in rewards], torch.float32),
            "token_rewards" if level == "token" else "reward": column,
        }
        ppo = build_algorithm("ppo", {"reward_level": level})
        batches.append(TrainBatch(TensorDict(data, [3]), ppo, computed={"values": values}))
    for name in ("advantage", "returns"):
        torch.testing.assert_close(batches[0][name], batches[1][name])
