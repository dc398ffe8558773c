"""Calls a user's stage in a process of its own, without what its worker has: clients of the index,
arenas, secrets.

    call ─▶ columns as a block ──▶ the process ─▶ process(rows) ──▶ a block, which is checked as a stranger's ─▶ columns
                                     └ it dies, or says what no stage can: the worker fails, and both are started again

The process is forked by a server that was started with the environment of a user's code. It ends
with the worker.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestration.processes.environment import of_user_code
from orchestration.processes.forkserver import Launch
from orchestration.processes.starter import FORKSERVER, Starter
from orchestration.processes.user_process import ProcessEnded, UserProcess
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sections import StageSection
from orchestration.sandbox.kernel import SandboxRefused
from orchestration.sandbox.sandbox import Sandbox
from orchestration.sandbox.user_code import found_sandbox, import_path, readable
from orchestration.user_stages.process import Setup
from stages.flow.bounded_call import TimeLimit
from stages.flow.declarations import Drop, Result, StageDeclaration
from stages.flow.packed_rows import BadRows, packed_rows, unpacked_rows
from stages.flow.stage_calls import StageCaller, StageError, StageProcessEnded, schema_of
from stages.flow.user_stage import ENTRY_POINTS
from stages.model.load import MADE_FROM_SEED, model_folder

ENTRY = "orchestration.user_stages.process"
START_SECONDS = 120.0  # to import the stage, and to make it
# in which the process reports that a call took too long; one that blocks it altogether cannot
GRACE_SECONDS = 5.0
END_SECONDS = 5.0  # in which it ends by itself, when its line has ended
LONGEST = 4000  # characters of a text from the process


def stage_process(
    recipe: Recipe, section: StageSection, declared: StageDeclaration, log: Path, worker: str
) -> StageProcess:
    """Return the process that calls the stage of ``section`` for ``worker``, whose log is
    ``log``."""
    model = recipe.model.source
    tokenizer = ""
    if "response_ids" in declared.needs:
        source = "tiny" if model == "mock" else model
        tokenizer = source if source in MADE_FROM_SEED else str(model_folder(source))
    read = readable(section.read)
    path = import_path([section.use])
    sandbox = (
        Sandbox(read=read, network=section.network, memory=recipe.reward.memory)
        if section.sandbox
        else None
    )
    setup = Setup(section.use, section.options, declared, section.timeout, tokenizer, path, sandbox)
    environment = of_user_code(os.environ, recipe.reward.environment)
    title = f"asyncdock stage {worker}"
    return StageProcess(
        setup, environment=environment, log=log, most=recipe.pipeline.arena, title=title
    )


class StageProcess(StageCaller):
    """A caller of the stage of ``setup`` in a process with ``environment``, whose output is
    appended to ``log``. ``most``: bytes of the columns of an answer. ``title``: of the process in
    `ps`."""

    def __init__(
        self, setup: Setup, *, environment: Mapping[str, str], log: Path, most: int, title: str
    ) -> None:
        self._setup = setup
        self._declared = setup.declared
        self._environment = dict(environment)
        self._log = log
        self._most = most
        self._title = title
        self._needs, self._makes = schema_of(self._declared.needs), schema_of(self._declared.makes)
        self._starter: Starter | None = None
        self._process: UserProcess | None = None

    async def open(self) -> None:
        """Start the process. Raises StageError when the stage cannot be made, StageProcessEnded."""
        if self._setup.sandbox is not None:
            sandbox = await asyncio.to_thread(self._found_sandbox, self._setup.sandbox)
            self._setup = dataclasses.replace(self._setup, sandbox=sandbox)
        preload = (ENTRY, "stages.model.load") if self._setup.tokenizer else (ENTRY,)
        self._starter = Starter(FORKSERVER, preload=preload, environment=self._environment)
        launch = Launch(
            ENTRY + ":main", [], self._environment, os.getcwd(), str(self._log), self._title
        )
        self._process = process = await UserProcess.start(self._starter, launch, self._most)
        name = self._declared.name
        try:
            async with asyncio.timeout(START_SECONDS):
                await process.send(self._setup.to_head())
                head, _ = await process.receive()
        except TimeoutError:
            raise StageError(
                f"stage {name!r}: making it took more than {START_SECONDS:g} s; see {self._log}"
            ) from None
        except ProcessEnded as ended:
            raise StageProcessEnded(f"stage {name!r}: making it {ended}; see {self._log}") from None
        if "refused" in head:
            raise StageError(f"stage {name!r}: {_text(head['refused'])}")
        process.begin()

    def _found_sandbox(self, sandbox: Sandbox) -> Sandbox:
        """Return ``sandbox`` as this machine gives it. Raises StageError where it gives none."""
        try:
            return found_sandbox(sandbox, [self._setup.use], ENTRY_POINTS)
        except SandboxRefused as refused:
            raise StageError(f"stage {self._declared.name!r}: {refused}") from None

    async def call(self, columns: Mapping[str, Any], rows: int) -> Result:
        assert self._process is not None, "open() was not called"
        name = self._declared.name
        body = packed_rows(self._needs, columns)
        try:
            async with asyncio.timeout(self._setup.timeout + GRACE_SECONDS):
                head, reply_body = await self._process.ask({"rows": rows}, body)
        except TimeoutError:
            raise TimeLimit("at a place that its process could not tell") from None
        except ProcessEnded as ended:
            failed = StageError if ended.is_bad else StageProcessEnded
            raise failed(f"stage {name!r} {ended} in process; see {self._log}") from None
        if "late" in head:
            raise TimeLimit(_text(head["late"]))
        if "error" in head:
            raise StageError(_text(head["error"]))
        if "dropped" in head:
            if self._declared.takes == "rows":
                raise StageError(
                    f"stage {name!r} takes rows, and its process dropped them; only "
                    f"groups can be dropped"
                )
            return Drop(_text(head["dropped"]))
        try:
            return unpacked_rows(self._makes, bytearray(reply_body), rows)
        except BadRows as error:
            raise StageError(
                f"stage {name!r} made its process send what are not its columns: {error}"
            ) from None

    async def close(self) -> None:
        """End the process, and what it has started."""
        if self._process is not None:
            await self._process.end(END_SECONDS)
        if self._starter is not None:
            self._starter.close()


def _text(value: Any) -> str:
    return str(value)[:LONGEST]
