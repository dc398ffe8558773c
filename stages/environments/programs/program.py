"""A user's program as the environment of one trajectory.

    open ─▶ solve(row, client, session) begins ─▶ its first request ─▶ Reply ─▶ turn ─▶ answered ─▶ its next request …
                                                     └ it returns: the end, and the reward

A plain function is called in a thread of its own, an async one on the event loop. A program that
raises has failed, unless its session was ended before by a limit.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.compat.extras import extra
from stages.environments.interface import EnvironmentFailed, Reply, Trajectory, Turn
from stages.environments.programs.endpoint import Endpoint
from stages.environments.programs.exchange import Exchange
from stages.environments.programs.session import Session
from stages.rewards.calls import named_by, plain_number, raised
from stages.threads import CallThread
from stages.user_code import place_in, place_of

CLOSE_SECONDS = 5.0  # that a cancelled program has to end
ENDED = "the trajectory has ended: a limit of the run was reached"


class ProgramEnvironment:
    """A trajectory of the program ``solve``, which the recipe calls ``use``. All raise
    EnvironmentFailed."""

    def __init__(
        self, use: str, solve: Callable[..., Any], options: Mapping[str, Any], endpoint: Endpoint
    ) -> None:
        self._use = use
        self._solve = solve
        self._options = options
        self._endpoint = endpoint
        self._exchange = Exchange()
        self._session: Session | None = None
        self._thread = CallThread(f"program {use}")
        self._process = os.getpid()
        self._program: asyncio.Task[Any] | None = None

    async def open(self, trajectory: Trajectory) -> Reply:
        base_url = await self._endpoint.open(self._exchange)
        self._session = session = Session(base_url, self._exchange.key, trajectory.seed)
        self._program = asyncio.create_task(self._run(dict(trajectory.row), session))
        return await self._next_reply()

    async def step(self, turn: Turn) -> Reply:
        self._exchange.answer(turn)
        return await self._next_reply()

    async def finish(self) -> Reply:
        """End the session, and return the reward when the program has ended."""
        self._exchange.end(ENDED)
        assert self._program is not None
        await asyncio.wait([self._program])
        try:
            return self._last_reply()
        except EnvironmentFailed:  # most programs raise what their client raises
            assert self._session is not None
            return Reply(reward=self._number(self._session.reward or 0.0), done=True)

    async def close(self) -> None:
        """End the session; a program that goes on is cancelled."""
        self._endpoint.close(self._exchange)
        self._exchange.end("the trajectory is closed")
        if self._program is not None and not self._program.done():
            self._program.cancel()
            await asyncio.wait([self._program], timeout=CLOSE_SECONDS)
        self._thread.end()

    def abandon(self) -> CallThread:
        """End the session, and return the thread of a plain program, which may go on."""
        self._endpoint.close(self._exchange)
        self._exchange.end("the trajectory is closed")
        if self._program is not None:
            self._program.cancel()
        self._thread.end()
        return self._thread

    def doing(self) -> tuple[str, str]:
        """Return the program, and the line where it is."""
        frame = None
        if not inspect.iscoroutinefunction(self._solve):
            frame = self._thread.frame()
        elif self._program is not None:
            frame = next(iter(self._program.get_stack(limit=1)), None)
        return self._use, place_in(frame, self._solve)

    async def _run(self, row: dict[str, Any], session: Session) -> Any:
        names = named_by(self._solve)
        is_async = inspect.iscoroutinefunction(self._solve)
        arguments = {"row": row, "session": session, **self._options}
        if names is not None and "offers" in names:
            arguments["offers"] = self._endpoint.offers
        if names is None or "client" in names:
            arguments["client"] = _client(session, is_async=is_async)
        wanted = {
            name: value for name, value in arguments.items() if names is None or name in names
        }
        try:
            if is_async:
                return await self._solve(**wanted)
            return await self._thread.run(lambda: self._solve(**wanted))
        finally:
            if os.getpid() != self._process:
                os._exit(0)  # a child that the program has forked must not go on too

    async def _next_reply(self) -> Reply:
        assert self._program is not None
        request = asyncio.create_task(self._exchange.next_request())
        try:
            await asyncio.wait([request, self._program], return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                return Reply(request=request.result())
        finally:
            request.cancel()
        self._exchange.end("its program has ended")
        return self._last_reply()

    def _last_reply(self) -> Reply:
        """Return the reply with the reward of the program, which has ended."""
        assert self._program is not None
        assert self._session is not None
        error = asyncio.CancelledError() if self._program.cancelled() else self._program.exception()
        if error is not None:
            reason = f"{self._use} {raised(error, self._solve)}"
            raise EnvironmentFailed(reason, place_of(error, self._solve)) from error
        value = self._program.result()
        reward = self._session.reward if value is None else value
        return Reply(reward=self._number(reward), done=True)

    def _number(self, value: Any) -> float | None:
        score = plain_number(value)
        if isinstance(score, str):
            reason = f"{self._use} returned {value!r:.200}; a number or None is wanted"
            raise EnvironmentFailed(reason, place_in(None, self._solve))
        return score


def _client(session: Session, *, is_async: bool) -> Any:
    with extra("agents"):
        import openai
    make = openai.AsyncOpenAI if is_async else openai.OpenAI
    return make(base_url=session.base_url, api_key=session.api_key, timeout=None, max_retries=0)
