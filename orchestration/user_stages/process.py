"""The process of a user's stage.

Its standard input is a socket to its worker (:mod:`orchestration.user_stages.caller`).

    worker ──▶ Setup ─▶ tokenizer ─▶ sandbox ─▶ import and make the stage ─▶ {}, or {refused} ──▶ worker
    worker ──▶ {id, rows}, columns ─▶ process(rows) ─▶ {id}, columns, or {id, dropped | error | late} ──▶ worker

Columns are one block (:mod:`stages.flow.packed_rows`). ``late``: the call takes too long, and where
it is; it goes on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestration.logs import configure
from orchestration.processes.line import (
    Message,
    prepare,
    receive,
    send,
    serve,
    take_line,
)
from orchestration.sandbox.kernel import SandboxRefused
from orchestration.sandbox.sandbox import Sandbox, enter
from orchestration.streams import open_outputs
from pipeline.data.columns import Schema
from stages.flow.bounded_call import TimeLimit
from stages.flow.declarations import Drop, StageDeclaration
from stages.flow.packed_rows import packed_rows, unpacked_rows
from stages.flow.stage_calls import StageCalls, StageError, schema_of
from stages.flow.user_stage import stage_class


@dataclass(frozen=True)
class Setup:
    """Arguments of a stage's process: the class ``use``, made with ``options``; what it declares,
    with the type of each column; ``timeout`` of a call in seconds; ``tokenizer``: the model whose
    tokenizer it needs, "" for none; ``path`` of imports; ``sandbox``: None for none."""

    use: str
    options: dict[str, Any]
    declared: StageDeclaration
    timeout: float
    tokenizer: str
    path: list[str]
    sandbox: Sandbox | None = None

    def to_head(self) -> dict[str, Any]:
        """Return this as the head of a message."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, head: dict[str, Any]) -> Setup:
        """Return the setup that :meth:`to_head` wrote."""
        declared = StageDeclaration(**head["declared"])
        sandbox = head["sandbox"]
        return cls(
            **{
                **head,
                "declared": declared,
                "sandbox": None if sandbox is None else Sandbox(**sandbox),
            }
        )


def main(arguments: Sequence[str] | None = None) -> None:
    line = take_line()
    setup = Setup.of(receive(line))
    open_outputs()
    configure(terminal=False)
    prepare(setup.path)
    try:
        calls = _calls_of(setup, line)
    except (SandboxRefused, OSError) as error:
        return send(line, {"refused": f"the sandbox cannot be entered: {error}"})
    except Exception as error:
        return send(line, {"refused": str(error)})
    send(line, {})
    asyncio.run(_serve(line, calls))
    calls.close()


def _calls_of(setup: Setup, line: socket.socket) -> StageCalls:
    tokenizer = None
    if setup.tokenizer:
        from stages.model.load import load_tokenizer

        tokenizer = load_tokenizer(setup.tokenizer)
    if setup.sandbox is not None:
        enter(setup.sandbox, keep=[line.fileno()])
    stage = stage_class(setup.use)(**setup.options)
    return StageCalls(stage, setup.declared, tokenizer, setup.timeout)


async def _serve(line: socket.socket, calls: StageCalls) -> None:
    """Answer until the line ends. Calls that have not ended then are left."""
    declared = calls.declared
    schemas = schema_of(declared.needs), schema_of(declared.makes)

    async def answer(head: dict[str, Any], body: bytes | bytearray) -> Message:
        return await _answer(calls, schemas, head, bytearray(body))

    await serve(line, answer)


async def _answer(
    calls: StageCalls, schemas: tuple[Schema, Schema], head: dict[str, Any], body: bytearray
) -> Message:
    needs, makes = schemas
    answer = dict[str, Any]()
    columns = bytearray()
    try:
        result = await calls.call(unpacked_rows(needs, body, head["rows"]), head["rows"])
        if isinstance(result, Drop):
            answer["dropped"] = str(result.reason)
        else:
            columns = packed_rows(makes, result)
    except TimeLimit as late:
        answer["late"] = late.place
    except StageError as error:
        answer["error"] = str(error)
    except Exception as error:
        answer["error"] = f"stage {calls.declared.name!r}: {error!r}"
    return answer, columns


if __name__ == "__main__":
    main()
