"""Built-in reward functions of responses that answer with a number. Importing this needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stages.tasks.answers import Number, is_computed, number_of, plain_text, read_number
from stages.tasks.tasks import Completions, text


def arithmetic(completions: Completions, answer: list[Any], **_: Any) -> list[float | None]:
    """Score how well a response answers with a number, in grades, so that there is always a better
    response to learn.

    ==========  ============================================================================================
    1.0         the response is the right number and nothing else (a full stop may follow)
    0.5 to 0.9  the number is right: 0.9 less 0.01 for each character beside it
    0.1         the number is wrong
    0.0         there is no number
    ==========  ============================================================================================

    Which number that is, and what an answer may be: see :func:`exact_number`.
    """
    return [
        None if wanted is None else _arithmetic(text(completion), number_of(wanted))
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def _arithmetic(completion: str, wanted: Sequence[Number]) -> float:
    number = read_number(completion)
    if number is None:
        return 0.0
    if not any(number.equals(right) for right in wanted):
        return 0.1
    response = plain_text(completion.strip().removesuffix(".")).replace(",", "")
    beside = len(response) - len(number.text)
    return max(0.5, 0.9 - 0.01 * beside) if beside > 0 else 1.0


def exact_number(completions: Completions, answer: list[Any], **_: Any) -> list[float | None]:
    """Return 1.0 when a response answers with the number of the row, whatever other text there is,
    else 0.0. That is the number in the last ``\\boxed{}``, in ``<answer>`` tags, or after ``####``,
    else the last one (:mod:`stages.tasks.answers`). The answer is a number, a text with one, or a
    list of which one is to be met. A row without an answer has no score."""
    return [
        None if wanted is None else float(_is_right(text(completion), number_of(wanted)))
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def _is_right(completion: str, wanted: Sequence[Number]) -> bool:
    number = read_number(completion)
    return number is not None and any(number.equals(right) for right in wanted)


def has_expression(completion: str | list[dict[str, str]], answer: Any) -> bool:
    """Return whether a library would compute what a response answers with, or what its row has for
    an answer."""
    answers = answer if isinstance(answer, list) else [answer]
    return any(
        is_computed(value) for value in (text(completion), *answers) if isinstance(value, str)
    )


def last_number(response: str) -> str | None:
    """Return the last number in ``response`` without its thousands commas; a minus sign between
    operands is not part of it."""
    number = read_number(response)
    return None if number is None else number.text
