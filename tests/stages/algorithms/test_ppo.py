"""PPO and PF-PPO: advantages, loss and gradient against formulas in plain float64 Python; the value
head of the engine."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from stages.algorithms import TokenBatch
from stages.algorithms.batch import TrainBatch
from stages.algorithms.policy_gradient.ppo import PFPPO, PPO
from stages.engines.torch.critic import VALUE_HEAD, TorchCriticEngine
from stages.engines.torch.train import TorchTrainEngine
from tests.batches import make_batch
from tests.stages.engines.torch.test_train import tiny_llama
from tests.stages.sharded import model_of


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The sum of Eq. 16 of the paper, term by term."""
    following = [*values[1:], 0.0]
    errors = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [
        sum((gamma * lam) ** k * error for k, error in enumerate(errors[t:]))
        for t in range(len(errors))
    ]


def kl_of(estimator: str, x: float) -> float:
    return {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[estimator]


def ragged(rows: list[list[float]]) -> torch.Tensor:
    return torch.nested.nested_tensor(
        [torch.tensor(row, dtype=torch.float64) for row in rows], layout=torch.jagged
    )


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    critic_lam=st.sampled_from([None, 1.0, 0.5]),
    kl=st.sampled_from([0.0, 0.2]),
    estimator=st.sampled_from(["k1", "k2", "k3"]),
    whiten=st.booleans(),
    masked=st.booleans(),
)
def test_advantages_and_returns_are_those_of_the_formulas(
    seed: int,
    gamma: float,
    lam: float,
    critic_lam: float | None,
    kl: float,
    estimator: Any,
    whiten: bool,
    masked: bool,
) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 6) for _ in range(5)]
    draw = {
        n: [[rng.gauss(0, 1) for _ in range(k)] for k in lengths]
        for n in ("values", "rollout", "ref")
    }
    reward = [rng.uniform(-1, 1) for _ in lengths]
    mask = [[not masked or rng.random() < 0.7 for _ in range(k)] for k in lengths]
    mask[0] = [True] * lengths[0]
    batch = TensorDict(
        {
            "response_ids": torch.nested.nested_tensor(
                [torch.zeros(k).long() for k in lengths], layout=torch.jagged
            ),
            "rollout_logprobs": ragged(draw["rollout"]),
            "ref_logprobs": ragged(draw["ref"]),
            "reward": torch.tensor(reward),
            "loss_mask": torch.nested.nested_tensor(
                [torch.tensor(row) for row in mask], layout=torch.jagged
            ),
        },
        batch_size=[5],
    )
    ppo = PPO(
        gamma=gamma,
        gae_lambda=lam,
        critic_lambda=critic_lam,
        kl_reward=kl,
        kl_reward_estimator=estimator,
        whiten=whiten,
    )
    given_batch = TrainBatch(
        batch,
        ppo,
        computed={
            "values": torch.tensor([x for row in draw["values"] for x in row], dtype=torch.float64)
        },
    )
    advantages = []
    returns = []
    for *columns, is_trained, last in zip(
        draw["values"], draw["rollout"], draw["ref"], mask, reward, strict=True
    ):
        values, rollout, ref = (
            [x for x, t in zip(c, is_trained, strict=True) if t] for c in columns
        )
        rewards = [-kl * kl_of(estimator, a - b) for a, b in zip(rollout, ref, strict=True)]
        if not rewards:
            continue
        rewards[-1] += float(torch.tensor(last))  # float32, as the column
        found = gae(rewards, values, gamma, lam)
        advantages += found
        of_critic = gae(rewards, values, gamma, lam if critic_lam is None else critic_lam)
        returns += [a + v for a, v in zip(of_critic, values, strict=True)]
    if whiten:
        mean = sum(advantages) / len(advantages)
        std = (sum((a - mean) ** 2 for a in advantages) / len(advantages)) ** 0.5
        advantages = [(a - mean) / (std + 1e-8) for a in advantages]
    trained = torch.tensor([t for row in mask for t in row])
    assert given_batch["returns"][trained].tolist() == pytest.approx(returns, rel=1e-6, abs=1e-9)
    assert given_batch["advantage"][trained].tolist() == pytest.approx(
        advantages, rel=1e-6, abs=1e-6
    )


def masked_batch(
    mask: list[list[int]], reward: list[float], **ragged_columns: list[list[float]]
) -> TensorDict:
    """Rows with these trained tokens (1), rewards and other columns."""
    rows = [torch.tensor(row, dtype=torch.bool) for row in mask]
    columns = {
        "response_ids": torch.nested.nested_tensor(
            [torch.zeros(len(row)).long() for row in mask], layout=torch.jagged
        ),
        "loss_mask": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "reward": torch.tensor(reward),
    }
    zeros = [[0.0] * len(row) for row in mask]
    columns |= {
        name: ragged(ragged_columns.get(name, zeros))
        for name in ("rollout_logprobs", "ref_logprobs")
    }
    return TensorDict(columns, batch_size=[len(mask)])


@pytest.mark.parametrize(
    ("mask", "gamma", "lam", "expected"),
    [
        # a tool's output: 0.698 and 0.735 if time passed in it
        ([1, 0, 0, 0, 0, 0, 1], 1.0, 0.95, [0.95, 1.0]),
        ([1, 1, 0, 0, 0, 0, 0], 1.0, 0.95, [0.95, 1.0]),  # the last token is none of the policy's
        ([0, 0, 1, 0, 1, 0, 1], 0.9, 0.5, [0.45**2, 0.45, 1.0]),  # several stretches
        ([0, 0, 0, 1], 0.9, 0.5, [1.0]),
        ([1, 1, 1], 1.0, 0.95, [0.95**2, 0.95, 1.0]),
        ([0, 0], 1.0, 0.95, []),  # the whole response
    ],
)
def test_time_counts_trained_tokens(
    mask: list[int], gamma: float, lam: float, expected: list[float]
) -> None:
    """Of a reward of 1 and a critic that says 0: (gamma lambda)^k at the k-th trained token from
    the end."""
    ppo = PPO(gamma=gamma, gae_lambda=lam, whiten=False)
    values = torch.zeros(len(mask) + 2, dtype=torch.float64)
    batch = TrainBatch(masked_batch([mask, [1, 1]], [1.0, 1.0]), ppo, computed={"values": values})
    at = batch.is_trained[: len(mask)]
    assert batch["advantage"][: len(mask)][at].tolist() == pytest.approx(expected)
    assert batch["returns"][: len(mask)][at].tolist() == pytest.approx(expected)
    assert batch["advantage"][len(mask) :].tolist() == pytest.approx([gamma * lam, 1.0])


def test_tokens_that_are_left_out_are_not_charged_for_the_kl_and_have_no_value() -> None:
    """By hand: rewards of the trained tokens are -0.5 x 0.2 and 1 - 0.5 x 0.4, values 0.3 and
    0.6."""
    ppo = PPO(kl_reward=0.5, gamma=0.9, gae_lambda=0.5, whiten=False)
    columns = {
        "rollout_logprobs": [[-1.0, -9.0, -1.0, 5.0]],
        "ref_logprobs": [[-1.2, 7.0, -1.4, 0.0]],
    }
    values = torch.tensor([0.3, 50.0, 0.6, -70.0], dtype=torch.float64)
    batch = TrainBatch(
        masked_batch([[1, 0, 1, 0]], [1.0], **columns), ppo, computed={"values": values}
    )
    second = 1 - 0.2 - 0.6
    first = -0.1 + 0.9 * 0.6 - 0.3 + 0.45 * second
    assert batch["advantage"][batch.is_trained].tolist() == pytest.approx([first, second])
    assert batch["returns"][batch.is_trained].tolist() == pytest.approx([first + 0.3, second + 0.6])


@pytest.mark.parametrize("critic", ["trunk", "own"])
def test_what_is_left_out_changes_no_loss_and_no_metric(critic: Any) -> None:
    """A batch with tokens that loss_mask leaves out is the batch without these tokens."""
    rng = random.Random(1)
    mask = [[1, 0, 0, 1, 1], [0, 1, 1, 0], [0, 0], [1, 1]]
    draw = {
        n: [[rng.gauss(-1, 1) for _ in row] for row in mask]
        for n in ("rollout", "ref", "values", "now")
    }
    reward = [1.0, 0.0, 1.0, 0.5]
    ppo = PPO(critic=critic, kl_reward=0.1, kl_coef=0.1)
    learning = ppo.critic_algorithm() or ppo

    def of(keep: list[list[int]], rows: list[int]) -> tuple[list[float], dict[str, float]]:
        chosen = {
            name: [[x for x, k in zip(draw[name][at], keep[at], strict=True) if k] for at in rows]
            for name in draw
        }
        batch = masked_batch(
            [[m for m, k in zip(mask[at], keep[at], strict=True) if k] for at in rows],
            [reward[at] for at in rows],
            rollout_logprobs=chosen["rollout"],
            ref_logprobs=chosen["ref"],
        )
        out = []
        losses = []
        metrics = dict[str, float]()
        for algorithm in (ppo, learning):
            values = torch.tensor([x for row in chosen["values"] for x in row], dtype=torch.float64)
            given_batch = TrainBatch(batch, algorithm, computed={"values": values})
            now = torch.tensor(
                [x for row in chosen["now"] for x in row], dtype=torch.float64, requires_grad=True
            )
            trained = int(given_batch.trained.sum())
            counts = int((given_batch.trained > 0).sum())
            sizes = {"total_tokens": trained, "total_rows": counts, "total_groups": 1}
            tokens = given_batch.tokens(
                range(len(rows)), [0] * len(rows), now, values=now * 0.5, **sizes
            )
            out = algorithm.loss(tokens)
            losses.append(out.loss.item())
            metrics |= algorithm.finish({name: float(value) for name, value in out.metrics.items()})
        return losses, metrics

    everything = [[1] * len(row) for row in mask]
    losses, metrics = of(everything, [0, 1, 2, 3])
    without, expected = of(mask, [0, 1, 3])
    assert losses == pytest.approx(without)
    assert metrics == pytest.approx(expected)
    assert "explained_variance" in metrics
    assert metrics["max_ratio"] == pytest.approx(expected["max_ratio"])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    clip=st.sampled_from([0.0, 0.1, 0.5]),
    coef=st.sampled_from([0.1, 1.0]),
)
def test_value_loss_and_its_gradient(seed: int, clip: float, coef: float) -> None:
    rng = random.Random(seed)
    count = 12
    now, before, returns = ([rng.gauss(0, 1) for _ in range(count)] for _ in range(3))
    logprobs = torch.full((count,), -1.0, dtype=torch.float64, requires_grad=True)
    values = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    columns = {
        n: torch.tensor(x, dtype=torch.float64)
        for n, x in (("values", before), ("returns", returns))
    }
    columns |= {
        "advantage": torch.zeros(count).double(),
        "rollout_logprobs": torch.full((count,), -1.0).double(),
    }
    ppo = PPO(value_clip=clip, value_coef=coef)
    row = torch.arange(count) // 4
    tokens = TokenBatch(logprobs, columns, row, torch.tensor([4, 4, 4]), count, 3, values=values)
    output = ppo.loss(tokens)
    output.loss.backward()
    total = 0.0
    gradient = []
    for v, old, target in zip(now, before, returns, strict=True):
        near = old + max(-clip, min(clip, v - old))
        plain = (v - target) ** 2
        clipped = (near - target) ** 2 if clip else plain
        total += coef * max(plain, clipped) / 2 / count
        moving = plain >= clipped or abs(v - old) < clip
        gradient.append(coef * (v - target) / count if moving else 0.0)
    assert output.loss.item() == pytest.approx(total, rel=1e-6)
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx(gradient, rel=1e-6, abs=1e-12)
    metrics = ppo.finish({name: value.item() for name, value in output.metrics.items()})
    errors = torch.tensor(returns) - torch.tensor(before)
    expected = 1 - float(errors.var(correction=0) / torch.tensor(returns).var(correction=0))
    assert metrics["explained_variance"] == pytest.approx(expected, rel=1e-4, abs=1e-4)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), clip=st.sampled_from([0.1, 0.5]), kl=st.sampled_from([0.0, 0.2]))
def test_a_critic_of_its_own_learns_the_same_returns_and_the_policy_none(
    seed: int, clip: float, kl: float
) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 5) for _ in range(4)]
    draw = {
        n: [[rng.gauss(0, 1) for _ in range(k)] for k in lengths]
        for n in ("values", "rollout", "ref", "now")
    }
    reward = [rng.uniform(-1, 1) for _ in lengths]
    batch = TensorDict(
        {
            "response_ids": torch.nested.nested_tensor(
                [torch.zeros(k).long() for k in lengths], layout=torch.jagged
            ),
            "rollout_logprobs": ragged(draw["rollout"]),
            "ref_logprobs": ragged(draw["ref"]),
            "values": ragged(draw["values"]),
            "reward": torch.tensor(reward),
        },
        batch_size=[4],
    )
    ppo = PPO(critic="own", value_epochs=3, value_clip=clip, kl_reward=kl, whiten=False)
    learning = ppo.critic_algorithm()
    assert learning is not None
    assert (learning.epochs, learning.scores, ppo.scores["values"]) == (3, {}, "critic")
    of_policy = TrainBatch(batch, ppo)
    of_critic = TrainBatch(batch, learning)
    assert torch.equal(of_policy["returns"], of_critic["returns"])
    before = of_policy["values"]
    now = torch.tensor(
        [v for row in draw["now"] for v in row], dtype=torch.float64, requires_grad=True
    )
    sizes = {"total_tokens": len(now), "total_rows": 4, "total_groups": 1}
    tokens = of_critic.tokens(range(4), [0] * 4, now, values=now, **sizes)
    output = learning.loss(tokens)
    output.loss.backward()
    total = 0.0
    gradient = []
    moving = []
    for v, old, target in zip(
        now.tolist(), before.tolist(), of_policy["returns"].tolist(), strict=True
    ):
        near = old + max(-clip, min(clip, v - old))
        total += max((v - target) ** 2, (near - target) ** 2) / 2 / len(now)
        moving.append((v - target) ** 2 >= (near - target) ** 2 or abs(v - old) < clip)
        gradient.append((v - target) / len(now) if moving[-1] else 0.0)
    assert output.loss.item() == pytest.approx(total, rel=1e-6)
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx(gradient, rel=1e-6, abs=1e-12)
    logprobs = torch.full_like(now, -1.0).detach().requires_grad_()
    policy = ppo.loss(of_policy.tokens(range(4), [0] * 4, logprobs, **sizes))
    assert "value_loss" not in policy.metrics
    errors = before - of_policy["returns"]
    expected = 1 - float(errors.var(correction=0) / of_policy["returns"].var(correction=0))
    shown = ppo.finish({name: value.item() for name, value in policy.metrics.items()})
    assert shown["explained_variance"] == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("filtration", "expected"),
    [
        ("best_worst", [2.0, 0.0, 0.0, 2.0]),
        ("best_random", [2.0, 2 / 3, 2 / 3, 2 / 3]),
        ("best", [4.0, 0.0, 0.0, 0.0]),
    ],
)
def test_weights_go_by_rank(filtration: Any, expected: list[float]) -> None:
    rewards = torch.tensor([0.9, 0.5, 0.2, 0.1])
    order = torch.tensor([2, 0, 3, 1])
    made = PFPPO(filtration=filtration).credit({"reward": rewards[order]})["row_weight"]
    assert made.tolist() == pytest.approx([expected[i] for i in order])
    equal = PFPPO(filtration=filtration).credit({"reward": torch.ones(4)})["row_weight"]
    assert equal.tolist() == pytest.approx([1.0] * 4)


def engine(**options: Any) -> TorchTrainEngine:
    defaults = {
        "learning_rate": 1e-2,
        "total_steps": 10,
        "device": "cpu",
        "threads": 1,
        "value_head": True,
    }
    return TorchTrainEngine(tiny_llama(), **{**defaults, **options})


def batch_with_rewards(seed: int = 0) -> TensorDict:
    batch = make_batch(seed=seed)
    batch["reward"] = torch.linspace(-1, 1, len(batch))
    return batch


@pytest.mark.parametrize("budget", [None, 24])
def test_the_value_head_learns_is_saved_and_goes_on_bit_for_bit(
    tmp_path: Path, budget: int | None
) -> None:
    ppo = PPO(epochs=2, mini_batches=2)
    straight = engine(token_budget=budget)
    first = engine(token_budget=budget)
    losses = [straight.train_batch(batch_with_rewards(), ppo)["value_loss"] for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0]
    for _ in range(4):
        first.train_batch(batch_with_rewards(), ppo)
    state = {
        k: {n: v.clone() for n, v in part.items()} if isinstance(part, dict) else part
        for k, part in first.state_dict().items()
    }
    assert state["model"]["value_head.weight"].count_nonzero()
    resumed = engine(token_budget=budget)
    resumed.load_state_dict(state)
    for _ in range(4):
        resumed.train_batch(batch_with_rewards(), ppo)
    ours = straight.state_dict()["model"]
    theirs = resumed.state_dict()["model"]
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not any("value_head" in name for name, _ in straight.weights())
    straight.save_pretrained(tmp_path / "live")
    straight.save_pretrained(tmp_path / "saved", state)
    for folder in ("live", "saved"):
        assert not any(
            "value_head" in name for name in load_file(tmp_path / folder / "model.safetensors")
        )


def test_micro_batches_do_not_change_the_step() -> None:
    engines = [engine(token_budget=budget, learning_rate=1e-3) for budget in (None, 24)]
    for made in engines:
        made.train_batch(batch_with_rewards(), PPO(epochs=1))
    whole, cut = (made.state_dict()["model"] for made in engines)
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=1e-4, atol=1e-5)


def test_mixed_precision_keeps_the_value_head_in_float32() -> None:
    made = engine(compute=torch.bfloat16)
    before = made.train_batch(batch_with_rewards(), PPO())
    assert made.state_dict()["model"]["value_head.weight"].dtype == torch.float32
    after = [made.train_batch(batch_with_rewards(), PPO()) for _ in range(6)][-1]
    assert after["value_loss"] < before["value_loss"]


def test_a_critic_engine_begins_at_zero_learns_and_its_checkpoint_brings_the_head(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {
        "learning_rate": 1e-2,
        "total_steps": 20,
        "device": "cpu",
        "threads": 1,
    }
    critic = TorchCriticEngine(tiny_llama(), **options)
    learning = PPO(critic="own").critic_algorithm()
    assert learning is not None
    batch = batch_with_rewards()
    assert all(not row.any() for row in critic.values(batch).unbind())
    losses = []
    for _ in range(10):
        batch["values"] = critic.values(batch)
        metrics = critic.train_batch(batch, learning)
        assert set(metrics) == {"value_loss", "grad_norm", "learning_rate"}
        losses.append(metrics["value_loss"])
    assert losses[-1] < 0.3 * losses[0]
    assert critic.values(batch).values().dtype == torch.float32
    critic.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    again = TorchCriticEngine(opened, head=tmp_path / VALUE_HEAD, **options)
    assert torch.equal(again.values(batch).values(), critic.values(batch).values())


def test_the_critic_of_a_model_with_a_head_of_its_own_learns_in_mixed_precision() -> None:
    """The output embeddings, which no loss reaches, are left out."""
    options: dict[str, Any] = {
        "learning_rate": 1e-2,
        "total_steps": 9,
        "device": "cpu",
        "threads": 1,
    }
    critic = TorchCriticEngine(model_of("biased"), compute=torch.bfloat16, **options)
    learning = PPO(critic="own").critic_algorithm()
    batch = batch_with_rewards()
    losses = []
    assert learning is not None
    for _ in range(4):
        batch["values"] = critic.values(batch)
        losses.append(critic.train_batch(batch, learning)["value_loss"])
    assert losses[-1] < 0.3 * losses[0]
    assert not any("lm_head" in name for name in critic.state_dict()["exp_avg"])


def test_versions_of_a_batch_are_ordered() -> None:
    """Rows of different length are not mixed up: each row's advantage depends on its own reward
    alone."""
    batch = batch_with_rewards()
    lengths = [len(row) for row in batch["response_ids"].unbind()]
    values = torch.zeros(sum(lengths))
    given_batch = TrainBatch(batch, PPO(whiten=False, gae_lambda=1.0), computed={"values": values})
    edges = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for number, (start, end) in enumerate(pairwise(edges)):
        assert given_batch["advantage"][start:end].tolist() == pytest.approx(
            [float(batch["reward"][number])] * lengths[number]
        )
