"""Tokens that ``loss_mask`` leaves out: a batch with them is the batch without them, for every
algorithm; and by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from pipeline.data.columns import Packed
from stages.algorithms import Algorithm, Drop, TokenBatch, build_algorithm
from stages.algorithms.batch import TrainBatch
from stages.algorithms.policy_gradient.base import PROXIMAL, PolicyGradient
from stages.algorithms.registry import built_in
from stages.algorithms.supervised.dpo import DPO
from stages.algorithms.supervised.kto import NOW
from stages.engines.torch.train import TorchTrainEngine
from stages.flow.catalogue import AGE, TEACHER_IDS, TEACHER_LOGPROBS, TOKEN_STALENESS
from stages.training.token_versions import staleness_of
from tests.batches import make_batch, stack, unstack
from tests.stages.engines.torch.test_train import engine_of, tiny_llama

RAGGED = (
    *("rollout_logprobs", "ref_logprobs", PROXIMAL, NOW, "values", "now", "entropy"),
    TEACHER_LOGPROBS,
)


def rows_of(seed: int, lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [
        {
            "response_ids": torch.zeros(length, dtype=torch.int64),
            **{name: torch.randn(length, generator=draw).double() * 0.5 - 1 for name in RAGGED},
            TEACHER_IDS: torch.randint(0, 40, (length,), generator=draw, dtype=torch.int32),
            TOKEN_STALENESS: torch.randint(0, 5, (length,), generator=draw),
            AGE: torch.randint(0, 5, (length,), generator=draw),
            "reward": torch.randn((), generator=draw),
            "advantage": torch.randn((), generator=draw),
            "preference": torch.tensor(float(place % 2)),
            "staleness": torch.tensor(place),
        }
        for place, length in enumerate(lengths)
    ]


def measured(algorithm: Algorithm, batch: TensorDict) -> dict[str, float]:
    """The loss of the whole batch as one micro-batch, its gradient's norm, and all metrics."""
    scored = [
        name
        for name in (PROXIMAL, NOW, "values")
        if name in algorithm.loss_reads and name in algorithm.scores
    ]
    train_batch = TrainBatch(
        batch, algorithm, computed={name: Packed.of(batch[name]).values for name in scored}
    )
    now = torch.cat(list(batch["now"].unbind())).requires_grad_()
    count = len(batch)
    tokens = train_batch.tokens(
        range(count),
        [at // 2 for at in range(count)],
        torch.stack([now, 0.7 * now - 1], 1) if algorithm.candidates else now,
        torch.cat(list(batch["entropy"].unbind())),
        torch.cat(list(batch["values"].unbind())) * 0.5,
        total_tokens=int(train_batch.trained.sum()),
        total_rows=int((train_batch.trained > 0).sum()),
        total_groups=count // 2,
    )
    out = algorithm.loss(tokens)
    out.loss.backward()
    assert now.grad is not None
    assert not now.grad[~train_batch.is_trained].any()
    metrics = {
        name: float(value) for name, value in {**out.metrics, **tokens.behaviour_gap()}.items()
    }
    assert tokens.entropy is not None
    return {
        "loss": out.loss.item(),
        "grad": float(now.grad.norm()),
        "entropy": tokens.entropy.mean().item(),
        **algorithm.finish(metrics),
    }


@pytest.mark.parametrize(
    "name", [name for name, algorithm in built_in().items() if algorithm.unit == "row"]
)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    level=st.sampled_from(["token", "geometric", "sequence"]),
    proximal=st.sampled_from(["rollout", "recomputed", "interpolated"]),
    normalization=st.sampled_from(["token", "sequence", "constant"]),
)
def test_a_batch_with_tokens_left_out_is_the_batch_without_them(
    name: str, seed: int, level: str, proximal: str, normalization: str
) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {}
    if issubclass(built_in()[name], PolicyGradient):
        options = {
            "ratio_level": level,
            "correction_level": level,
            "proximal": proximal,
            "mini_batches": 2,
        }
        options |= {
            "correction": "mask",
            "kl_coef": 0.1,
            "kl_weighted": True,
            "loss_normalization": normalization,
        }
        options |= {"response_tokens": 9}
    if "top_k" in built_in()[name].model_fields:
        options = {"top_k": 1}  # a value a token, as in other columns
    algorithm = build_algorithm(name, options)
    lengths = [rng.randint(1, 8) for _ in range(6)]
    masks = [torch.tensor([rng.random() < 0.6 for _ in range(length)]) for length in lengths]
    masks[0][0] = masks[2][-1] = True
    masks[1][:] = False  # a whole response
    rows = rows_of(seed, lengths)
    if name == "distillation":
        rows = [row | {"advantage": row["ref_logprobs"] - row["rollout_logprobs"]} for row in rows]
    whole = stack([row | {"loss_mask": mask} for row, mask in zip(rows, masks, strict=True)])
    alone = stack(
        [
            {key: value[mask] if value.ndim else value for key, value in row.items()}
            for row, mask in zip(rows, masks, strict=True)
            if mask.any()
        ]
    )
    assert measured(algorithm, whole) == pytest.approx(
        measured(algorithm, alone), rel=1e-6, abs=1e-9
    )


def test_ratios_of_a_response_are_of_its_trained_tokens() -> None:
    """By hand: log-ratios 0.1, (9), 0.3 give the product exp(0.4) and the geometric mean
    exp(0.2)."""
    for level, log_ratio in (("sequence", 0.4), ("geometric", 0.2)):
        algorithm = build_algorithm(
            "grpo", {"ratio_level": level, "clip_high": 9.0, "correction": "none"}
        )
        row = {
            "response_ids": torch.zeros(3).long(),
            "rollout_logprobs": torch.tensor([-1.1, -10.0, -1.3]),
        }
        row |= {"advantage": torch.tensor(1.0), "loss_mask": torch.tensor([True, False, True])}
        batch = TrainBatch(stack([row]), algorithm)
        now = torch.tensor([-1.0, -1.0, -1.0])
        out = algorithm.loss(
            batch.tokens([0], [0], now, total_tokens=2, total_rows=1, total_groups=1)
        )
        assert out.loss.item() == pytest.approx(-float(torch.tensor(log_ratio).exp()), rel=1e-6)
        assert out.metrics["max_ratio"].item() == pytest.approx(
            float(torch.tensor(log_ratio).exp()), rel=1e-6
        )


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        # Tokens: 1 four times, 0 once, 3 once: mean 7/6, mean of squares 13/6.
        ("tokens", [(x - 7 / 6) / (13 / 6 - 49 / 36) ** 0.5 for x in (1.0, 0.0, 3.0)]),
        # Rows: 1, 0, 3: mean 4/3, mean of squares 10/3.
        ("rows", [(x - 4 / 3) / (10 / 3 - 16 / 9) ** 0.5 for x in (1.0, 0.0, 3.0)]),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_reinforce_pp_whitens_over_trained_tokens_or_rows(
    over: str, expected: list[float], ranks: int
) -> None:
    masks = [[1, 1, 0, 1, 1], [1, 0], [0, 1], [0, 0, 0]]
    advantages = [1.0, 0.0, 3.0, 1000.0]  # nothing of the last one is trained
    rows = [
        {
            "response_ids": torch.zeros(len(mask)).long(),
            "rollout_logprobs": torch.zeros(len(mask)),
            "advantage": torch.tensor(advantage).double(),
            "loss_mask": torch.tensor(mask).bool(),
        }
        for mask, advantage in zip(masks, advantages, strict=True)
    ]
    algorithm = build_algorithm("reinforce_pp", {"whiten_over": over})
    shares = [rows] if ranks == 1 else [rows[:1], rows[1:]]
    sums: list[list[torch.Tensor]] = [[] for _ in shares]

    def whitened() -> list[float]:
        """Of all ranks: each adds to its sums what all of them have given so far."""
        found: list[float] = []
        for own, share in zip(sums, shares, strict=True):
            calls = iter(range(2))

            def total(
                values: torch.Tensor, own: list[torch.Tensor] = own, calls: Any = calls
            ) -> torch.Tensor:
                at = next(calls)
                own[at:] = [values]
                return sum(
                    (other[at] for other in sums if other is not own and len(other) > at), values
                )

            found += TrainBatch(stack(share), algorithm, total)["advantage"].tolist()
        return found

    # until each rank has been told the others' sums, the second one by the right mean
    for _ in range(4):
        found = whitened()
    assert found[:3] == pytest.approx(expected, rel=1e-6)
    assert build_algorithm("reinforce_pp", {}).whiten_over == "tokens"  # type: ignore[attr-defined]


# ── preference pairs ──


def pair_tokens(
    algorithm: DPO, rows: list[tuple[int, float, list[float], list[float]]], groups: int
) -> TokenBatch:
    """Rows (group, preference, logprobs, reference logprobs); one without logprobs is masked
    whole."""
    counts = torch.tensor([len(row[2]) for row in rows])
    now, ref = (
        torch.tensor([x for row in rows for x in row[at]], dtype=torch.float64) for at in (2, 3)
    )
    preference = torch.tensor([row[1] for row in rows], dtype=torch.float64)
    row = torch.arange(len(rows)).repeat_interleave(counts)
    columns = {"ref_logprobs": ref, "preference": preference[row]}
    return TokenBatch(
        now.requires_grad_(),
        columns,
        row,
        counts,
        int(counts.sum()),
        int((counts > 0).sum()),
        groups,
        rows={"preference": preference},
        group=torch.tensor([row[0] for row in rows]),
    )


@pytest.mark.parametrize("loss_type", ["ipo", "sigmoid"])
@pytest.mark.parametrize("masked", [("chosen",), ("rejected",), ("chosen", "rejected")])
@pytest.mark.parametrize("pairs", ["best_worst", "all"])
def test_a_pair_with_a_masked_response_teaches_nothing(
    loss_type: Any, masked: tuple[str, ...], pairs: Any
) -> None:
    algorithm = DPO(loss_type=loss_type, pairs=pairs)
    whole = [(0, 1.0, [-1.0, -2.0], [-1.5, -2.5]), (0, -1.0, [-3.0], [-2.0])]
    half = [
        (1, 1.0, *(([], []) if "chosen" in masked else ([-1.0], [-9.0]))),
        (1, -1.0, *(([], []) if "rejected" in masked else ([-1.0], [-9.0]))),
    ]
    expected = algorithm.loss(pair_tokens(algorithm, whole, 1))  # type: ignore[arg-type]
    tokens = pair_tokens(algorithm, [*whole, *half], 1)  # type: ignore[list-item]
    output = algorithm.loss(tokens)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected.loss.item())
    assert {n: v.item() for n, v in output.metrics.items()} == pytest.approx(
        {n: v.item() for n, v in expected.metrics.items()}
    )
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.isfinite().all()
    assert tokens.logprobs.grad[:3].all()
    assert not tokens.logprobs.grad[3:].any()
    alone = pair_tokens(algorithm, half, 1)  # type: ignore[arg-type]
    if len(alone.logprobs):  # a micro-batch of this pair alone
        nothing = algorithm.loss(alone)
        nothing.loss.backward()
        assert nothing.loss.item() == 0
        assert all(value.item() == 0 for value in nothing.metrics.values())


@pytest.mark.parametrize("loss_type", ["ipo", "sigmoid"])
@pytest.mark.parametrize("budget", [None, 8])
def test_the_engine_trains_as_if_such_pairs_were_not_there(
    loss_type: Any, budget: int | None
) -> None:
    lengths = [(3, (4, 2)), (2, (3, 3)), (4, (1, 5)), (2, (2, 2))]
    rows = unstack(make_batch(lengths))
    for at, row in enumerate(rows):
        row |= {
            "preference": torch.tensor(1.0 - 2 * (at % 2)),
            "loss_mask": torch.ones(len(row["response_ids"])).bool(),
        }
    rows[2]["loss_mask"][:] = False  # of the second pair the better one
    rows[5]["loss_mask"][:] = False  # of the third the worse one
    rows[6]["loss_mask"][:], rows[7]["loss_mask"][:] = False, False
    found = []
    for chosen in (rows, rows[:2]):
        engine: TorchTrainEngine = engine_of(tiny_llama(), token_budget=budget)
        metrics = engine.train_batch(stack(chosen), DPO(loss_type=loss_type))
        found.append((metrics, {name: value.clone() for name, value in engine.weights()}))
    (metrics, weights), (expected, right) = found
    for name in ("loss", "grad_norm", "preference_accuracy", "reward_margin", "chosen_logprob"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5), name
    for name, value in right.items():
        # by norms: AdamW makes a whole step of a single gradient that is next to nothing
        assert (weights[name] - value).norm() <= 1e-5 * value.norm(), name


def test_a_pair_is_chosen_among_responses_with_a_trained_token() -> None:
    rewards = torch.tensor([1.0, 0.75, 0.5, 0.0])
    ones = torch.ones(3).bool()
    none = torch.zeros(3).bool()
    made = DPO().credit({"reward": rewards, "loss_mask": [none, ones, ones, ones]})
    assert not isinstance(made, Drop)
    assert made["preference"].tolist() == [0.0, 1.0, 0.0, -1.0]
    made = DPO().credit({"reward": rewards, "loss_mask": [ones, ones, ones, none]})
    assert not isinstance(made, Drop)
    assert made["preference"].tolist() == [1.0, 0.0, -1.0, 0.0]
    assert DPO().credit({"reward": rewards, "loss_mask": [none, none, ones, none]}) == Drop(
        "nothing to compare"
    )


# ── the age of each token ──


def test_each_token_is_interpolated_by_its_own_version() -> None:
    """A-3PO: a response of four stretches, of versions 1, 5, 6 and 7, in the step of version 7:
    shares 1/6, 1/2, 1, 0."""
    versions = Packed(torch.tensor([1, 2, 5, 1, 6, 1, 7, 2]), torch.tensor([0, 8]))
    stale = staleness_of(versions, 7)[0].values
    assert stale.tolist() == [6, 6, 2, 1, 0, 0]
    algorithm = build_algorithm(
        "grpo", {"proximal": "interpolated", "correction": "truncate", "weight_high": 100.0}
    )
    assert algorithm.loss_reads[TOKEN_STALENESS] == "int64 ragged"
    rollout = torch.full((6,), -2.0).double()
    now = torch.full((6,), -1.0).double().requires_grad_()
    row = {
        "response_ids": torch.zeros(6).long(),
        "rollout_logprobs": rollout,
        TOKEN_STALENESS: stale,
    }
    batch = TrainBatch(stack([row | {"advantage": torch.tensor(1.0).double()}]), algorithm)
    out = algorithm.loss(batch.tokens([0], [0], now, total_tokens=6, total_rows=1, total_groups=1))
    shares = [1 / 6, 1 / 6, 1 / 2, 1.0, 0.0, 0.0]
    weights = [
        float(torch.tensor(1 - share).exp()) for share in shares
    ]  # proximal / rollout, as their logs differ by 1
    assert out.metrics["weight_mean"].item() == pytest.approx(sum(weights) / 6)
    # current / proximal, clipped at 1.2
    ratios = [float(torch.tensor(share).exp()) for share in shares]
    gains = [weight * min(ratio, 1.2) for weight, ratio in zip(weights, ratios, strict=True)]
    assert out.loss.item() == pytest.approx(-sum(gains) / 6)
