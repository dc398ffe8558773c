"""Small tasks that come with the package, and the reward functions that judge them.

A task is ``f(number, seed, **config) -> row``: a prompt and the columns that its reward needs, a pure function of its
arguments. A reward function has TRL's signature (see :mod:`stages.rewards.stage`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, Field

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
    """``be=`` wants ``bbbb``: the first of two letters, again and again. A model made from scratch learns it in seconds
    when ``max_tokens`` is ``length``, so that it need not find out first how to stop."""
    if not 1 <= length <= LONGEST or not letters:
        raise ValueError(f"repeat: length = {length}, letters = {letters!r}; one at least, and a length <= {LONGEST}")
    first, other = random.Random(f"repeat:{seed}:{number}").choices(letters, k=2)
    return {"prompt": f"{first}{other}=", "answer": first * length}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {"repeat": repeat}
CONFIGS: dict[str, type[BaseModel]] = {name: options_model(task) for name, task in TASKS.items()}  # of prompts.config


def spelling(completions: Completions, answer: list[str], **_: Any) -> list[float]:
    """The share of characters that are right and in their place; characters too many count as wrong."""
    return [_spelling(text(completion), wanted) for completion, wanted in zip(completions, answer, strict=True)]


def _spelling(completion: str, wanted: str) -> float:
    return sum(a == b for a, b in zip(completion, wanted, strict=False)) / max(len(completion), len(wanted), 1)


def arithmetic(completions: Completions, answer: list[str], **_: Any) -> list[float]:
    """How well a response answers with a number, graded so that a model that rambles sees which way to go.

    ==========  ============================================================================================
    1.0         the response is the right number and nothing else (a full stop may follow)
    0.5 to 0.9  the last number said is right: 0.9 less 0.01 for each character beside it
    0.1         the last number said is wrong
    0.0         no number is said
    ==========  ============================================================================================
    """
    return [_arithmetic(text(completion), wanted) for completion, wanted in zip(completions, answer, strict=True)]


def _arithmetic(completion: str, wanted: str) -> float:
    said = completion.strip().removesuffix(".").replace(",", "")
    number = last_number(said)
    if number is None:
        return 0.0
    if not _equal(number, wanted):
        return 0.1
    beside = len(said) - len(number)
    return max(0.5, 0.9 - 0.01 * beside) if beside else 1.0


def exact_number(completions: Completions, answer: list[str], **_: Any) -> list[float]:
    """1.0 when the last number said is the answer, whatever stands around it, else 0.0: a plain measure of truth."""
    numbers = (last_number(text(completion)) for completion in completions)
    return [
        float(number is not None and _equal(number, wanted)) for number, wanted in zip(numbers, answer, strict=True)
    ]


def reasoning_gym(
    completions: Completions, question: list[str], answer: list[str], metadata: list[dict[str, Any]], **_: Any
) -> list[float]:
    """The score of the reasoning_gym task that asked, given to the answer inside ``<answer>`` tags, or to the whole
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


def text(completion: str | list[dict[str, str]]) -> str:
    """What was said, of a plain or a conversational completion."""
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)


def last_number(said: str) -> str | None:
    """The last number in ``said`` without its thousands commas; a minus sign between operands is not part of one."""
    found = NUMBER.findall(said)
    return found[-1].replace(",", "") if found else None


def tagged(said: str) -> str:
    """The last ``<answer>…</answer>`` in ``said``, or all of it."""
    found = re.findall(r"<answer>(.*?)</answer>", said, flags=re.DOTALL)
    return str(found[-1] if found else said).strip()


def _equal(number: str, wanted: str) -> bool:
    try:
        return float(number) == float(wanted.replace(",", ""))
    except ValueError:
        return False


@cache
def _scorer(task: str) -> Callable[..., float]:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)
