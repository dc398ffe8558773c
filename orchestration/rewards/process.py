"""A process that calls reward functions.

Its standard input is a socket to the pool (:mod:`orchestration.rewards.pool`).

    start: sandbox, limits ─▶ import the functions ─▶ what they take ──▶ pool    (messages: orchestration.processes.line)
    pool ──▶ {id, name, arguments, rows, timeout} ─▶ call ─┬▶ {id, seconds, scores} ──▶ pool
                                                           └▶ {id, seconds, error, place, misfit, last} ──▶ pool

``seconds``: inside the function, until its scores are read. ``last``: the process has reached its
limit of memory, and ends. Plain functions are called one at a time by the main thread, outside of
any event loop: code that sets signal handlers, or that runs an event loop of its own, works. With
``concurrent``, functions are async and their calls share one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestration.processes.line import (
    Message,
    is_full,
    prepare,
    receive,
    send,
    serve,
    take_line,
)
from orchestration.sandbox.kernel import SandboxRefused
from orchestration.sandbox.sandbox import Sandbox, enter
from stages.rewards.calls import (
    CallFailed,
    Stopwatch,
    named_by,
    plain_scores,
    raised,
    too_slow,
)
from stages.rewards.registry import RewardError, RewardFunctions


@dataclass(frozen=True)
class Setup:
    """Arguments of a process of reward functions.

    ``memory``: bytes that its data may take, 0 for no limit. ``path``: of imports. ``sandbox``:
    fields of a :class:`~orchestration.sandbox.sandbox.Sandbox`, None for none.
    """

    names: Sequence[str]
    path: list[str]
    memory: int = 0
    concurrent: bool = False
    sandbox: dict[str, Any] | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main(arguments: Sequence[str] | None = None) -> None:
    (text,) = sys.argv[1:] if arguments is None else arguments
    setup = Setup(**json.loads(text))
    line = take_line()
    prepare(setup.path, setup.memory)
    functions = RewardFunctions()
    try:
        if setup.sandbox is not None:
            enter(Sandbox(**setup.sandbox), keep=[line.fileno()])
    except (SandboxRefused, OSError) as error:
        return send(line, {"refused": f"the sandbox cannot be entered: {error}"})
    try:
        functions_by_name = {name: functions.find(name) for name in setup.names}
        takes = {
            name: (named_by(function), inspect.iscoroutinefunction(function))
            for name, function in functions_by_name.items()
        }
    except (
        RewardError,
        ValueError,
        TypeError,
    ) as error:  # ValueError, TypeError: it has no signature
        return send(line, {"refused": str(error)})
    send(line, {"takes": takes})
    if setup.concurrent:
        asyncio.run(_serve_concurrently(line, functions_by_name))
    else:
        _serve(line, functions_by_name)


def _serve(line: socket.socket, functions: dict[str, Callable[..., Any]]) -> None:
    process = os.getpid()
    with asyncio.Runner() as runner, contextlib.suppress(EOFError):
        while True:
            request = receive(line)
            answer = _answer(request, functions[request["name"]], runner)
            if os.getpid() != process:
                os._exit(0)  # a child that the function has forked must not answer too
            send(line, answer)
            if answer.get("last"):
                return


def _answer(
    request: dict[str, Any], function: Callable[..., Any], runner: asyncio.Runner
) -> dict[str, Any]:
    watch = Stopwatch()
    try:
        with watch:
            result = function(**request["arguments"])
            if inspect.isawaitable(result):
                result = runner.run(_awaited(result))
    except BaseException as error:  # also SystemExit, and KeyboardInterrupt
        return _failure(request, raised(error, function), watch)
    return _scored(request, result, watch)


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


async def _serve_concurrently(
    line: socket.socket, functions: dict[str, Callable[..., Any]]
) -> None:
    async def answer(request: dict[str, Any], _body: bytes | bytearray) -> Message:
        return await _answer_concurrently(request, functions[request["name"]]), b""

    await serve(line, answer)


async def _answer_concurrently(
    request: dict[str, Any], function: Callable[..., Any]
) -> dict[str, Any]:
    deadline = asyncio.timeout(request["timeout"])
    watch = Stopwatch()
    try:
        async with deadline:
            with watch:
                result = await function(**request["arguments"])
        return _scored(request, result, watch)
    except BaseException as error:
        late = deadline.expired()
        return _failure(
            request,
            too_slow(request["timeout"], request["rows"]) if late else raised(error, function),
            watch,
        )


def _scored(request: dict[str, Any], result: Any, watch: Stopwatch) -> dict[str, Any]:
    try:
        with watch:
            scores = plain_scores(result, request["rows"])
    except CallFailed as misfit:
        return _failure(request, misfit, watch)
    return {"id": request["id"], "seconds": watch.seconds, "scores": scores}


def _failure(request: dict[str, Any], failure: CallFailed, watch: Stopwatch) -> dict[str, Any]:
    reason = {"error": str(failure), "place": failure.place, "misfit": failure.misfit}
    return {"id": request["id"], "seconds": watch.seconds, **reason, "last": is_full()}


if __name__ == "__main__":
    main()
