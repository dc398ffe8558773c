"""Built-in tasks, which make prompts, and built-in reward functions, which score the responses.

A task is a pure function ``f(number, seed, **config) -> row``: a prompt and the columns that its
reward needs. A reward function has TRL's signature (see :mod:`stages.rewards.stage`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, Field

from pipeline.compat.extras import extra
from stages.json_schema import options_model
from stages.tasks.answers import Number, in_tags, is_computed, number_of, plain_text, read_number
from stages.tasks.gym_answers import evaluate_nothing

Completions = list[str | list[dict[str, str]]]

LONGEST = 10_000  # answer of the task ``repeat``, in characters


def repeat(
    number: int,
    seed: int,
    *,
    length: Annotated[int, Field(ge=1, description="`repeat`: letters of the answer.")] = 4,
    letters: Annotated[
        str, Field(min_length=1, description="`repeat`: letters to choose from.")
    ] = "abcdefgh",
) -> dict[str, str]:
    """Make a row such as ``be=`` with the answer ``bbbb``: the first of two letters, ``length``
    times. A model with random weights learns it in seconds when ``max_tokens`` is ``length``, as it
    need not learn to stop."""
    if not 1 <= length <= LONGEST or not letters:
        raise ValueError(
            f"repeat: length = {length}, letters = {letters!r}; one at least, and a "
            f"length <= {LONGEST}"
        )
    first, other = random.Random(f"repeat:{seed}:{number}").choices(letters, k=2)
    return {"prompt": f"{first}{other}=", "answer": first * length}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {"repeat": repeat}
# of prompts.config
CONFIGS: dict[str, type[BaseModel]] = {name: options_model(task) for name, task in TASKS.items()}


def spelling(completions: Completions, answer: list[Any], **_: Any) -> list[float | None]:
    """Return the share of characters that are right and in their place; superfluous characters
    count as wrong. An answer that is no text is its JSON. A row without an answer has no score."""
    return [
        None if wanted is None else _spelling(text(completion), json_text(wanted))
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def _spelling(response: str, wanted: str) -> float:
    right = sum(a == b for a, b in zip(response, wanted, strict=False))
    return right / max(len(response), len(wanted), 1)


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


def reasoning_gym(
    completions: Completions, question: list[Any], answer: list[Any], metadata: list[Any], **_: Any
) -> list[float]:
    """Return the score that the reasoning_gym task of the question gives to the text inside
    ``<answer>`` tags, or to the whole response when it has none."""
    columns = zip(completions, question, answer, metadata, strict=True)
    return [_reasoning_gym(tagged(text(completion)), *row) for completion, *row in columns]


def _reasoning_gym(response: str, question: Any, answer: Any, metadata: Any) -> float:
    about = json.loads(metadata) if isinstance(metadata, str) else metadata
    if not isinstance(about, dict) or "source_dataset" not in about:
        raise TypeError(
            f"metadata: {metadata!r:.100} does not name a task; give the row that "
            f"reasoning_gym made"
        )
    entry = {
        "question": question,
        "answer": None if answer is None else json_text(answer),
        "metadata": about,
    }
    return float(_scorer(about["source_dataset"])(response, entry))


REWARDS: dict[str, Callable[..., Any]] = {
    "arithmetic": arithmetic,
    "exact_number": exact_number,
    "reasoning_gym": reasoning_gym,
    "spelling": spelling,
}
# of a few operations on texts: called in the worker
HARMLESS = frozenset({"arithmetic", "exact_number", "spelling"})
# … but not with expressions: a library computes them
COMPUTED = frozenset({"arithmetic", "exact_number"})


def has_expression(completion: str | list[dict[str, str]], answer: Any) -> bool:
    """Return whether a library would compute what a response answers with, or what its row has for
    an answer."""
    answers = answer if isinstance(answer, list) else [answer]
    return any(
        is_computed(value) for value in (text(completion), *answers) if isinstance(value, str)
    )


def text(completion: str | list[dict[str, str]]) -> str:
    """Return the text of a completion: a string, or messages."""
    return (
        completion
        if isinstance(completion, str)
        else "".join(message["content"] for message in completion)
    )


def json_text(value: Any) -> str:
    """Return a text itself; of another JSON value, its JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def last_number(response: str) -> str | None:
    """Return the last number in ``response`` without its thousands commas; a minus sign between
    operands is not part of it."""
    number = read_number(response)
    return None if number is None else number.text


def tagged(response: str) -> str:
    """Return the last ``<answer>…</answer>`` in ``response``, or all of it."""
    part = in_tags(response)
    return (response if part is None else part).strip()


@cache
def _scorer(task: str) -> Callable[..., float]:
    with extra("quickstart"):
        from reasoning_gym import get_score_answer_fn

    evaluate_nothing(task)
    return get_score_answer_fn(task)
