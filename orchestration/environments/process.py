"""A process of environments.

Its standard input is a socket to the pool (:mod:`orchestration.environments.pool`).

    pool ──▶ Setup ─▶ sandbox, limits ─▶ import the classes ─▶ {}, or {problems | refused} ──▶ pool
    pool ──▶ {id, call, key, …, timeout} ─▶ a LocalCaller ─▶ {id, reply}, or {id, error, place} ──▶ pool

``last`` in an answer: the process takes no further trajectory, as it is full, or a method hangs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import resource
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from stages.environments.classes import environments
from stages.environments.interface import (
    EnvironmentFailed,
    Reply,
    Trajectory,
    Turn,
    TurnTokens,
)
from stages.trajectories.local import LocalCaller
from stages.user_code import CodeUnusable

FILE_BYTES = 1 << 30  # of each file that it writes, its log too


@dataclass(frozen=True)
class Setup:
    """Arguments of a process: the classes ``use``, and their ``options``, as
    :func:`stages.environments.classes.environments` takes them; ``path`` of imports; ``memory``:
    bytes of data, 0 for no limit; ``sandbox``: None for none."""

    use: str | Mapping[str, str]
    options: Mapping[str, Any]
    path: list[str]
    memory: int = 0
    sandbox: Sandbox | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    line = take_line()
    head = receive(line)
    sandbox = head.pop("sandbox")
    setup = Setup(**head)
    prepare(setup.path, setup.memory)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, most))
    try:
        if sandbox is not None:
            enter(Sandbox(**sandbox), keep=[line.fileno()])
        caller = LocalCaller(environments(setup.use, setup.options))
    except (SandboxRefused, OSError) as error:
        return send(line, {"refused": f"the sandbox cannot be entered: {error}"})
    except CodeUnusable as error:
        return send(line, _problems(error))
    send(line, {})
    asyncio.run(_serve(line, caller))


async def _serve(line: socket.socket, caller: LocalCaller) -> None:
    async def answer(head: dict[str, Any], _body: bytes | bytearray) -> Message | None:
        try:
            result = await _called(caller, head)
        except CodeUnusable as error:
            result = _problems(error)
        except BaseException as error:
            place = error.place if isinstance(error, EnvironmentFailed) else ""
            reason = str(error) if isinstance(error, EnvironmentFailed) else repr(error)
            last = caller.hangs or is_full()
            result = {"error": reason, "place": place, "last": last}
        return None if head["call"] == "close" else (result, b"")

    await serve(line, answer)
    await caller.end()


async def _called(caller: LocalCaller, head: Mapping[str, Any]) -> dict[str, Any]:
    match head["call"]:
        case "declare":
            declared = await caller.declare()
            return {"declared": {name: dataclasses.asdict(each) for name, each in declared.items()}}
        case "open":
            reply = await caller.open(Trajectory(**head["trajectory"]), head["timeout"])
        case "step":
            reply = await caller.step(head["key"], _turn(head["turn"]), head["timeout"])
        case "finish":
            reply = await caller.finish(head["key"], head["timeout"])
        case _:
            await caller.close(head["key"])
            reply = Reply()
    return {"reply": dataclasses.asdict(reply)}


def _turn(fields: Mapping[str, Any]) -> Turn:
    tokens = fields["tokens"]
    return Turn(**{**fields, "tokens": None if tokens is None else TurnTokens(**tokens)})


def _problems(error: CodeUnusable) -> dict[str, Any]:
    return {"problems": [dataclasses.asdict(problem) for problem in error.problems]}


if __name__ == "__main__":
    main()
