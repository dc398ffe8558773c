"""Numbers in texts, in the forms that models and data sets write them; the values were written by
hand."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from fractions import Fraction
from typing import Any

import pytest

from stages.rewards.stage import ErrorPolicy, RewardScores, RewardSet
from stages.tasks import answers
from stages.tasks.answers import TimeLimit, read_number, time_limit

FORMS: list[tuple[str, str | None]] = [
    ("4", "4"),
    ("007", "7"),
    ("-5", "-5"),
    ("−5", "-5"),  # U+2212
    ("–5", "-5"),  # U+2013
    ("＋５", "5"),
    ("+5", "5"),
    (".5", "1/2"),
    ("-.5", "-1/2"),
    ("5.", "5"),
    ("it is 7.", "7"),
    ("7!", "7"),
    ("0.50", "1/2"),
    ("9{,}500", "9500"),
    ("9,500", "9500"),
    ("1,234.0", "1234"),
    ("1,234,567.5", "2469135/2"),
    ("12,34,567", "1234567"),
    ("1\u2009234\u2009567", "1234567"),
    ("12\u00a0500 euros", "12500"),
    ("1 234 567", "1234567"),
    ("1,5", "3/2"),
    ("-0,25 kg", "-1/4"),
    ("7 minus 5", "5"),
    ("1\\,234", "1234"),
    ("1'234", "1234"),
    ("1_000", "1000"),
    ("1.234.567", "1234567"),
    ("1.234,56", "30864/25"),
    ("1,2,3", "3"),
    ("1, 2, and 3", "3"),
    ("1.5e3", "1500"),
    ("1E-3", "1/1000"),
    ("2.5 × 10^3", "2500"),
    ("2.5×10³", "2500"),
    ("2.5 \\times 10^{-3}", "1/400"),
    ("3 * 10**2", "300"),
    ("10^3", "1000"),
    ("10⁻²", "1/100"),
    ("2^{-1}", "1/2"),
    ("1 234,5", "2469/2"),
    ("5²", "25"),
    ("3/4", "3/4"),
    ("-3/4", "-3/4"),
    ("3 / 4", "3/4"),
    ("½", "1/2"),
    ("1½", "3/2"),
    ("1 1/2", "3/2"),
    ("-1 1/2", "-3/2"),
    ("3⁄4", "3/4"),  # U+2044
    ("\\frac{3}{4}", "3/4"),
    ("\\dfrac{-3}{4}", "-3/4"),
    ("-\\frac{3}{4}", "-3/4"),
    ("\\frac34", "3/4"),
    ("1\\frac{1}{2}", "3/2"),
    ("12/25/2024", "2024"),
    ("50%", "50"),
    ("50 \\%", "50"),
    ("12.5 percent", "25/2"),
    ("$5", "5"),
    ("-$1,000.50", "-2001/2"),
    ("$-5", "-5"),
    ("€20", "20"),
    ("\\$18", "18"),
    ("$7$", "7"),
    ("\\(7\\)", "7"),
    ("(5)", "5"),
    ("(-5)", "-5"),
    ("-(5)", "-5"),
    ("**7**", "7"),
    ("`7`", "7"),
    ("5 kg", "5"),
    ("5kg", "5"),
    ("x = 5", "5"),
    ("x=-5", "-5"),
    ("minus 5", "-5"),
    ("3-4=-1", "-1"),
    ("5 - 3", "3"),
    ("3 + 4 = 7", "7"),
    ("from 3–5", "5"),
    ("- 5", "5"),  # an item of a list
    ("１２", "12"),
    ("٣٫٥", "7/2"),
    ("१२", "12"),
    ("The answer is... 7", "7"),
    ("#### 18", "18"),
    ("2 + 2 is 4\n#### 1,234\nthat is all 99", "1234"),
    ("\\boxed{42}", "42"),
    ("\\boxed{42} or 43", "42"),
    ("\\boxed{1} and \\boxed{2}", "2"),
    ("\\boxed{\\frac{3}{4}}", "3/4"),
    ("\\boxed{x = 5}", "5"),
    ("\\boxed{5 \\text{ cm}}", "5"),
    ("\\boxed{\\$1{,}200}", "1200"),
    ("$$\\boxed{-7}$$", "-7"),
    ("<answer> 12 </answer> of 3", "12"),
    ("7/0", None),
    ("x2 none", None),
    ("five", None),
    ("", None),
    ("inf", None),
    ("v1.2.3", None),
]


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(("text", "value"), FORMS)
def test_a_number_is_read_as_a_person_would(
    text: str, value: str | None, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not installed:
        monkeypatch.setattr(answers, "_math_verify", lambda: None)
    number = read_number(text)
    assert (number.value if number else None) == (Fraction(value) if value else None)


EXPRESSIONS = [
    ("\\boxed{\\sqrt{16}}", 4),
    ("so $\\sqrt{2}$", 2**0.5),
    ("\\boxed{\\frac{\\sqrt{3}}{2}}", 3**0.5 / 2),
    ("\\boxed{2^{10}}", 1024),
    ("\\boxed{3 + 4}", 7),
    ("\\boxed{2\\pi}", 6.283185307179586),
]


@pytest.mark.parametrize(("text", "value"), EXPRESSIONS)
def test_math_verify_computes_what_is_no_number(text: str, value: float) -> None:
    pytest.importorskip("math_verify")
    assert scores("exact_number", [text], [value]) == [1.0]
    assert scores("exact_number", [text], [value + 1]) == [0.0]


def score(name: str, completions: list[str], fields: list[dict[str, Any]]) -> RewardScores:
    rewards = RewardSet([(name, 1.0)], policy=ErrorPolicy(retries=0, max_error_share=1.0))
    count = len(completions)
    return asyncio.run(rewards.score(["q"] * count, completions, [[1]] * count, fields))


def scores(name: str, completions: list[str], wanted: list[Any]) -> list[float]:
    return score(name, completions, [{"answer": one} for one in wanted]).total.tolist()


@pytest.mark.parametrize(
    "answer",
    [4, 4.0, "4", "4.0", "2 + 2 = 4\n#### 4", "\\boxed{4}", [5, 4], ["four", "4"], "8/2", "400%"],
)
def test_answers_may_be_of_any_type_with_a_number(answer: Any) -> None:
    assert scores("exact_number", ["it is 4", "it is 5.5", "none"], [answer] * 3) == [1.0, 0.0, 0.0]
    assert scores("arithmetic", ["4", "5.5", "none"], [answer] * 3) == pytest.approx(
        [1.0, 0.1, 0.0]
    )


def test_exact_integers_and_rounded_floats() -> None:
    large = 10**20
    assert scores("exact_number", [str(large), str(large + 1)], [large, large]) == [1.0, 0.0]
    assert scores("exact_number", ["0.3", "0.3001", "1/3"], [0.1 + 0.2] * 2 + [1 / 3]) == [
        1.0,
        0.0,
        1.0,
    ]
    assert scores("exact_number", ["0.3333"], ["1/3"]) == [0.0]


def test_a_percentage_is_its_number_and_its_value() -> None:
    assert scores(
        "exact_number", ["50%"] * 4 + ["50", "0.5"], [50, 0.5, "50%", 0.05, "50%", "50 %"]
    ) == [
        1,
        1,
        1,
        0,
        1,
        1,
    ]


def test_an_answer_that_is_no_number_is_named_and_one_that_is_missing_has_no_score() -> None:
    failed = score(
        "exact_number", ["4", "4", "4"], [{"answer": True}, {"answer": {"n": 4}}, {"answer": None}]
    )
    assert failed.failed[:, 0].tolist() == [True, True, False]
    assert not failed.counted.any()
    wrong = RewardSet([("exact_number", 1.0)], policy=ErrorPolicy(on_error="fail", retries=0))
    with pytest.raises(
        Exception,
        match=r"answer: \{'n': 4\} is a dict; a number, a text or a list "
        r"of them is wanted",
    ):
        asyncio.run(wrong.score(["q"], ["4"], [[1]], [{"answer": {"n": 4}}]))


def test_spelling_takes_answers_of_any_type() -> None:
    found = score(
        "spelling",
        ["4", "true", "[1]", "ab", "x"],
        [{"answer": a} for a in (4, True, [1], "ab", None)],
    )
    assert found.total.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert found.counted.tolist() == [True] * 4 + [False]


def test_reasoning_gym_takes_metadata_as_json_and_names_what_is_none() -> None:
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("chain_sum", seed=3, size=1)[0]
    texts = {**entry, "metadata": json.dumps(entry["metadata"])}
    assert score("reasoning_gym", [entry["answer"]] * 2, [entry, texts]).total.tolist() == [
        1.0,
        1.0,
    ]
    numbers = {**entry, "answer": int(entry["answer"])}
    assert score("reasoning_gym", [entry["answer"]], [numbers]).total.tolist() == [1.0]
    assert score("reasoning_gym", ["1"], [{**entry, "metadata": {}}]).failed.all()


@pytest.mark.parametrize(
    "text",
    [
        "9" * 5000,
        "1e999999999",
        "9^99999",
        "\\boxed{" + "9" * 5000 + "}",
        "\\boxed{10^{10^{10^{10}}}}",
        "\\boxed{" * 3000,
        "-" * 9000,
        "5/" * 5000,
        "(" * 5000 + "5",
        "\\frac{" * 3000,
        "1," * 5000,
    ],
)
def test_long_and_huge_texts_cost_little_and_equal_nothing(text: str) -> None:
    began = time.process_time()
    assert scores("exact_number", [text], [123456789]) == [0.0]
    assert time.process_time() - began < 20


def test_an_expression_that_takes_too_long_is_given_up_in_any_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow:
        @staticmethod
        def parse(text: str, **_: Any) -> list[Any]:
            while True:
                pass

    monkeypatch.setattr(answers, "_math_verify", lambda: Slow)
    monkeypatch.setattr(answers, "SECONDS", 0.05)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(read_number("\\boxed{\\sqrt{16}}")))
    thread.start()
    thread.join(60)
    assert found == [None]


def test_a_time_limit_ends_with_its_block() -> None:
    with time_limit(60):
        pass
    with pytest.raises(TimeLimit):
        wait_for_ever(0.01)


def wait_for_ever(seconds: float) -> None:
    with time_limit(seconds):
        while True:
            pass


@pytest.mark.parametrize(
    "part", ["1", "<answer>", "1/", "1,", "1 ", "-(", "\\boxed{", "{,}", "1e", "2^"]
)
def test_the_time_for_a_text_grows_with_its_length_alone(part: str) -> None:
    """By processor time, of a text and of one eight times as long: what grows with the square would
    take 64 times."""
    seconds = []
    for count in (4_000, 32_000):
        began = time.thread_time()
        read_number(part * count)
        seconds.append(time.thread_time() - began)
    assert seconds[1] < 30 * seconds[0] + 0.05


def test_math_verify_is_imported_for_expressions_alone() -> None:
    code = (
        "import sys; from stages.rewards.number_rewards import exact_number as f; "
        "print(*f(['#### 1,200'], [1200]), 'sympy' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.split() == ["1.0", "False"]


@pytest.mark.parametrize(
    "text",
    [
        "(((9^{99999})^{99999}))",
        "9^{9^{9^9}}",
        "9^9^9^9",
        "9^{{9}^9}",
        r"9^{\left(9\right)^{9}}",
        "9!!!",
        "99999!",
        r"\binom{99999}{5}",
        r"\frac{10^{10^{10}}}{3}",
        r"\binom{10^{9}}{5\cdot 10^{8}}",
        r"\binom{999\cdot 999\cdot 999}{5\cdot 99999}",
        r"(999\cdot 999\cdot 999)!",
        r"\sqrt{2^{999!}}",
        r"{99}^{99}! + 1",
        r"\sqrt{{9999999}!}",
        r"\prod_{i=1}^{999} i^{i^{i}}",
    ],
)
def test_an_answer_that_is_too_large_to_compute_is_not_computed(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One operation of large integers holds the whole process, past any time limit."""
    math_verify = pytest.importorskip("math_verify")
    computed: list[str] = []
    monkeypatch.setattr(math_verify, "parse", lambda latex, **_: computed.append(latex) or [])
    score("exact_number", [rf"\boxed{{{text}}}"], [{"answer": 1}])
    assert computed == []


def test_small_powers_and_factorials_are_computed() -> None:
    pytest.importorskip("math_verify")
    assert scores("exact_number", [r"\boxed{2^{10} + \sqrt{16} + \binom{10}{3}}"], [1148]) == [1.0]
    assert scores("exact_number", [r"\boxed{\frac{6!}{3! \cdot 2!}}"], [60]) == [1.0]
