"""Calls of a function that a library computes for some rows alone: those go to a pool, in a sandbox.

RewardSet ── call(name, arguments) ──▶ DividedCaller ─┬▶ LocalCaller: in this process
                                                      └▶ rows with an expression ─▶ a pool
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from stages.rewards.calls import Arguments, Caller, Score, Scores, Stopwatch


class DividedCaller(Caller):
    """Calls functions by ``local``, but by ``pool`` with rows for which ``is_foreign`` holds, given
    a completion and its row's answer: those on which a function has a library compute. The pool
    starts with the first of them."""

    def __init__(self, local: Caller, pool: Caller, is_foreign: Callable[[Any, Any], bool]) -> None:
        self.parallel = local.parallel
        self._local = local
        self._pool = pool
        self._is_foreign = is_foreign

    async def open(self) -> None:
        await self._local.open()

    async def is_async(self, name: str) -> bool:
        return await self._local.is_async(name)

    async def call(
        self,
        name: str,
        arguments: Arguments,
        timeout: float,
        *,
        alone: bool = False,
        watch: Stopwatch | None = None,
    ) -> Scores:
        rows = itertools.zip_longest(arguments["completions"], arguments.get("answer", ()))
        foreign = [self._is_foreign(completion, answer) for completion, answer in rows]
        scores: dict[int, Score] = {}
        for caller, chosen in ((self._local, False), (self._pool, True)):
            numbers = [number for number, is_foreign in enumerate(foreign) if is_foreign is chosen]
            if numbers:
                part = {
                    argument: [values[number] for number in numbers]
                    for argument, values in arguments.items()
                }
                of_part = await caller.call(name, part, timeout, alone=alone, watch=watch)
                scores |= zip(numbers, of_part, strict=True)
        return [scores[number] for number in range(len(foreign))]

    async def close(self) -> None:
        await self._pool.close()
