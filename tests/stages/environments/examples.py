"""Environment classes in the shapes that users write them."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
from dataclasses import dataclass
from typing import Any


class Calculator:
    """Of TRL's shape: tools, and get_reward()."""

    replayable = True

    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus = bonus
        self.results = list[float]()

    def reset(self, answer: float, **kwargs: Any) -> str | None:
        self.answer = answer
        return None

    def add(self, a: float, b: float) -> float:
        """
        Adds two numbers.

        Args:
            a: The first number.
            b: The second number.

        Returns:
            The sum.
        """
        return self._keep(a + b)

    def multiply(self, a: float, b: float) -> float:
        """
        Multiplies two numbers.

        Args:
            a: The first number.
            b: The second number.

        Returns:
            The product.
        """
        return self._keep(a * b)

    def divide(self, a: float, b: float) -> float:
        """
        Divides a number by another one.

        Args:
            a: The dividend.
            b: The divisor.

        Returns:
            The quotient.
        """
        return self._keep(a / b)

    def get_reward(self) -> float:
        return self.bonus + float(self.answer in self.results)

    def _keep(self, number: float) -> float:
        self.results.append(number)
        return number


class Wordle:
    """Of TRL's shape: the first observation from reset(), and the reward as an attribute."""

    def reset(self, secret: str, **kwargs: Any) -> str | None:
        self.secret = secret
        self.reward = 0.0
        self.done = False
        return f"Guess a word of {len(secret)} letters."

    def guess(self, guess: str) -> str:
        """
        Guesses a word.

        Args:
            guess: The word.

        Returns:
            A letter for each of the word: G in its place, Y at another place, X nowhere.
        """
        if self.done:
            raise ValueError("Game over.")
        self.done = guess == self.secret
        self.reward = float(self.done)
        return " ".join(
            "G" if letter == secret else "Y" if letter in self.secret else "X"
            for letter, secret in zip(guess, self.secret, strict=False)
        )


class AsyncSearch:
    """All methods async; two of its tools meet, which needs one event loop for all."""

    waiting: asyncio.Event | None = None

    async def reset(self, pages: dict[str, str], seed: int) -> str:
        self.pages = pages
        return f"seed {seed}"

    async def search(self, words: list[str], limit: int = 3) -> list[str]:
        """
        Searches pages.

        Args:
            words: What to look for.
            limit: The most titles.
        """
        await asyncio.sleep(0)
        return [title for title in self.pages if any(word in title for word in words)][:limit]

    async def meet(self) -> str:
        """Waits until another trajectory meets too."""
        if AsyncSearch.waiting is None:
            AsyncSearch.waiting = asyncio.Event()
            await AsyncSearch.waiting.wait()
        AsyncSearch.waiting.set()
        return "met"

    async def get_reward(self) -> float:
        return 0.5


class Notes:
    """Has what belongs to the thread that made it."""

    def reset(self) -> None:
        self.thread = threading.get_ident()
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table notes (text)")

    def write(self, text: str) -> int:
        """
        Writes a note.

        Args:
            text: The note.
        """
        self.database.execute("insert into notes values (?)", (text,))
        return int(self.database.execute("select count(*) from notes").fetchone()[0])

    def close(self) -> None:
        self.database.close()
        closed.add(threading.get_ident() == self.thread)


closed = set[bool]()


class Guess:
    """Answers text: tuples, with rewards."""

    gives_reward = True
    replayable = True

    def __init__(self, most: int = 10) -> None:
        self.most = most

    def reset(self, seed: int) -> str:
        self.number = random.Random(seed).randrange(self.most)
        return f"Guess a number below {self.most}."

    def step(self, text: str) -> tuple[str | None, float] | tuple[str | None, float, bool]:
        if not text.isdigit():
            return "Write a number.", -0.25
        if int(text) == self.number:
            return None, 1.0, True
        return ("more" if int(text) < self.number else "less"), 0.0, False


@dataclass
class Result:
    observation: Any
    reward: float | None
    done: bool


ANSWERS: dict[str, Any] = {
    "None": None,
    "text": "go on",
    "pair": ("go on", 0.5),
    "last pair": (None, 0.5),
    "triple": ("the end", 0.5, True),
    "gym": ("go on", 0.5, False, {"is_open": 1}),
    "gymnasium": ("the end", 0.5, False, True, {}),
    "object": Result("go on", 0.5, False),
    "skyrl_gym": {
        "observations": [{"role": "user", "content": "go on"}],
        "reward": 0.5,
        "done": False,
        "metadata": {},
    },
    "number": 3,
    "no text": (None, 0.5, False),
    "text as a reward": ("go on", "much"),
    "nan": ("go on", float("nan")),
    "assistant": {"observations": [{"role": "assistant", "content": "I"}], "done": False},
    "bytes": (b"go on", 0.5),
}


class Answers:
    """Returns what the turn names."""

    gives_reward = True

    def reset(self) -> None:
        pass

    def step(self, text: str) -> Any:
        return ANSWERS[text]


class Undeclared:
    """Returns a reward that it does not declare."""

    def reset(self) -> None:
        pass

    def step(self, text: str) -> tuple[str, float]:
        return text, 1.0


class Judged:
    """Has both: get_reward() counts."""

    def reset(self) -> None:
        self.turns = 0

    def step(self, text: str) -> tuple[str, float, bool]:
        self.turns += 1
        return text, 9.0, self.turns == 2

    def get_reward(self) -> int:
        return self.turns


class Results:
    """A tool that returns, or raises, what its argument names."""

    def reset(self, fails: str = "") -> Any:
        if fails == "reset":
            raise RuntimeError("not today")
        return 5 if fails == "result" else None

    def give(self, what: str, size: int = 0) -> Any:
        """
        Gives something.

        Args:
            what: The thing.
            size: Of a flood.
        """
        if what == "stop":
            raise StopIteration
        if what == "exit":
            raise SystemExit(3)
        if what == "memory":
            raise MemoryError
        if what == "unprintable":
            return Unprintable()
        values = {"none": None, "dict": {"é": [1, 2.5]}, "set": {1}, "surrogate": "\udc80"}
        return values.get(what, "x" * size)

    def get_reward(self) -> Any:
        return "a lot"


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("cannot be shown")


class NoReset:
    def look(self) -> str:
        """Looks."""
        return ""


class NoDocstring:
    def reset(self) -> None:
        pass

    def look(self, place: str) -> str:
        return place


not_a_class = 3
