"""Environments of runs: the game of the task ``guess``, some of whose answers take several steps."""

from __future__ import annotations

import time
from typing import Any

from stages.tasks.guess import Guess


class Slow(Guess):
    """Each fifth trajectory has answers that take ``seconds``; which ones depends on seeds alone."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def reset(self, answer: int, seed: int) -> None:  # type: ignore[override]
        super().reset(answer)
        self._is_slow = seed % 5 == 0

    def step(self, text: str) -> tuple[str | None, float, bool]:
        if self._is_slow:
            time.sleep(self._seconds)
        return super().step(text)


class Lost(Slow):
    """The same, which cannot be replayed."""

    replayable = False


async def chat(row: dict[str, Any], client: Any, session: Any) -> float:
    """The game by OpenAI's client."""
    game = Guess()
    game.reset(row["answer"])
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(3):
        completion = await client.chat.completions.create(model="policy", messages=messages)
        message = completion.choices[0].message
        hint, reward, done = game.step(message.content or "")
        if done:
            return reward
        messages += [message, {"role": "user", "content": hint}]
    return 0.0


chat.replayable = True  # type: ignore[attr-defined]
