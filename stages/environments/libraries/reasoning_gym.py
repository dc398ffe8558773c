"""Tasks of ``reasoning_gym``: ``environment.use = "reasoning_gym:chain_sum"``."""

from __future__ import annotations

import copy
import difflib
import json
from functools import cache
from typing import Any

from pipeline.compat.extras import extra
from stages.tasks.gym_answers import evaluate_nothing, tagged


class ReasoningGym:
    """The task that the library registers as ``name``, with its ``config``: one turn, scored by the
    task's own scorer, which evaluates nothing here. A row names its question by the column
    ``task``, a number; the question follows the prompt."""

    gives_reward = True
    replayable = True  # a number is the same question

    def __init__(self, name: str, **config: Any) -> None:
        self._questions = copy.copy(_questions(name, json.dumps({"seed": 0, **config})))

    def reset(self, task: int) -> str:
        """Return the question of the number ``task``."""
        self._entry = self._questions[task]
        return str(self._entry["question"])

    def step(self, text: str) -> tuple[None, float, bool]:
        """Return the score of the answer: in ``<answer>`` tags, or all of ``text``."""
        return None, float(self._questions.score_answer(tagged(text), self._entry)), True


@cache  # some read large files
def _questions(name: str, config: str) -> Any:
    """Return the data set of the task ``name``. Raises LookupError, and what the library does."""
    with extra("quickstart"):
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, cutoff=0.3) or sorted(DATASETS)[:3]
        raise LookupError(f"reasoning_gym has no task {name!r}; of its {len(DATASETS)}: {near}")
    evaluate_nothing(name)
    return reasoning_gym.create_dataset(name, **json.loads(config))
