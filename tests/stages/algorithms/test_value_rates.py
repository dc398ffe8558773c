"""Learning rates of a value head on the policy's trunk, and train batches in which the critic alone
learns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tensordict import TensorDict

from orchestration.recipe.problems import RecipeError
from stages.algorithms.policy_gradient.ppo import PPO
from stages.engines.torch.train import TorchTrainEngine
from tests.batches import make_batch
from tests.orchestration.runs import TINY, recipe
from tests.stages.engines.torch.test_train import tiny_llama

# Returns are the rewards and no value is clipped, so the loss of values is a plain regression.
PLAIN: dict[str, Any] = {"gae_lambda": 1.0, "value_clip": 1e9, "value_coef": 0.5}


def engine_of(**options: Any) -> TorchTrainEngine:
    defaults = {"learning_rate": 1e-3, "total_steps": 10, "device": "cpu", "threads": 1}
    return TorchTrainEngine(tiny_llama(), **{**defaults, "value_head": True, **options})


def rewarded(seed: int = 0) -> TensorDict:
    batch = make_batch(seed=seed)
    batch["reward"] = torch.linspace(-1, 1, len(batch))
    return batch


def policy_of(engine: TorchTrainEngine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.weights()}


def state_of(engine: TorchTrainEngine) -> dict[str, Any]:
    return copy.deepcopy({**engine.state_dict(), "model": {**engine.state_dict()["model"]}})


def features(batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    """Last hidden states before each response token by the plain model in float64, and the row's
    reward at each."""
    decoder = tiny_llama().double().base_model
    states = []
    rewards = []
    rows = zip(
        batch["prompt_ids"].unbind(), batch["response_ids"].unbind(), batch["reward"], strict=True
    )
    for prompt, response, reward in rows:
        with torch.no_grad():
            hidden = decoder(input_ids=torch.cat([prompt, response])[None]).last_hidden_state[0]
        states.append(hidden[len(prompt) - 1 : -1])
        rewards.append(reward.double().expand(len(response)))
    return torch.cat(states), torch.cat(rewards)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_critic_that_learns_alone_is_a_regression_on_the_frozen_model(decay: float) -> None:
    """Against AdamW on the features of the plain model in float64.

    The policy keeps its bits, whatever decays.
    """
    steps = 6
    rate = 3e-2
    ppo = PPO(epochs=2, critic_warmup_steps=steps, value_learning_rate=rate, **PLAIN)
    engine = engine_of(weight_decay=decay, grad_clip=None)
    batch = rewarded()
    before = policy_of(engine)
    reported = [engine.train_batch(batch, ppo) for _ in range(steps)]
    assert all(torch.equal(value, before[name]) for name, value in engine.weights())
    assert all((m["learning_rate"], m["value_learning_rate"]) == (0.0, rate) for m in reported)

    hidden, rewards = features(batch)
    weight = torch.zeros(hidden.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    groups = [{"params": [weight], "weight_decay": decay}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate)
    explained = []
    for _ in range(steps):
        with torch.no_grad():
            left = rewards - (hidden @ weight + bias)
        explained.append(1 - float(left.var(correction=0) / rewards.var(correction=0)))
        for _ in range(2):
            optimizer.zero_grad()
            loss = 0.5 * (hidden @ weight + bias - rewards).square().mean() / 2
            loss.backward()
            optimizer.step()
    head = engine.state_dict()["model"]
    torch.testing.assert_close(
        head["value_head.weight"][0].double(), weight.detach(), rtol=2e-3, atol=1e-4
    )
    assert head["value_head.bias"].item() == pytest.approx(bias.item(), rel=2e-3)
    assert [m["explained_variance"] for m in reported] == pytest.approx(
        explained, rel=2e-3, abs=1e-4
    )
    moments = {n: v for n, v in engine.state_dict()["exp_avg"].items() if "value_head" not in n}
    assert not any(moment.any() for moment in moments.values()), "the policy has seen no gradient"


def test_either_has_its_own_rate_and_the_first_step_of_adamw_shows_it() -> None:
    """AdamW's first step has the size of the learning rate in each weight with a gradient far above
    its epsilon."""
    engine = engine_of(learning_rate=2e-3, grad_clip=None)
    before = policy_of(engine)
    metrics = engine.train_batch(rewarded(), PPO(epochs=1, value_learning_rate=5e-2))
    assert (metrics["learning_rate"], metrics["value_learning_rate"]) == (2e-3, 5e-2)
    moved = max(float((value - before[name]).abs().max()) for name, value in engine.weights())
    assert moved == pytest.approx(2e-3, rel=1e-3)
    head = engine.state_dict()["model"]["value_head.weight"].abs()
    assert float(head.max()) == pytest.approx(5e-2, rel=1e-3)
    default = engine_of(learning_rate=2e-3).train_batch(rewarded(), PPO(epochs=1))
    assert (default["learning_rate"], default["value_learning_rate"]) == (2e-3, 2e-2)


def test_the_policys_schedule_begins_after_the_critics_batches() -> None:
    """Two batches of the critic alone; then a warm-up of two, and down to zero at step 6.

    The critic's runs from step 0.
    """
    engine = engine_of(learning_rate=1e-3, total_steps=6, warmup_steps=2, schedule="linear")
    ppo = PPO(epochs=2, mini_batches=2, critic_warmup_steps=2, value_learning_rate=1e-2)
    seen = [engine.train_batch(rewarded(seed), ppo) for seed in range(6)]
    assert [m["learning_rate"] for m in seen] == pytest.approx([0, 0, 5e-4, 1e-3, 1e-3, 5e-4])
    assert [m["value_learning_rate"] for m in seen] == pytest.approx(
        [5e-3, 1e-2, 1e-2, 7.5e-3, 5e-3, 2.5e-3]
    )


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_run_resumed_before_at_or_after_the_warm_up_goes_on_bit_for_bit(
    at: int, compute: torch.dtype
) -> None:
    ppo = PPO(epochs=2, critic_warmup_steps=2, value_learning_rate=1e-2)
    straight = engine_of(compute=compute)
    first = engine_of(compute=compute)
    for seed in range(6):
        straight.train_batch(rewarded(seed), ppo)
    for seed in range(at):
        first.train_batch(rewarded(seed), ppo)
    resumed = engine_of(compute=compute)
    resumed.load_state_dict(state_of(first))
    for seed in range(at, 6):
        resumed.train_batch(rewarded(seed), ppo)
    ours = straight.state_dict()
    theirs = resumed.state_dict()
    for part in ("model", "exp_avg", "exp_avg_sq"):
        assert all(torch.equal(ours[part][name], theirs[part][name]) for name in ours[part])
    assert any(moment.any() for name, moment in ours["exp_avg"].items() if "value_head" not in name)


def test_beside_a_critic_of_its_own_the_policy_waits_too() -> None:
    """It has no value head: all of its gradients are left out, and its first step comes after the
    warm-up."""
    ppo = PPO(critic="own", critic_warmup_steps=2)
    engine = engine_of(value_head=False, weight_decay=0.1)
    batch = rewarded()
    batch["values"] = torch.nested.nested_tensor(
        [torch.zeros(len(row)) for row in batch["response_ids"].unbind()], layout=torch.jagged
    )
    before = policy_of(engine)
    for _ in range(2):
        metrics = engine.train_batch(batch, ppo)
        assert (metrics["learning_rate"], metrics["grad_norm"]) == (0.0, 0.0)
        assert "value_learning_rate" not in metrics
    assert all(torch.equal(value, before[name]) for name, value in engine.weights())
    engine.train_batch(batch, ppo)
    assert not any(torch.equal(value, before[name]) for name, value in engine.weights())


def test_the_heads_rate_is_refused_where_there_is_no_head() -> None:
    with pytest.raises(
        ValidationError,
        match=r"value_learning_rate\n  is of .* set "
        r"critic.learning_rate = 0.001",
    ):
        PPO(critic="own", value_learning_rate=1e-3)
    with pytest.raises(RecipeError, match=r"set critic.learning_rate = 0.001"):
        recipe(
            TINY,
            algorithm__name="ppo",
            algorithm__options={"critic": "own", "value_learning_rate": 1e-3},
        )


@pytest.mark.parametrize(("warmup", "steps"), [(6, 6), (4, 6)])
def test_check_refuses_a_warm_up_that_leaves_the_policy_no_step(warmup: int, steps: int) -> None:
    """Or fewer steps than its own warm-up has."""
    options = {"critic_warmup_steps": warmup}
    own = {"train__warmup_steps": 3} if warmup < steps else {}
    named = "train.warmup_steps = 3" if own else "algorithm.options.critic_warmup_steps = 6"
    with pytest.raises(RecipeError, match=named):
        recipe(TINY, algorithm__name="ppo", algorithm__options=options, train__steps=steps, **own)
