"""Programs that responses have, run with their tests. What they may touch is a test of the sandbox
(tests/orchestration/rewards/test_programs.py)."""

from __future__ import annotations

import pytest

from stages.rewards.programs import program_of, python_tests

TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(2, 2) == 4"]
RIGHT = "```python\ndef add(a, b):\n    return a + b\n```"


@pytest.mark.parametrize(
    ("response", "share"),
    [
        (RIGHT, 1),
        (f"First:\n```\nnonsense\n```\nThen:\n{RIGHT}\nThat is it.", 1),
        ("def add(a, b): return a + b", 1),
        ("```py\ndef add(a, b): return a + b", 1),
        ("def add(a, b): return abs(a) + b", 2 / 3),
        ("def add(a, b): return 3", 1 / 3),
        ("I cannot write that.", 0),
        ("def add(a, b):", 0),
        ("", 0),
        (f"{RIGHT[:-3]}raise ValueError\n```", 0),
        ("import sys\ndef add(a, b): return a + b\nif __name__ == '__main__': sys.exit(1)", 1),
    ],
)
def test_a_program_has_the_share_of_its_tests_that_it_passes(response: str, share: float) -> None:
    conversation = [{"role": "assistant", "content": response}]
    assert python_tests([response], [TESTS]) == [pytest.approx(share)]
    assert python_tests([conversation], [TESTS]) == [pytest.approx(share)]


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "print('passed\\n' * 9)",
        "import os; os.write(1, b'passed' * 9)",
        "x = bytearray(2**31)",
    ],
)
def test_what_a_program_does_besides_passes_no_test(program: str) -> None:
    assert python_tests([program], [TESTS]) == [0]


def test_a_process_that_forks_counts_once() -> None:
    assert python_tests(["import os; os.fork()\ndef add(a, b): return 3"], [TESTS])[0] in (0, 1 / 3)


def test_a_test_that_never_ends_costs_itself_and_those_behind_it() -> None:
    program = "def add(a, b):\n    while a == -1: pass\n    return a + b"
    assert python_tests([program], [TESTS], [10.0]) == [pytest.approx(1 / 3)]


def test_each_row_has_its_own_tests() -> None:
    rows = [TESTS, "assert add(1, 1) == 3", [], None]
    assert python_tests([RIGHT] * 4, rows) == [1, 0, None, None]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tests: \[1\] is no text with Python statements"):
        python_tests([RIGHT], [[1]])  # type: ignore[list-item]


def test_the_last_fence_is_the_program() -> None:
    assert program_of("```\na\n```\n```python\nb\n```") == "b\n"
    assert program_of("no fence") == "no fence"
