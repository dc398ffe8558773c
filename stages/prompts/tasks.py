"""Built-in tasks, which make prompts, and built-in reward functions, which score the responses.

A task is a pure function ``f(number, seed, **config) -> row``: a prompt and the columns that its reward needs. A reward
function has TRL's signature (see :mod:`stages.rewards.stage`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, Field

from pipeline.compat.extras import extra
from stages.json_schema import options_model

Completions = list[str | list[dict[str, str]]]

LONGEST = 10_000  # answer of the task ``repeat``, in characters
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")


def repeat(
    number: int,
    seed: int,
    *,
    length: Annotated[int, Field(ge=1, description="`repeat`: letters of the answer.")] = 4,
    letters: Annotated[str, Field(min_length=1, description="`repeat`: letters to choose from.")] = "abcdefgh",
) -> dict[str, str]:
    """Make a row such as ``be=`` with the answer ``bbbb``: the first of two letters, ``length`` times. A model with random
    weights learns it in seconds when ``max_tokens`` is ``length``, as it need not learn to stop."""
    if not 1 <= length <= LONGEST or not letters:
        raise ValueError(f"repeat: length = {length}, letters = {letters!r}; one at least, and a length <= {LONGEST}")
    first, other = random.Random(f"repeat:{seed}:{number}").choices(letters, k=2)
    return {"prompt": f"{first}{other}=", "answer": first * length}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {"repeat": repeat}
CONFIGS: dict[str, type[BaseModel]] = {name: options_model(task) for name, task in TASKS.items()}  # of prompts.config


def spelling(completions: Completions, answer: list[str], **_: Any) -> list[float]:
    """The share of characters that are right and in their place; superfluous characters count as wrong."""
    pairs = [(text(completion), wanted) for completion, wanted in zip(completions, answer, strict=True)]
    return [
        sum(a == b for a, b in zip(given, wanted, strict=False)) / max(len(given), len(wanted), 1)
        for given, wanted in pairs
    ]


def arithmetic(completions: Completions, answer: list[str], **_: Any) -> list[float]:
    """How well a response answers with a number, in grades, so that there is always a better response to learn.

    ==========  ============================================================================================
    1.0         the response is the right number and nothing else (a full stop may follow)
    0.5 to 0.9  the last number is right: 0.9 less 0.01 for each character beside it
    0.1         the last number is wrong
    0.0         there is no number
    ==========  ============================================================================================
    """
    return [_arithmetic(text(completion), wanted) for completion, wanted in zip(completions, answer, strict=True)]


def _arithmetic(completion: str, wanted: str) -> float:
    response = completion.strip().removesuffix(".").replace(",", "")
    number = last_number(response)
    if number is None:
        return 0.0
    if not _equal(number, wanted):
        return 0.1
    beside = len(response) - len(number)
    return max(0.5, 0.9 - 0.01 * beside) if beside else 1.0


def exact_number(completions: Completions, answer: list[str], **_: Any) -> list[float]:
    """1.0 when the last number of a response is the answer, whatever other text there is, else 0.0."""
    numbers = (last_number(text(completion)) for completion in completions)
    return [
        float(number is not None and _equal(number, wanted)) for number, wanted in zip(numbers, answer, strict=True)
    ]


def reasoning_gym(
    completions: Completions, question: list[str], answer: list[str], metadata: list[dict[str, Any]], **_: Any
) -> list[float]:
    """The score that the reasoning_gym task of the question gives to the text inside ``<answer>`` tags, or to the whole
    response when it has none."""
    columns = zip(completions, question, answer, metadata, strict=True)
    return [
        float(_scorer(about["source_dataset"])(tagged(text(completion)), dict(question=q, answer=a, metadata=about)))
        for completion, q, a, about in columns
    ]


REWARDS: dict[str, Callable[..., Any]] = {
    "arithmetic": arithmetic,
    "exact_number": exact_number,
    "reasoning_gym": reasoning_gym,
    "spelling": spelling,
}
HARMLESS = frozenset({"arithmetic", "exact_number", "spelling"})  # of a few operations on texts: called in the worker


def text(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion: a string, or messages."""
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)


def last_number(response: str) -> str | None:
    """The last number in ``response`` without its thousands commas; a minus sign between operands is not part of it."""
    found = NUMBER.findall(response)
    return found[-1].replace(",", "") if found else None


def tagged(response: str) -> str:
    """The last ``<answer>…</answer>`` in ``response``, or all of it."""
    found = re.findall(r"<answer>(.*?)</answer>", response, flags=re.DOTALL)
    return str(found[-1] if found else response).strip()


def _equal(number: str, wanted: str) -> bool:
    try:
        return float(number) == float(wanted.replace(",", ""))
    except ValueError:
        return False


@cache
def _scorer(task: str) -> Callable[..., float]:
    with extra("quickstart"):
        from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)
