"""Environments of runs: the game of the task ``guess``, some of whose answers take several steps."""

from __future__ import annotations

import os
import signal
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


class Near(Guess):
    """Rewards each digit by how near it is."""

    def step(self, text: str) -> tuple[str | None, float, bool]:
        hint, _, done = super().step(text)
        digits = [int(character) for character in text if character.isdigit()]
        return hint, sum(0.5 ** abs(digit - self._answer) for digit in digits), done


class Broken(Guess):
    """Raises, or ends its process (``how``: "dies"), where one of the digits ``broken`` is to be
    guessed."""

    def __init__(self, broken: list[int], how: str = "raises") -> None:
        self._broken = broken
        self._how = how

    def step(self, text: str) -> tuple[str | None, float, bool]:
        if self._answer in self._broken:
            if self._how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("not this one")
        return super().step(text)


def count_turns(completions: list[Any], turn_starts: list[list[int]], **_: Any) -> list[float]:
    return [float(len(starts)) for starts in turn_starts]


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


async def forgets(row: dict[str, Any], client: Any, session: Any) -> float:
    """The game, in which each request has the last hint alone; and asks twice for the second
    guess."""
    game = Guess()
    game.reset(row["answer"])
    first = {"role": "user", "content": row["prompt"]}
    messages = [first]
    for number in range(3):
        completion = await client.chat.completions.create(model="policy", messages=messages)
        if number == 1:
            completion = await client.chat.completions.create(model="policy", messages=messages)
        message = completion.choices[0].message
        hint, reward, done = game.step(message.content or "")
        if done:
            return reward
        messages = [first, message, {"role": "user", "content": hint}]
        messages = messages if number else [{**first, "content": f"{first['content']}{hint}"}]
    return 0.0


forgets.replayable = True  # type: ignore[attr-defined]


async def anew(row: dict[str, Any], client: Any, session: Any) -> float:
    """The game, in which each request is one message with all hints: it goes on with no turn."""
    game = Guess()
    game.reset(row["answer"])
    content = row["prompt"]
    for _ in range(3):
        messages = [{"role": "user", "content": content}]
        completion = await client.chat.completions.create(model="policy", messages=messages)
        hint, reward, done = game.step(completion.choices[0].message.content or "")
        if done:
            return reward
        content += hint
    return 0.0


class Same(Guess):
    """Gives the same reward whatever is said."""

    def step(self, text: str) -> tuple[str | None, float, bool]:
        return None, 0.5, True


class Failing(Guess):
    def step(self, text: str) -> tuple[str | None, float, bool]:
        raise RuntimeError("not today")
