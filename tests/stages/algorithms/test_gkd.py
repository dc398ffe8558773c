"""The divergence from a teacher over its most probable tokens: against plain formulas in float64,
and TRL's loss where all tokens are compared."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms import TokenBatch
from stages.algorithms.supervised.gkd import GKD
from stages.flow.catalogue import TEACHER_IDS, TEACHER_LOGPROBS

VOCABULARY = 11
CASES: list[dict[str, Any]] = [
    {"divergence": "forward"},
    {"divergence": "reverse"},
    *({"divergence": "js", "js_beta": beta} for beta in (0.1, 0.5, 0.8)),
]


def logits_of(seed: int, tokens: int, spread: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a student, with gradient, and of a teacher: float64 [T, V]."""
    draw = torch.Generator().manual_seed(seed)
    student, teacher = (
        spread * torch.randn(tokens, VOCABULARY, generator=draw, dtype=torch.float64)
        for _ in range(2)
    )
    return student.requires_grad_(), teacher


def tokens_of(
    student: torch.Tensor, teacher: torch.Tensor, top_k: int, weight: torch.Tensor | None = None
) -> TokenBatch:
    count = len(student)
    logprobs, ids = teacher.log_softmax(-1).topk(top_k)
    everything = student.log_softmax(-1)
    return TokenBatch(
        logprobs=everything[:, 0],
        columns={TEACHER_IDS: ids, TEACHER_LOGPROBS: logprobs},
        row=torch.zeros(count, dtype=torch.int64),
        row_tokens=torch.tensor([count]),
        total_tokens=count,
        total_rows=1,
        weight=weight,
        candidates=everything.gather(-1, ids),
    )


def events(probabilities: list[float], chosen: list[int]) -> list[float]:
    """The probabilities of each token of ``chosen`` and of any other one."""
    return [*(probabilities[at] for at in chosen), 1 - sum(probabilities[at] for at in chosen)]


def expected(student: torch.Tensor, teacher: torch.Tensor, k: int, options: Any) -> float:
    """The definition, token by token in plain numbers."""
    total = 0.0
    pairs = zip(student.softmax(-1).tolist(), teacher.softmax(-1).tolist(), strict=True)
    for of_student, of_teacher in pairs:
        chosen = sorted(range(VOCABULARY), key=lambda at, p=of_teacher: -p[at])[:k]
        q = events(of_student, chosen)
        p = events(of_teacher, chosen)

        def kl(one: list[float], other: list[float]) -> float:
            return sum(a * math.log(a / b) for a, b in zip(one, other, strict=True) if a > 1e-12)

        match options["divergence"]:
            case "forward":
                total += kl(p, q)
            case "reverse":
                total += kl(q, p)
            case _:
                beta = options["js_beta"]
                middle = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
                total += beta * kl(p, middle) + (1 - beta) * kl(q, middle)
    return total / len(student)


@pytest.mark.parametrize("options", CASES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), k=st.integers(1, VOCABULARY - 1), count=st.integers(1, 4))
def test_value_and_gradient_are_those_of_the_definition(
    options: dict[str, Any], seed: int, k: int, count: int
) -> None:
    student, teacher = logits_of(seed, count)
    algorithm = GKD(top_k=k, **options)
    output = algorithm.loss(tokens_of(student, teacher, k))
    assert output.loss.item() == pytest.approx(expected(student, teacher, k, options), rel=1e-9)
    assert output.metrics["divergence"] == output.loss
    output.loss.backward()
    assert student.grad is not None

    direction = torch.randn(student.shape, generator=torch.Generator().manual_seed(seed)).double()
    step = 1e-5
    ahead, behind = (
        expected(student.detach() + sign * step * direction, teacher, k, options)
        for sign in (1, -1)
    )
    along = float((student.grad * direction).sum())
    assert along == pytest.approx((ahead - behind) / (2 * step), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("options", CASES)
def test_more_tokens_tell_more_and_all_of_them_everything(options: dict[str, Any]) -> None:
    student, teacher = logits_of(3, 5)
    by_k = [
        GKD(top_k=k, **options).loss(tokens_of(student, teacher, k)).loss.item()
        for k in range(1, VOCABULARY)
    ]
    assert by_k == sorted(by_k)
    whole = GKD(top_k=VOCABULARY, **options).loss(tokens_of(student, teacher, VOCABULARY)).loss
    assert whole.item() == pytest.approx(by_k[-1], rel=1e-5)


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_over_all_tokens_loss_and_gradient_are_those_of_trl(
    options: dict[str, Any], seed: int
) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd", reason="pip install 'asyncdock[bench]'")
    student, teacher = logits_of(seed, 6)
    beta = {"forward": 0.0, "reverse": 1.0}.get(options["divergence"], options.get("js_beta"))
    theirs = gkd.GKDTrainer.generalized_jsd_loss(student[None], teacher[None], beta=beta)
    theirs = theirs / len(student)  # theirs divides by the rows
    [wanted] = torch.autograd.grad(theirs, student)
    output = GKD(top_k=VOCABULARY, **options).loss(tokens_of(student, teacher, VOCABULARY))
    [gradient] = torch.autograd.grad(output.loss, student)
    assert output.loss.item() == pytest.approx(theirs.item(), rel=1e-5)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7)


def test_tokens_that_a_structure_forbids_teach_nothing() -> None:
    """Their logprobs are -inf, of the teacher's where it has fewer tokens than k, too."""
    student, teacher = logits_of(0, 2)
    forbidden = torch.arange(VOCABULARY) >= 3
    for options in CASES:
        few = (logits.masked_fill(forbidden, -math.inf) for logits in (student, teacher))
        output = GKD(top_k=5, **options).loss(tokens_of(*few, 5))
        [gradient] = torch.autograd.grad(output.loss, student)
        alone = GKD(top_k=2, **options).loss(tokens_of(student[:, :3], teacher[:, :3], 2))
        assert output.loss.item() == pytest.approx(alone.loss.item(), rel=1e-5)
        assert gradient.isfinite().all()


def test_a_rows_weight_is_a_factor_of_its_tokens() -> None:
    student, teacher = logits_of(1, 4)
    weight = torch.tensor([0.0, 2.0, 1.0, 0.5], dtype=torch.float64)
    whole = GKD(top_k=3).loss(tokens_of(student, teacher, 3, weight)).loss
    single = [
        GKD(top_k=3).loss(tokens_of(student[at : at + 1], teacher[at : at + 1], 3)).loss
        for at in range(4)
    ]
    assert whole.item() == pytest.approx(float(torch.stack(single) @ weight) / 4)


def test_an_engine_without_logprobs_of_other_tokens_is_named() -> None:
    student, teacher = logits_of(1, 4)
    tokens = tokens_of(student, teacher, 3)
    plain = TokenBatch(**{**vars(tokens), "candidates": None})
    with pytest.raises(ValueError, match="top_k: this train engine"):
        GKD(top_k=3).loss(plain)
