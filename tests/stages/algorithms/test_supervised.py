"""SFT and DPO against formulas in plain float64 Python, and DPO against TRL's own loss."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from stages.algorithms import Drop, TokenBatch, build_algorithm
from stages.algorithms.batch import TrainBatch
from stages.algorithms.supervised.dpo import DPO
from stages.algorithms.supervised.kto import KTO, NOW

Row = dict[str, Any]  # now, ref: a float a token; group, preference


def random_groups(seed: int, groups: int, size: int = 2, spread: float = 2.0) -> list[Row]:
    rng = random.Random(seed)
    rows = []
    for group in range(groups):
        for place in range(size):
            now = [rng.uniform(-4, -0.1) for _ in range(rng.randint(1, 6))]
            ref = [x + rng.gauss(0, spread) for x in now]
            rows.append({"now": now, "ref": ref, "group": group, "preference": float(size - place)})
    return rows


def pack(rows: list[Row], total_groups: int) -> TokenBatch:
    counts = torch.tensor([len(row["now"]) for row in rows])
    row = torch.repeat_interleave(torch.arange(len(rows)), counts)
    flat = {
        n: torch.tensor([x for each in rows for x in each[n]], dtype=torch.float64)
        for n in ("now", "ref")
    }
    preference = torch.tensor([each["preference"] for each in rows], dtype=torch.float64)
    numbers = sorted({each["group"] for each in rows})
    return TokenBatch(
        logprobs=flat["now"].requires_grad_(),
        columns={"ref_logprobs": flat["ref"], "preference": preference[row]},
        row=row,
        row_tokens=counts,
        total_tokens=int(counts.sum()),
        total_rows=len(rows),
        total_groups=total_groups,
        rows={"preference": preference},
        group=torch.tensor([numbers.index(each["group"]) for each in rows]),
    )


def reference(algorithm: DPO, rows: list[Row], now: list[list[float]]) -> float:
    total = 0.0
    groups = {row["group"] for row in rows}
    for group in groups:
        of = [
            (row, logprobs)
            for row, logprobs in zip(rows, now, strict=True)
            if row["group"] == group
        ]
        ratios = [
            sum(a - b for a, b in zip(logprobs, row["ref"], strict=True)) for row, logprobs in of
        ]
        pairs = [
            (i, j)
            for i in range(len(of))
            for j in range(len(of))
            if of[i][0]["preference"] > of[j][0]["preference"]
        ]
        if algorithm.pairs == "best_worst":
            pairs = [
                (i, j)
                for i, j in pairs
                if of[i][0]["preference"] == 1 and of[j][0]["preference"] == -1
            ]
        for i, j in pairs:
            means = [sum(of[at][1]) / len(of[at][1]) for at in (i, j)]
            if algorithm.name == "orpo":
                odds = [mean - math.log(1 - math.exp(mean)) for mean in means]
                apart = odds[0] - odds[1]
                loss = -means[0] + algorithm.beta * math.log(1 + math.exp(-apart))
            elif algorithm.loss_type == "ipo":
                gap = ratios[i] / len(of[i][1]) - ratios[j] / len(of[j][1])
                loss = (gap - 1 / (2 * algorithm.beta)) ** 2
            else:
                if algorithm.name == "simpo":
                    gap = means[0] - means[1]
                elif algorithm.length_normalized:
                    gap = ratios[i] / len(of[i][1]) - ratios[j] / len(of[j][1])
                else:
                    gap = ratios[i] - ratios[j]
                x = algorithm.beta * gap - algorithm.margin
                smooth = algorithm.label_smoothing
                loss = -(1 - smooth) * math.log(1 / (1 + math.exp(-x))) - smooth * math.log(
                    1 / (1 + math.exp(x))
                )
            total += loss / len(pairs) / len(groups)
    return total


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(["dpo", "simpo", "orpo"]),
    normalized=st.booleans(),
    seed=st.integers(0, 2**16),
    loss_type=st.sampled_from(["sigmoid", "ipo"]),
    pairs=st.sampled_from(["best_worst", "all"]),
    size=st.integers(2, 4),
    beta=st.sampled_from([0.05, 0.5]),
    margin=st.sampled_from([0.0, 0.7]),
    smoothing=st.sampled_from([0.0, 0.2]),
)
def test_loss_and_gradient_are_those_of_the_formulas(
    name: str,
    normalized: bool,
    seed: int,
    loss_type: Any,
    pairs: Any,
    size: int,
    beta: float,
    margin: float,
    smoothing: float,
) -> None:
    options = {"beta": beta, "margin": margin, "label_smoothing": smoothing, "pairs": pairs}
    if name == "dpo":
        options |= {"loss_type": loss_type, "length_normalized": normalized}
    algorithm = build_algorithm(name, options)
    assert isinstance(algorithm, DPO)
    rows = random_groups(seed, groups=3, size=size)
    if pairs == "best_worst":
        rows = [
            row | {"preference": {size: 1.0, 1: -1.0}.get(row["preference"], 0.0)} for row in rows
        ]
    tokens = pack(rows, 3)
    output = algorithm.loss(tokens)
    output.loss.backward()
    now = [list(row["now"]) for row in rows]
    assert output.loss.item() == pytest.approx(reference(algorithm, rows, now), rel=1e-6, abs=1e-9)
    expected = []
    for row in now:
        for at, value in enumerate(row):
            around = []
            for step in (1e-6, -1e-6):
                row[at] = value + step
                around.append(reference(algorithm, rows, now))
            row[at] = value
            expected.append((around[0] - around[1]) / 2e-6)
    assert tokens.logprobs.grad is not None
    torch.testing.assert_close(
        tokens.logprobs.grad, torch.tensor(expected).double(), rtol=1e-5, atol=1e-7
    )
    parts = [
        algorithm.loss(pack([r for r in rows if r["group"] in part], 3)) for part in ((0,), (1, 2))
    ]
    assert sum(part.loss.item() for part in parts) == pytest.approx(output.loss.item())
    for name, value in output.metrics.items():
        assert sum(part.metrics[name].item() for part in parts) == pytest.approx(value.item())


def test_extreme_differences_stay_finite() -> None:
    rows = [{"now": [-500.0], "ref": [0.0], "group": 0, "preference": 1.0}]
    rows += [{"now": [0.0], "ref": [-500.0], "group": 0, "preference": -1.0}]
    for order in (rows, [rows[1] | {"preference": 1.0}, rows[0] | {"preference": -1.0}]):
        tokens = pack(order, 1)
        output = DPO(beta=10.0).loss(tokens)
        output.loss.backward()
        assert output.loss.isfinite()
        assert tokens.logprobs.grad is not None
        assert tokens.logprobs.grad.isfinite().all()


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm", "ipo"])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_trl(loss_type: Any, seed: int) -> None:
    trainers = pytest.importorskip("trl.trainer", reason="pip install 'asyncdock[bench]'")
    rows = [
        row | {"preference": {2.0: 1.0, 1.0: -1.0}[row["preference"]]}
        for row in random_groups(seed, groups=4)
    ]
    tokens = pack(rows, 4)
    normalized = loss_type == "sigmoid_norm"
    output = DPO(
        loss_type="sigmoid" if normalized else loss_type, length_normalized=normalized
    ).loss(tokens)
    output.loss.backward()

    order = [i for i, row in enumerate(rows) if row["preference"] > 0] + [
        i for i, r in enumerate(rows) if r["preference"] < 0
    ]
    longest = max(len(row["now"]) for row in rows)
    shift = torch.tensor(
        [[1] * len(rows[i]["now"]) + [0] * (longest - len(rows[i]["now"])) for i in order]
    )
    mask = torch.cat([torch.zeros(len(order), 1, dtype=torch.int64), shift], 1)
    now = torch.tensor(
        [rows[i]["now"] + [0.0] * (longest - len(rows[i]["now"])) for i in order],
        dtype=torch.float64,
    )
    now.requires_grad_()
    ref = torch.tensor([sum(rows[i]["ref"]) for i in order], dtype=torch.float64)

    def model(**_: Any) -> Any:
        others = torch.zeros_like(shift).double()  # what TRL only reports
        return SimpleNamespace(
            log_probs=now * shift, entropy=others, mean_logits=others, is_top1=others.bool()
        )

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            device="cpu",
            gather_for_metrics=lambda x: x,
            gather=lambda x: x,
            reduce=lambda x, **_: x,
        ),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=0.1,
        label_smoothing=0.0,
        use_weighting=False,
        args=SimpleNamespace(rpo_alpha=None),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": ref[:4],
        "ref_rejected_logps": ref[4:],
    }
    expected = trainers.DPOTrainer._compute_loss(trainer, model, inputs, False)
    expected.backward()
    assert now.grad is not None
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    grad = torch.cat([now.grad[order.index(i)][: len(row["now"])] for i, row in enumerate(rows)])
    torch.testing.assert_close(tokens.logprobs.grad, grad, rtol=1e-6, atol=1e-9)


def test_a_pair_is_the_best_and_the_worst_of_a_group() -> None:
    rewards = torch.tensor([0.5, 1.0, 0.0, 0.25])
    made = DPO().credit({"reward": rewards})
    assert not isinstance(made, Drop)
    assert made["preference"].tolist() == [0.0, 1.0, -1.0, 0.0]
    assert DPO().credit({"reward": torch.ones(4)}) == Drop("equal rewards")


def test_sft_is_the_cross_entropy() -> None:
    tokens = pack(random_groups(0, groups=2), 2)
    output = build_algorithm("sft", {}).loss(tokens)
    output.loss.backward()
    count = len(tokens.logprobs)
    assert output.loss.item() == pytest.approx(-sum(tokens.logprobs.tolist()) / count)
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx([-1 / count] * count)


def test_kto_and_its_gradient_are_those_of_the_formula() -> None:
    rows = [
        row | {"preference": 1.0 if at % 2 else -1.0}
        for at, row in enumerate(random_groups(5, groups=3))
    ]
    algorithm = KTO(beta=0.3, good_weight=1.5, bad_weight=0.5)
    ratios = [sum(row["now"]) - sum(row["ref"]) for row in rows]
    centre = max(0.0, sum(ratios) / len(rows))

    def loss(now: list[list[float]]) -> float:
        total = 0.0
        for row, logprobs in zip(rows, now, strict=True):
            away = algorithm.beta * (sum(logprobs) - sum(row["ref"]) - centre)
            weight = 1.5 if row["preference"] > 0 else 0.5
            total += weight * (1 - 1 / (1 + math.exp(-row["preference"] * away)))
        return total / len(rows)

    def nested(values: list[list[float]]) -> torch.Tensor:
        parts = [torch.tensor(row, dtype=torch.float64) for row in values]
        return torch.nested.nested_tensor(parts, layout=torch.jagged)

    now = [list(row["now"]) for row in rows]
    batch = TrainBatch(
        TensorDict(
            {
                "response_ids": nested(now),
                "ref_logprobs": nested([row["ref"] for row in rows]),
                "preference": torch.tensor([row["preference"] for row in rows]).double(),
            },
            [len(rows)],
        ),
        algorithm,
        computed={NOW: torch.tensor([x for row in now for x in row]).double()},
    )
    logprobs = torch.tensor([x for row in now for x in row]).double().requires_grad_()
    everything = {"total_tokens": len(logprobs), "total_rows": len(rows), "total_groups": 3}
    tokens = batch.tokens(range(len(rows)), [0] * len(rows), logprobs, **everything)
    output = algorithm.loss(tokens)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss(now))
    expected = []
    for row in now:
        for at, value in enumerate(row):
            row[at] = value + 1e-6
            above = loss(now)
            row[at] = value - 1e-6
            expected.append((above - loss(now)) / 2e-6)
            row[at] = value
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-8)
    made = algorithm.credit({"reward": torch.tensor([0.0, 0.5, 1.0])})
    assert made["preference"].tolist() == [-1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({}, [False, True, False, False]),
        ({"best": 2}, [False, True, True, False]),
        ({"best": None, "least_reward": 0.5}, [True, True, True, False]),
        ({"best": 3, "least_reward": 0.9}, [False, True, True, False]),
        ({"least_reward": 2.0}, None),
    ],
)
def test_the_best_responses_are_trained(options: dict[str, Any], trained: Any) -> None:
    made = build_algorithm("best_of_n", options).credit(
        {"reward": torch.tensor([0.5, 1.0, 1.0, 0.0])}
    )
    if trained is None:
        assert made == Drop("no good response")
    else:
        assert not isinstance(made, Drop)
        assert made["row_mask"].tolist() == trained
