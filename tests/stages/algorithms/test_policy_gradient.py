"""Every policy-gradient algorithm against formulas written out in plain float64 Python, and against
TRL's own loss."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms import Algorithm, Drop, TokenBatch, build_algorithm
from stages.algorithms.policy_gradient.base import PROXIMAL, PolicyGradient
from stages.algorithms.policy_gradient.gated import SAPO
from stages.algorithms.policy_gradient.selected import KLCov
from stages.algorithms.registry import built_in
from stages.algorithms.token_batch import MOST_LOG_RATIO
from stages.flow.catalogue import TOKEN_STALENESS

# now, rollout, ref, proximal: a float a token, staleness: an int a token; advantage; weight
Row = dict[str, Any]
LEVELS = ("token", "geometric", "sequence")


def random_rows(seed: int, rows: int, spread: float) -> list[Row]:
    rng = random.Random(seed)
    made = []
    for _ in range(rows):
        now = [rng.uniform(-4, -0.1) for _ in range(rng.randint(1, 7))]
        near: dict[str, Any] = {
            name: [x + rng.gauss(0, spread) for x in now] for name in ("rollout", "ref", "proximal")
        }
        advantage = rng.choice([0.0, rng.uniform(-2, 2), rng.uniform(-2, 2)])
        staleness = sorted((rng.randint(0, 6) for _ in now), reverse=True)
        made.append(
            {
                "now": now,
                **near,
                "advantage": advantage,
                "staleness": staleness,
                "weight": rng.uniform(0, 2),
                "selected": float(rng.random() < 0.5),
            }
        )
    return made


def pack(rows: list[Row], algorithm: Algorithm, total_rows: int, total_tokens: int) -> TokenBatch:
    """The rows as the loss takes them, with exactly the columns that it declares; a critic has
    nothing to learn."""
    counts = torch.tensor([len(row["now"]) for row in rows])
    row = torch.repeat_interleave(torch.arange(len(rows)), counts)

    def flat(name: str) -> torch.Tensor:
        return torch.tensor([x for each in rows for x in each[name]], dtype=torch.float64)

    def single(name: str) -> torch.Tensor:
        return torch.tensor([each[name] for each in rows], dtype=torch.float64)[row]

    columns = {
        "rollout_logprobs": flat("rollout"),
        "ref_logprobs": flat("ref"),
        PROXIMAL: flat("proximal"),
    }
    columns |= {"advantage": single("advantage"), TOKEN_STALENESS: flat("staleness").long()}
    columns["selected"] = single("selected")
    columns |= {
        name: torch.zeros_like(columns["advantage"]) for name in ("values", "returns", "reward")
    }
    read = {name: column for name, column in columns.items() if name in algorithm.loss_reads}
    now = flat("now").requires_grad_()
    return TokenBatch(
        now,
        read,
        row,
        counts,
        total_tokens,
        total_rows,
        weight=single("weight"),
        values=columns["values"],
    )


def of_level(logs: list[float], level: str) -> list[float]:
    """Log-ratios of one row's tokens at a level."""
    total = sum(logs)
    values = {
        "token": logs,
        "geometric": [total / len(logs)] * len(logs),
        "sequence": [total] * len(logs),
    }[level]
    return [max(-MOST_LOG_RATIO, min(MOST_LOG_RATIO, value)) for value in values]


def reference(algorithm: PolicyGradient, rows: list[Row], now: list[list[float]]) -> float:
    """The loss at the logprobs ``now``; what has no gradient is computed from the rows' own."""
    a = algorithm
    tokens = sum(len(row["now"]) for row in rows)
    total = 0.0
    for row, logprobs in zip(rows, now, strict=True):
        share = {
            "token": 1 / tokens,
            "sequence": 1 / (len(rows) * len(logprobs)),
            "constant": 1 / (len(rows) * a.response_tokens),
        }[a.loss_normalization]
        rollout = row["rollout"]
        proximal = row["rollout"]
        if a.proximal == "recomputed":
            proximal = row["proximal"] if PROXIMAL in a.loss_reads else row["now"]
        elif a.proximal == "interpolated":
            parts = [1 / steps if steps else 0.0 for steps in row["staleness"]]
            proximal = [
                a * r + (1 - a) * n for a, r, n in zip(parts, rollout, row["now"], strict=True)
            ]
        ratios = [
            math.exp(x)
            for x in of_level(
                [n - p for n, p in zip(logprobs, proximal, strict=True)], a.ratio_level
            )
        ]
        held = of_level([n - p for n, p in zip(row["now"], proximal, strict=True)], a.ratio_level)
        centre = row["now"] if a.proximal == "rollout" else proximal
        logs = of_level([c - r for c, r in zip(centre, rollout, strict=True)], a.correction_level)
        level = "sequence" if a.ratio_level == "sequence" else "token"
        aways = map(
            math.exp, of_level([n - r for n, r in zip(logprobs, rollout, strict=True)], level)
        )
        for n, ratio, frozen, ref, weight, away in zip(
            logprobs, ratios, held, row["ref"], map(math.exp, logs), aways, strict=True
        ):
            if a.name in ("cispo", "aipo"):
                gain = min(math.exp(frozen), 1 + a.clip_high) * row["advantage"] * n
            elif a.name == "sapo":
                assert isinstance(a, SAPO)
                steep = a.gate_positive if row["advantage"] > 0 else a.gate_negative
                gain = 4 / steep / (1 + math.exp(-steep * (ratio - 1))) * row["advantage"]
            elif a.name == "m2po":
                gain = row["selected"] * ratio * row["advantage"]
            elif a.name == "kl_cov":
                assert isinstance(a, KLCov)
                gain = ratio * row["advantage"]
                gain -= a.cov_penalty * row["selected"] * abs(math.log(ratio))
            else:
                capped = ratio if a.max_ratio is None else min(ratio, a.max_ratio)
                clipped = max(1 - a.clip_low, min(1 + a.clip_high, ratio))
                gain = min(capped * row["advantage"], clipped * row["advantage"])
                gain *= a.name != "clip_cov" or not row["selected"]
            inside = a.weight_low <= weight <= a.weight_high
            factor = {"none": 1.0, "truncate": min(weight, a.weight_high), "mask": weight * inside}[
                a.correction
            ]
            loss = -gain * (
                float(inside) if a.correction == "mask" and a.proximal == "rollout" else factor
            )
            if a.off_policy_mask is not None:
                drift = [r - n for r, n in zip(rollout, row["now"], strict=True)]
                loss *= row["advantage"] >= 0 or sum(drift) / len(drift) <= a.off_policy_mask
            if a.kl_coef:
                k3 = math.exp(ref - n) - (ref - n) - 1
                loss += a.kl_coef * k3 * (away if a.kl_weighted else 1.0)
            total += loss * share * row["weight"]
    return total


def slopes(algorithm: PolicyGradient, rows: list[Row], step: float = 1e-6) -> list[float]:
    """Central differences of the reference at each token."""
    found = []
    now = [list(row["now"]) for row in rows]
    for row in now:
        for at, value in enumerate(row):
            row[at] = value + step
            above = reference(algorithm, rows, now)
            row[at] = value - step
            found.append((above - reference(algorithm, rows, now)) / (2 * step))
            row[at] = value
    return found


def policy_gradients() -> list[str]:
    return [name for name, algorithm in built_in().items() if issubclass(algorithm, PolicyGradient)]


options = st.fixed_dictionaries(
    {
        "loss_normalization": st.sampled_from(["token", "sequence", "constant"]),
        "ratio_level": st.sampled_from(LEVELS),
        "correction_level": st.sampled_from(LEVELS),
        "kl_coef": st.sampled_from([0.0, 0.3]),
        "kl_weighted": st.booleans(),
        "max_ratio": st.sampled_from([None, 1.5]),
        "off_policy_mask": st.sampled_from([None, 0.01]),
        "mini_batches": st.sampled_from([1, 2]),
        "response_tokens": st.just(1024),
    }
)
corrections = st.sampled_from(
    [("rollout", "none"), ("rollout", "mask")]
    + [(p, c) for p in ("recomputed", "interpolated") for c in ("none", "truncate", "mask")]
)


@pytest.mark.parametrize("name", policy_gradients())
@settings(max_examples=40, deadline=None)
@given(
    chosen=options,
    corrected=corrections,
    seed=st.integers(0, 2**16),
    spread=st.sampled_from([0.0, 0.05, 0.6, 30.0]),
)
def test_loss_and_gradient_are_those_of_the_formulas(
    name: str, chosen: dict[str, Any], corrected: tuple[str, str], seed: int, spread: float
) -> None:
    proximal, correction = corrected
    algorithm = build_algorithm(name, {**chosen, "proximal": proximal, "correction": correction})
    assert isinstance(algorithm, PolicyGradient)
    rows = random_rows(seed, rows=4, spread=spread)
    if spread == 30.0 and (chosen["kl_coef"] or "sequence" in chosen.values()):
        return  # the reference does not clamp what is summed, nor the KL
    tokens = pack(rows, algorithm, len(rows), sum(len(row["now"]) for row in rows))
    output = algorithm.loss(tokens)
    output.loss.backward()

    expected = reference(algorithm, rows, [row["now"] for row in rows])
    assert output.loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    found = tokens.logprobs.grad
    assert found is not None
    assert found.isfinite().all()
    if spread != 30.0:  # differences of numbers as large as exp(20) are noise
        kinks = 1e-4 * (1 + abs(expected))
        torch.testing.assert_close(
            found, torch.tensor(slopes(algorithm, rows)).double(), rtol=1e-5, atol=kinks * 1e-2
        )
    assert all(not value.requires_grad and value.isfinite() for value in output.metrics.values())


@pytest.mark.parametrize("name", policy_gradients())
@settings(max_examples=15, deadline=None)
@given(chosen=options, corrected=corrections, seed=st.integers(0, 2**16), cut=st.integers(0, 6))
def test_micro_batches_add_up_to_the_batch(
    name: str, chosen: dict[str, Any], corrected: tuple[str, str], seed: int, cut: int
) -> None:
    proximal, correction = corrected
    algorithm = build_algorithm(name, {**chosen, "proximal": proximal, "correction": correction})
    rows = random_rows(seed, rows=6, spread=0.4)
    total = sum(len(row["now"]) for row in rows)
    once = algorithm.loss(pack(rows, algorithm, 6, total))
    parts = [
        algorithm.loss(pack(part, algorithm, 6, total)) for part in (rows[:cut], rows[cut:]) if part
    ]
    assert sum(part.loss.item() for part in parts) == pytest.approx(
        once.loss.item(), rel=1e-9, abs=1e-12
    )
    for metric, value in once.metrics.items():
        values = [part.metrics[metric].item() for part in parts]
        assert (max if metric.startswith("max_") else sum)(values) == pytest.approx(
            value.item(), rel=1e-9, abs=1e-12
        )


REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.25])


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("dr_grpo", {}, [0.5625, -0.4375, 0.0625, -0.1875]),
        ("rloo", {}, [1.0 - 0.25, -1.75 / 3, 0.5 - 1.25 / 3, 0.25 - 0.5]),
        ("reinforce_pp", {}, [1.0, 0.0, 0.5, 0.25]),
        ("reinforce_pp", {"baseline": "group"}, [0.5625, -0.4375, 0.0625, -0.1875]),
    ],
)
def test_credit(name: str, options: dict[str, Any], expected: list[float]) -> None:
    made = build_algorithm(name, options).credit({"reward": REWARDS})
    assert not isinstance(made, Drop)
    assert made["advantage"].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["dr_grpo", "reinforce_pp", "dapo", "gdpo"])
def test_rewards_are_lowered_by_the_divergence_from_the_reference(
    name: str, masked: bool, estimator: str
) -> None:
    options: dict[str, Any] = {"kl_reward": 0.1, "kl_reward_estimator": estimator}
    algorithm = build_algorithm(name, options)
    away = [[0.5, -0.2, 0.1], [1.0, 0.3]]
    masks = [[True, True, not masked], [not masked, True]]
    group: dict[str, Any] = {
        "reward": torch.tensor([1.0, 0.0]),
        "scores": torch.tensor([[1.0], [0.0]]),
        "rollout_logprobs": [torch.tensor(row) - 2 for row in away],
        "ref_logprobs": [torch.full((len(row),), -2.0) for row in away],
    }
    assert {"rollout_logprobs", "ref_logprobs"} <= algorithm.credit_reads.keys()
    assert algorithm.scores["ref_logprobs"] == "frozen model"
    group = {key: group[key] for key in algorithm.credit_reads}
    if masked:
        assert "loss_mask" in algorithm.credit_optional
        group["loss_mask"] = [torch.tensor(row) for row in masks]

    def kl(x: float) -> float:
        return {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[estimator]

    penalties = [
        0.1 * sum(kl(x) for x, stays in zip(row, mask, strict=True) if stays)
        for row, mask in zip(away, masks, strict=True)
    ]
    made = algorithm.credit(group)
    assert not isinstance(made, Drop)
    plain = build_algorithm(name, {})
    without = plain.credit({key: group[key] for key in plain.credit_reads})
    assert not isinstance(without, Drop)
    if name == "dapo":  # normalises the lowered rewards
        lowered = [1 - penalties[0], -penalties[1]]
        half = (lowered[0] - lowered[1]) / 2
        expected = [half / (2**0.5 * half + 1e-4), -half / (2**0.5 * half + 1e-4)]
    else:
        expected = [a - b for a, b in zip(without["advantage"].tolist(), penalties, strict=True)]
        if name == "dr_grpo":
            expected = [value + sum(penalties) / 2 for value in expected]
    assert made["advantage"].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("length", "penalty"), [(10, 0.0), (80, 0.0), (85, 0.25), (90, 0.5), (100, 1.0), (130, 1.0)]
)
def test_dapo_lowers_the_reward_of_overlong_responses(length: int, penalty: float) -> None:
    dapo = build_algorithm(
        "dapo", {"longest_response": 100, "overlong_tokens": 20, "scale_rewards": False}
    )
    assert dapo.credit_reads["response_ids"] == "int64 ragged"
    lengths = [length, 10, 10, 10]
    made = dapo.credit(
        {"reward": REWARDS, "response_ids": [torch.zeros(n, dtype=torch.int64) for n in lengths]}
    )
    assert not isinstance(made, Drop)
    shaped = [1.0 - penalty, 0.0, 0.5, 0.25]
    assert made["advantage"].tolist() == pytest.approx(
        [r - sum(shaped) / 4 for r in shaped], abs=1e-6
    )


@pytest.mark.parametrize(
    ("rewards", "drop_by", "advantage"),
    [
        ([0.0, 1.0], "correctness", [0.0, 0.0]),  # one is right: Eq. 11 keeps the group
        ([0.0, 1.0], "penalized", None),
        # all are right: Eq. 11 drops it, whatever their lengths are
        ([1.0, 1.0], "correctness", None),
        ([1.0, 1.0], "penalized", [0.5, -0.5]),
        ([1.0, 0.5], "correctness", [0.75, -0.75]),
        ([1.0, 0.5], "penalized", [0.75, -0.75]),
    ],
)
def test_dapo_drops_groups_by_correctness_or_by_the_penalized_reward(
    rewards: list[float], drop_by: str, advantage: list[float] | None
) -> None:
    dapo = build_algorithm(
        "dapo", {"longest_response": 4, "drop_by": drop_by, "scale_rewards": False}
    )
    ids = [torch.zeros(n, dtype=torch.int64) for n in (1, 4)]  # the second one loses 1
    made = dapo.credit({"reward": torch.tensor(rewards), "response_ids": ids})
    if advantage is None:
        assert made == Drop("equal rewards")
        assert isinstance(made, Drop)
        assert made.instead is not None
        assert made.instead["advantage"].tolist() == [0.0, 0.0]
    else:
        assert not isinstance(made, Drop)
        assert made["advantage"].tolist() == pytest.approx(advantage)
    assert build_algorithm("dapo", {}).drop_by == "correctness"  # type: ignore[attr-defined]


def test_dapo_counts_the_tokens_that_loss_mask_leaves() -> None:
    """A tool's output of 20 tokens is no length of the response."""
    dapo = build_algorithm(
        "dapo", {"longest_response": 10, "overlong_tokens": 5, "scale_rewards": False}
    )
    assert dapo.credit_optional == {"loss_mask": "bool ragged"}
    masks = [torch.tensor([True] * 8 + [False] * 20), torch.ones(5, dtype=torch.bool)]
    ids = [torch.zeros(len(mask), dtype=torch.int64) for mask in masks]
    group = {"reward": torch.tensor([1.0, 0.0]), "response_ids": ids}
    penalty = 3 / 5  # of the 5 tokens before 10, 8 - 5 are used up
    made = dapo.credit({**group, "loss_mask": masks})
    assert not isinstance(made, Drop)
    assert made["advantage"].tolist() == pytest.approx([(1 - penalty) / 2, -(1 - penalty) / 2])
    unmasked = dapo.credit(group)
    assert not isinstance(unmasked, Drop)
    assert unmasked["advantage"].tolist() == [0.0, 0.0]  # 1 - 1 against 0


def test_truncation_where_the_ratio_has_the_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"correction\n  has nothing to truncate"):
        build_algorithm("grpo", {"correction": "truncate"})


# TRL's own functions, on the same logprobs. They are methods of trainers, called with a stand-in
# for the trainer.
TRL_CASES = [
    ("grpo", {"loss_normalization": "sequence"}, {"loss_type": "grpo"}),
    (
        "grpo",
        {"loss_normalization": "sequence", "kl_coef": 0.1},
        {"loss_type": "grpo", "beta": 0.1},
    ),
    (
        "grpo",
        {"kl_coef": 0.1, "kl_weighted": True},
        {"loss_type": "bnpo", "beta": 0.1, "bias_correction": True},
    ),
    (
        "grpo",
        {"max_ratio": 1.5, "clip_high": 0.28},
        {"loss_type": "bnpo", "delta": 1.5, "epsilon_high": 0.28},
    ),
    ("dr_grpo", {"response_tokens": 7}, {"loss_type": "dr_grpo"}),
    ("dapo", {}, {"loss_type": "bnpo", "epsilon_high": 0.28}),
    (
        "gspo",
        {},
        {"loss_type": "grpo", "level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    ("cispo", {}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    ("rloo", {}, {}),
    ("sapo", {}, {"loss_type": "sapo"}),
    ("grpo", {"off_policy_mask": 0.02}, {"loss_type": "bnpo", "off_policy_mask": 0.02}),
    ("grpo", {"entropy_coef": 0.3}, {"loss_type": "bnpo", "entropy_coef": 0.3}),
]


@pytest.mark.parametrize(("name", "options", "trl_options"), TRL_CASES)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_trl(
    name: str, options: Any, trl_options: Any, seed: int
) -> None:
    trainers = pytest.importorskip("trl.trainer", reason="pip install 'asyncdock[bench]'")
    rows = [row | {"weight": 1.0} for row in random_rows(seed, rows=6, spread=0.3)]
    algorithm = build_algorithm(name, options)
    tokens = pack(rows, algorithm, 6, sum(len(row["now"]) for row in rows))
    tokens = replace(tokens, entropy=tokens.logprobs.square())
    output = algorithm.loss(tokens)
    output.loss.backward()

    longest = max(len(row["now"]) for row in rows)
    mask = torch.tensor(
        [[1.0] * len(row["now"]) + [0.0] * (longest - len(row["now"])) for row in rows]
    ).double()

    def padded(column: str) -> torch.Tensor:
        return torch.tensor(
            [row[column] + [0.0] * (longest - len(row[column])) for row in rows],
            dtype=torch.float64,
        )

    now = torch.tensor(
        [row["now"] + [0.0] * (longest - len(row["now"])) for row in rows], dtype=torch.float64
    )
    now.requires_grad_()
    entropies = now.square()
    wanted = {
        "loss_type": "grpo",
        "beta": 0.0,
        "level": "token",
        "delta": None,
        "bias_correction": False,
        "off_policy_mask": None,
        "entropy_coef": 0.0,
        **trl_options,
    }
    gathered = SimpleNamespace(
        gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, sync_gradients=True
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (now, entropies, None),
        args=SimpleNamespace(
            use_bias_correction_kl=wanted["bias_correction"],
            delta=wanted["delta"],
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            use_adaptive_entropy=False,
        ),
        epsilon_low=wanted.get("epsilon_low", 0.2),
        epsilon_high=wanted.get("epsilon_high", 0.2),
        importance_sampling_level=wanted["level"],
        loss_type=wanted["loss_type"],
        beta=wanted["beta"],
        max_completion_length=7,
        accelerator=gathered,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
        maybe_activation_offload_context=nullcontext(),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=wanted["off_policy_mask"],
        get_off_policy_mask=trainers.GRPOTrainer.get_off_policy_mask,
        use_vllm=False,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=wanted["entropy_coef"] > 0,
        entropy_coef=wanted["entropy_coef"],
    )
    inputs = {
        "prompt_ids": torch.zeros(6, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(6, 1),
        "completion_ids": torch.zeros_like(mask, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": torch.tensor([row["advantage"] for row in rows], dtype=torch.float64),
        "old_per_token_logps": padded("rollout"),
        "old_logps": (padded("rollout") * mask).sum(1),
        "ref_per_token_logps": padded("ref"),
        "num_items_in_batch": mask.sum(),
    }
    owner = trainers.RLOOTrainer if name == "rloo" else trainers.GRPOTrainer
    torch.set_default_dtype(torch.float64)  # TRL's constants, as SAPO's temperatures, are of it
    try:
        expected = owner._compute_loss(trainer, None, inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    expected.backward()
    assert now.grad is not None
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-9)
    torch.testing.assert_close(tokens.logprobs.grad, now.grad[mask.bool()], rtol=1e-6, atol=1e-9)


def test_auto_picks_a_correction_by_the_staleness_bound() -> None:
    plain = build_algorithm("grpo", {"correction": "none"})
    for bound in (0, 1, 2):
        picked, why = build_algorithm("grpo", {}).under(bound)
        assert picked == plain
        assert f"η = {bound}" in why
    for name, level in (("grpo", "token"), ("gspo", "geometric"), ("rloo", "sequence")):
        picked, why = build_algorithm(name, {"correction": "auto"}).under(3)
        chosen = {"correction": "truncate", "proximal": "interpolated", "correction_level": level}
        assert picked == build_algorithm(name, chosen)
        assert all(f"{key} = {value}" in why for key, value in chosen.items())
    assert build_algorithm("grpo", {"proximal": "recomputed"}).under(4)[0].proximal == "recomputed"
    for correction in ("none", "mask"):
        chosen = build_algorithm("grpo", {"correction": correction})
        assert chosen.under(8) == (chosen, "")


def test_what_is_reported_of_old_samples_does_not_depend_on_the_proximal_policy() -> None:
    rows = random_rows(3, 5, 0.4)
    tokens = sum(len(row["now"]) for row in rows)
    found = {}
    for proximal in ("rollout", "recomputed"):
        algorithm = build_algorithm("grpo", {"proximal": proximal})
        out = algorithm.loss(pack(rows, algorithm, len(rows), tokens))
        metrics = algorithm.finish({name: float(value) for name, value in out.metrics.items()})
        found[proximal] = {
            name: metrics[name] for name in ("ess", "kl_behaviour", "ratio_mean", "max_ratio")
        }
    assert found["recomputed"] == pytest.approx(found["rollout"])
    assert found["recomputed"]["ess"] < 0.95
