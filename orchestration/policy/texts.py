"""Tokens of the texts and chats of requests, made so that none delays those of another client.

short text, tokenizer of the service's owner ──▶ at once
any other, and every chat ──▶ too many characters? ──▶ the turn of its client ──▶ a process (text_worker.py)
                                                          └ gives up: the process is killed
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from orchestration.processes.confined import ENVIRONMENT, Confined, Lost, exchange
from orchestration.processes.forkserver import Child, Connection, ForkServer, Launch
from orchestration.recipe.schema import Recipe
from stages.model.load import Tokenizer

ENTRY = "orchestration.policy.text_worker"
AT_ONCE = 4  # requests, each of another client
IDLE = 2  # processes that are kept
PATIENCE = 0.1  # seconds, for which one that is in use is waited for before another one is started
MOST_WAITING = 2000  # requests of one client
SECONDS = 20.0  # of one request
SHORT = 4096  # characters that are tokenised at once
# variables of the environment: no secrets
KEPT = ("HOME", "HF_HOME", "LANG", "PATH", "TMPDIR", "XDG_CACHE_HOME")


class TextRefused(ValueError):
    """The text has no tokens; the message says why.

    ``fix``: what to do. ``value``: characters, where they are too many.
    """

    def __init__(self, detail: str, fix: str, value: int | None = None) -> None:
        super().__init__(detail)
        self.fix = fix
        self.value = value


class _Forked:
    """A worker that a fork server has made, on the socket ``line``."""

    def __init__(self, child: Child, line: socket.socket) -> None:
        self.pid = child.pid
        self._child = child
        self._line = line
        self._file = line.makefile("rwb")

    def ask(self, question: bytes) -> bytes:
        return exchange(question, self._file, self._file)  # type: ignore[arg-type]

    def poll(self) -> int | None:
        return None if self._child.alive() else 0

    def kill(self) -> None:
        self._child.end()

    def close(self) -> None:
        self.kill()
        with contextlib.suppress(OSError):
            self._file.close()
        self._line.close()


class Texts:
    """The processes that read texts, forked from ``forks`` (None: from a fork server of its own).

    Belongs to the event loop of its first :meth:`read`.
    """

    def __init__(self, forks: ForkServer | None = None) -> None:
        self._forks = forks
        self._owns = forks is None
        self._connection: Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._confined = Confined(
            self._started, most=AT_ONCE, waiting=MOST_WAITING, idle=IDLE, patience=PATIENCE
        )

    async def read(self, question: dict[str, Any], owner: str) -> list[list[int]]:
        """Return the tokens that :func:`orchestration.policy.text_worker.answer` makes, for the
        client ``owner``. Raises TextRefused and TurnsFull."""
        self._loop = asyncio.get_running_loop()
        if self._forks is None:
            self._forks = await asyncio.to_thread(ForkServer.start, (ENTRY,))
        self._connection = self._connection or self._forks.connect()
        try:
            answer = await asyncio.wait_for(self._confined.ask(question, owner), SECONDS)
        except TimeoutError:
            raise TextRefused(
                f"It takes more than {SECONDS:.0f} s to be read.", "give a shorter text"
            ) from None
        except Lost:
            raise TextRefused(
                "The process that reads it ended.", "give another text, or a shorter one"
            ) from None
        if "refused" in answer:
            raise TextRefused(answer["refused"], answer["fix"])
        ids: list[list[int]] = answer["ids"]
        return ids

    def _started(self) -> _Forked:
        """Start a process. Called in a thread."""
        assert self._loop is not None
        assert self._connection is not None
        here, there = socket.socketpair()
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        launch = Launch(
            f"{ENTRY}:main", [], {**ENVIRONMENT, **environment}, os.getcwd(), "/dev/stderr", "texts"
        )
        with there:
            launching = self._connection.launch(launch, there.fileno())
            child = asyncio.run_coroutine_threadsafe(launching, self._loop).result()
        return _Forked(child, here)

    async def close(self) -> None:
        await asyncio.to_thread(self._confined.close)
        if self._connection is not None:
            self._connection.close()
        if self._owns and self._forks is not None:
            self._forks.close()


@dataclass(frozen=True)
class PolicyTexts:
    """Texts for the policy of ``recipe``.

    ``trusted``: the owner of the service has chosen its tokenizer. ``longest``: characters of the
    longest token.
    """

    texts: Texts
    recipe: Recipe
    tokenizer: Tokenizer
    trusted: bool
    longest: int

    @classmethod
    def of(
        cls, texts: Texts, recipe: Recipe, tokenizer: Tokenizer, *, trusted: bool
    ) -> PolicyTexts:
        return cls(
            texts, recipe, tokenizer, trusted, max(map(len, tokenizer.get_vocab()), default=1)
        )

    def most(self, context: int | None) -> int | None:
        """Return the number of characters of which a context of so many tokens may be made; None:
        any number."""
        return None if context is None else context * self.longest

    async def ids(
        self, texts: Sequence[str], owner: str, context: int | None, *, special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the tokens of each of the ``texts``, with the ``special_tokens`` that the
        tokenizer adds. Raises TextRefused and TurnsFull."""
        for text in texts:
            self._refuse_long(len(text), context)
        if self.trusted and sum(map(len, texts)) <= SHORT:
            return [
                self.tokenizer(text, add_special_tokens=special_tokens)["input_ids"]
                for text in texts
            ]
        what = {"texts": list(texts), "special_tokens": special_tokens}
        return await self._read(what, owner, context)

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        owner: str,
        context: int | None,
        options: Mapping[str, Any] = MappingProxyType({}),
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        special_tokens: bool = False,
    ) -> list[list[int]]:
        """Return the tokens of the prompt that the chat template makes of ``messages``, ``tools``
        and its ``options``. Raises TextRefused and TurnsFull."""
        self._refuse_long(sum(len(message["content"]) for message in messages), context)
        what = {"messages": list(messages), "tools": list(tools), "options": dict(options)}
        return await self._read({**what, "special_tokens": special_tokens}, owner, context)

    async def _read(self, what: dict[str, Any], owner: str, context: int | None) -> list[list[int]]:
        question = {"recipe": self.recipe.to_json(), "most": self.most(context), **what}
        return await self.texts.read(question, owner)

    def _refuse_long(self, characters: int, context: int | None) -> None:
        most = self.most(context)
        if most is not None and characters > most:
            fix = (
                f"give at most {most}: the context has {context} tokens, and the longest one "
                f"{self.longest} characters"
            )
            raise TextRefused(f"It has {characters} characters.", fix, characters)
