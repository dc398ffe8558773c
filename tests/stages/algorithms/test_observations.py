"""Observations of an environment teach nothing and count nowhere: for every algorithm a batch with
them is the batch of the generated tokens alone, whatever their columns hold."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms import build_algorithm
from stages.algorithms.batch import TrainBatch
from stages.algorithms.named import AlgorithmError, NamedAlgorithm
from stages.algorithms.policy_gradient.base import PolicyGradient
from stages.algorithms.policy_gradient.distillation import Distillation
from stages.algorithms.policy_gradient.ppo import PPO, ValueLearner
from stages.algorithms.registry import built_in
from stages.engines.mock.engines import MockTrainEngine
from stages.engines.mock.options import MockTrainOptions
from stages.engines.torch.critic import TorchCriticEngine
from stages.flow.catalogue import MASK, ROW_MASK, TEACHER_IDS, TEACHER_LOGPROBS
from tests.batches import VOCABULARY, make_batch, unstack
from tests.stages.algorithms.observations import aged, masks_of, versions_of, with_observations
from tests.stages.algorithms.test_masks import measured, rows_of
from tests.stages.engines.torch.test_train import (
    assert_same_bits,
    engine_of,
    gradients_of_step,
    tiny_llama,
    weights_of,
)


def drawn(seed: int) -> tuple[list[Any], list[list[int]], list[torch.Tensor]]:
    """Rows of generated tokens, the versions of these, and masks of the rows with observations."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 8) for _ in range(6)]
    rows = rows_of(seed, lengths)
    for row in rows:
        del row["token_staleness"], row["age"]
    return rows, [versions_of(length, rng) for length in lengths], masks_of(rows, seed)


def algorithm_named(name: str, **options: Any) -> Any:
    # a value a token, as in other columns, which a teacher beside training has made
    options = {**options, "top_k": 1, "teacher": "frozen"}
    algorithm = build_algorithm(name, {})
    known = {key: value for key, value in options.items() if key in type(algorithm).model_fields}
    return build_algorithm(name, known)


@pytest.mark.parametrize("name", built_in())
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    level=st.sampled_from(["token", "geometric", "sequence"]),
    proximal=st.sampled_from(["rollout", "recomputed", "interpolated"]),
    normalization=st.sampled_from(["token", "sequence", "constant"]),
)
def test_loss_gradient_and_metrics_are_those_of_the_generated_tokens(
    name: str, seed: int, level: str, proximal: str, normalization: str
) -> None:
    algorithm = algorithm_named(
        name,
        ratio_level=level,
        correction_level=level,
        proximal=proximal,
        mini_batches=2,
        correction="mask",
        kl_coef=0.1,
        kl_weighted=True,
        kl_reward=0.1,
        loss_normalization=normalization,
        response_tokens=9,
    )
    rows, versions, masks = drawn(seed)
    alone = aged(rows, versions)
    one, other = (with_observations(rows, versions, masks, seed + at) for at in range(2))
    for batch, of_batch in ((alone, None), (one, masks), (other, masks)):
        batch["preference"] = 1.0 - 2 * batch["preference"]  # each pair has a better response
        batch["log_target"] = batch["reward"]
        if isinstance(algorithm, Distillation):
            names = ("ref_logprobs", "rollout_logprobs")
            group = {key: list(batch[key].unbind()) for key in names}
            credit = algorithm.credit(group if of_batch is None else {**group, MASK: of_batch})
            batch["advantage"] = torch.nested.nested_tensor(
                list(credit["advantage"]), layout=torch.jagged
            )
    result = measured(algorithm, one)
    assert measured(algorithm, other) == result, "what is masked may be anything"
    assert result == pytest.approx(measured(algorithm, alone), rel=1e-6, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    gamma=st.sampled_from([1.0, 0.9]),
    kl=st.sampled_from([0.0, 0.2]),
    whiten=st.booleans(),
)
def test_gae_passes_over_observations(seed: int, gamma: float, kl: float, whiten: bool) -> None:
    ppo = PPO(gamma=gamma, kl_reward=kl, whiten=whiten)
    rows, versions, masks = drawn(seed)
    whole = with_observations(rows, versions, masks, seed)
    found, expected = (
        TrainBatch(batch, ppo, computed={"values": batch["values"].values()})
        for batch in (whole, aged(rows, versions))
    )
    assert isinstance(ppo, ValueLearner)
    for name in ("advantage", "returns"):
        torch.testing.assert_close(found[name][found.is_trained], expected[name])


def test_distillation_gives_an_observation_no_advantage() -> None:
    """The teacher may hold it for impossible; the run goes on."""
    group = {
        "ref_logprobs": [torch.tensor([-1.0, -torch.inf, -2.0])],
        "rollout_logprobs": [torch.tensor([-1.5, 0.0, -1.0])],
        MASK: [torch.tensor([True, False, True])],
    }
    named = NamedAlgorithm("distillation", Distillation())
    assert named.credit(group)["advantage"][0].tolist() == [0.5, 0.0, -1.0]  # type: ignore[index]
    with pytest.raises(AlgorithmError, match="finite"):
        named.credit({name: group[name] for name in ("ref_logprobs", "rollout_logprobs")})


def test_a_mask_that_trains_an_observation_is_refused() -> None:
    rows, versions, _ = drawn(3)
    masks = [torch.tensor([True] * len(row["response_ids"])) for row in rows]
    masks[2] = torch.cat([masks[2], torch.tensor([False, False])])
    batch = with_observations(rows, versions, masks, 3)
    TrainBatch(batch, algorithm_named("sft"))
    batch[MASK].values()[:] = True
    with pytest.raises(ValueError, match="loss_mask: row 2 trains 2 tokens of version -1"):
        TrainBatch(batch, algorithm_named("sft"))


def test_a_row_that_is_not_trained_is_left_out_beside_the_observations() -> None:
    rows, versions, masks = drawn(5)
    batch = with_observations(rows, versions, masks, 5)
    batch[ROW_MASK] = torch.tensor([True, False, True, True, False, True])
    whole = TrainBatch(batch, algorithm_named("sft"))
    expected = [
        len(row["response_ids"]) if is_in else 0
        for row, is_in in zip(rows, batch[ROW_MASK].tolist(), strict=True)
    ]
    assert whole.trained.tolist() == expected
    assert batch[MASK].values().sum() == sum(len(row["response_ids"]) for row in rows)


# ── the engine ──

GROUPS = [(6, (5, 3)), (1, (4, 4)), (11, (7, 2))]


def engine_rows(name: str) -> tuple[list[Any], list[list[int]], list[torch.Tensor]]:
    rng = random.Random(0)
    rows = unstack(make_batch(GROUPS))
    for at, row in enumerate(rows):
        row["preference"] = torch.tensor(1.0 - 2 * (at % 2))
        row["reward"] = row["advantage"]
        row["log_target"] = row["advantage"]
        row["values"] = row["ref_logprobs"] + 4  # of a critic of its own
        row[TEACHER_IDS] = ((row["response_ids"] + 1) % VOCABULARY).int()
        row[TEACHER_LOGPROBS] = row["ref_logprobs"]
        if name == "distillation":
            row["advantage"] = row["ref_logprobs"] - row["rollout_logprobs"]
    versions = [versions_of(len(row["response_ids"]), rng) for row in rows]
    return rows, versions, masks_of(rows, 1)


def engine_for(algorithm: Any, model: Any) -> Any:
    has_values = "value head" in algorithm.scores.values()
    return engine_of(model, value_head=has_values, token_budget=40)


def critic_of(algorithm: Any) -> Any:
    return TorchCriticEngine(
        tiny_llama(), learning_rate=1e-2, total_steps=10, device="cpu", token_budget=40
    )


def mock_of(algorithm: Any) -> Any:
    return MockTrainEngine(MockTrainOptions(step_seconds=0))


@pytest.mark.parametrize(
    ("name", "engine_of_algorithm"),
    [
        *((name, lambda algorithm: engine_for(algorithm, tiny_llama())) for name in built_in()),
        ("critic", critic_of),
        ("ppo", mock_of),
        ("gspo", mock_of),
    ],
)
def test_an_engine_trains_the_same_bits_whatever_an_observations_columns_hold(
    name: str, engine_of_algorithm: Any
) -> None:
    if name == "critic":
        algorithm: Any = PPO(critic="own", kl_reward=0.1).critic_algorithm()
    else:
        algorithm = algorithm_named(name, kl_coef=0.1, response_tokens=9, epochs=1, mini_batches=2)
    rows, versions, masks = engine_rows(name)
    results = []
    for seed in range(2):
        engine = engine_of_algorithm(algorithm)
        batch = with_observations(rows, versions, masks, seed)
        metrics = engine.train_batch(batch, algorithm)
        results.append((metrics, weights_of(engine)))
    assert results[0][0] == results[1][0]
    assert_same_bits(results[0][1], results[1][1])


def blind_llama() -> Any:
    """A model that sees no context: its embeddings are all the same."""
    model: Any = tiny_llama(tied=False)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[:] = weight[0].clone()
    return model


@pytest.mark.parametrize("name", built_in())
def test_without_context_the_step_is_that_of_the_generated_tokens(name: str) -> None:
    # without context, equal tokens of a row have equal covariances but for rounding, which then
    # decides which of them are selected where the share ends among them
    algorithm = algorithm_named(name, kl_coef=0.1, response_tokens=9, epochs=1, cov_share=0.1)
    rows, versions, masks = engine_rows(name)
    steps = []
    for batch in (with_observations(rows, versions, masks, 0), aged(rows, versions)):
        steps.append(gradients_of_step(engine_for(algorithm, blind_llama()), batch, algorithm))
    (gradients, metrics), (expected, alone) = steps
    # observations are fed: that they are is in the gradient of their embeddings
    for each in (gradients, expected):
        each["model.embed_tokens.weight"] = each["model.embed_tokens.weight"].sum(0)
    scale = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    for key, gradient in expected.items():  # those of queries and keys are 0 but for the rounding
        assert (gradients[key] - gradient).norm() < 1e-5 * scale, key
    assert metrics["fed_tokens"] > alone["fed_tokens"]
    measured_names = alone.keys() - {"fed_tokens", "grad_norm"}  # the norm has the embeddings'
    assert {key: metrics[key] for key in measured_names} == pytest.approx(
        {key: alone[key] for key in measured_names}, rel=1e-4, abs=1e-6
    )
    if isinstance(algorithm, PolicyGradient):
        assert {"gap_mean", "gap_max", "ess", "entropy"} <= metrics.keys()
