"""Built-in tasks, which make prompts, and built-in reward functions, which score the responses.

A task is a pure function ``f(number, seed, **config) -> row``: a prompt and the columns that its
reward needs. A reward function has TRL's signature (see :mod:`stages.rewards.stage`).
"""

from __future__ import annotations

import json
import math
import pkgutil
import random
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, Field

from stages.json_schema import options_model

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


# name → its function, which is imported when a recipe names it
TASKS = {
    "repeat": "stages.tasks.tasks:repeat",
    "copy": "stages.tasks.graded:copy",
    "sort": "stages.tasks.graded:sort",
    "modular_sum": "stages.tasks.graded:modular_sum",
    "bandit": "stages.tasks.graded:bandit",
    "maze": "stages.tasks.maze:maze",
    "guess": "stages.tasks.guess:guess",
    "calculator": "stages.tasks.calculator:calculator",
}


def task_function(name: str) -> Callable[..., dict[str, Any]]:
    """Return the function of the task ``name`` of :data:`TASKS`."""
    function: Callable[..., dict[str, Any]] = pkgutil.resolve_name(TASKS[name])
    return function


def task_config(name: str) -> type[BaseModel]:
    """Return the model of the task's options, ``prompts.config``."""
    return options_model(task_function(name))


def spelling(completions: Completions, answer: list[Any], **_: Any) -> list[float | None]:
    """Return the share of characters that are right and in their place; superfluous characters
    count as wrong. An answer that is no text is its JSON. A row without an answer has no score."""
    return [
        None if wanted is None else _spelling(text(completion), json_text(wanted))
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def environment(
    completions: Completions, environment_reward: list[float], **_: Any
) -> list[float | None]:
    """Return the rewards that the environments gave their trajectories; None where one gave
    none."""
    return [_known(reward) for reward in environment_reward]


def environment_turns(
    completions: Completions,
    turn_starts: list[list[int]],
    turn_reward: list[list[float]],
    environment_reward: list[float],
    **_: Any,
) -> list[list[float | None] | float | None]:
    """Return the rewards that the environments gave each turn; None where one gave none. A
    trajectory whose environment has failed before it answered the last turn has that of
    :func:`environment`."""
    return [
        [_known(reward) for reward in rewards] if len(rewards) == len(starts) else _known(whole)
        for starts, rewards, whole in zip(turn_starts, turn_reward, environment_reward, strict=True)
    ]


def _known(reward: float) -> float | None:
    return None if math.isnan(reward) else reward


def _spelling(response: str, wanted: str) -> float:
    right = sum(a == b for a, b in zip(response, wanted, strict=False))
    return right / max(len(response), len(wanted), 1)


# name → its function, which is imported when a recipe names it
REWARDS = {
    "arithmetic": "stages.rewards.number_rewards:arithmetic",
    "environment": "stages.tasks.tasks:environment",
    "environment_turns": "stages.tasks.tasks:environment_turns",
    "exact_number": "stages.rewards.number_rewards:exact_number",
    "judge": "stages.rewards.judge:judge",
    "payout": "stages.tasks.graded:payout",
    "python_tests": "stages.rewards.programs:python_tests",
    "reasoning_gym": "stages.tasks.gym_answers:reasoning_gym",
    "reward_model": "stages.rewards.judge:reward_model",
    "spelling": "stages.tasks.tasks:spelling",
}
# of a few operations on texts: called in the worker
HARMLESS = frozenset(
    {"arithmetic", "environment", "environment_turns", "exact_number", "payout", "spelling"}
)
# of a model that reads texts, here or behind a URL: in a process without a sandbox
ASKING = frozenset({"judge", "reward_model"})
# run what a model wrote: only in a sandbox in which a process can start others
RUNNING = frozenset({"python_tests"})
# … but not with expressions: a library computes them
COMPUTED = frozenset({"arithmetic", "exact_number"})


def text(completion: str | list[dict[str, str]]) -> str:
    """Return the text of a completion: a string, or the assistant's last message."""
    if isinstance(completion, str):
        return completion
    turns = [message["content"] for message in completion if message["role"] == "assistant"]
    return turns[-1] if turns else ""


def json_text(value: Any) -> str:
    """Return a text itself; of another JSON value, its JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
