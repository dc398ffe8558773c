"""The pool of processes in which environments of a user's classes are called, so that what one does
harms the trajectories of its process alone.

    open ─▶ the least loaded process ◀── forked by a light fork server; a trajectory stays in it to its end
              ├ a call fails, or takes too long ─▶ its trajectory is closed
              ├ a plain method hangs, memory is full ─▶ no further trajectory; it ends after its last one
              └ it dies, or its event loop is blocked ─▶ all its trajectories are lost; another one is started

JSON over a socket pair: classes travel by their names. The processes end with this one, also when
it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from orchestration.environments.process import Setup
from orchestration.processes.environment import of_user_code
from orchestration.processes.forkserver import Launch
from orchestration.processes.starter import FORKSERVER, Starter
from orchestration.processes.user_process import LOG_BYTES, ProcessEnded, UserProcess, bound_log
from orchestration.sandbox.kernel import SandboxRefused
from orchestration.sandbox.sandbox import Sandbox
from orchestration.sandbox.user_code import found_sandbox, import_path
from pipeline.first_of import cancel_all
from pipeline.problems import Problem
from stages.environments.classes import ENTRY_POINTS, KEY, SCHEMA_LIBRARY, is_message
from stages.environments.interface import (
    EnvironmentCaller,
    EnvironmentDeclaration,
    EnvironmentFailed,
    Reply,
    Trajectory,
    Turn,
)
from stages.rewards.calls import LARGEST
from stages.trajectories.local import take_place, unknown_environment
from stages.user_code import CodeUnusable

ENTRY = "orchestration.environments.process"
START_SECONDS = 120.0  # to import the classes; to declare them
# in which a process reports that a call took too long, before it is ended
GRACE_SECONDS = 5.0
END_SECONDS = 5.0  # in which environments are closed, at the end
# what a sandbox allows besides for each of its trajectories
TRAJECTORY_PROCESSES = 2  # its thread, which counts as one, and a process that it starts
TRAJECTORY_FILES = 8
NO_REPLY = "the environment made its process send what is no reply"
REPLY = TypeAdapter(Reply)
PROBLEMS = TypeAdapter(list[Problem])
DECLARATIONS = TypeAdapter(dict[str, EnvironmentDeclaration])


class EnvironmentPool(EnvironmentCaller):
    """Calls the environments ``use``, made with ``options``
    (:func:`stages.environments.classes.environments`), in ``processes`` processes, which are
    started as they are needed, each with ``concurrency`` trajectories at most.

    ``memory``: bytes of data that each may hold, 0 for no limit. ``log`` gets what environments
    print. ``sandbox``: that each enters. ``environment``: that they see (default: this process's,
    without our own variables).
    """

    def __init__(
        self,
        use: str | Mapping[str, str],
        options: Mapping[str, Any],
        *,
        processes: int,
        concurrency: int,
        memory: int,
        log: Path,
        sandbox: Sandbox | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.places = processes * concurrency
        self._names = {"": use} if isinstance(use, str) else dict(use)
        self._setup = Setup(use, options, import_path([*self._names.values()]), memory, sandbox)
        self._most = processes
        self._concurrency = concurrency
        self._log = log
        self._environment = of_user_code(os.environ, None) if environment is None else environment
        self._free = asyncio.Semaphore(self.places)
        self._preparing = asyncio.Lock()
        self._starter: Starter | None = None
        self._hosts: list[_Host] = []
        self._host_of: dict[str, _Host] = {}

    async def declare(self) -> Mapping[str, EnvironmentDeclaration]:
        """A process of its own declares, forked by a server that has imported the library of
        schemas: it is large, and not every sandbox lets it be imported."""
        with contextlib.closing(self._starter_of(ENTRY, SCHEMA_LIBRARY)) as starter:
            process = await self._start(starter)
            try:
                async with asyncio.timeout(START_SECONDS):
                    answer, _ = await process.ask({"call": "declare"})
            except TimeoutError:
                raise self._unusable(f"takes more than {START_SECONDS:g} s to declare") from None
            except ProcessEnded as ended:
                raise self._unusable(str(ended)) from None
            finally:
                await process.end()
        self._check(answer)
        try:
            return DECLARATIONS.validate_python(answer.get("declared"))
        except ValidationError:
            raise self._unusable(answer.get("error", "declares what is no declaration")) from None

    async def open(self, trajectory: Trajectory, timeout: float) -> Reply:
        key = trajectory.key
        await self.close(key)
        if trajectory.environment not in self._names:
            raise unknown_environment(trajectory.environment, self._names)
        await take_place(self._free, self.places, timeout)
        host = self._least_loaded()
        host.keys.add(key)
        self._host_of[key] = host
        return await self._call(
            key, timeout, call="open", trajectory=dataclasses.asdict(trajectory)
        )

    async def step(self, key: str, turn: Turn, timeout: float) -> Reply:
        return await self._call(key, timeout, call="step", turn=dataclasses.asdict(turn))

    async def finish(self, key: str, timeout: float) -> Reply:
        return await self._call(key, timeout, call="finish")

    def knows(self, key: str) -> bool:
        return key in self._host_of and not self._host_of[key].lost

    async def close(self, key: str) -> None:
        host = self._host_of.get(key)
        if host is not None:
            self._forget(key)
            if not host.lost and host.process.done():
                await host.process.result().send({"call": "close", "key": key})

    async def end(self) -> None:
        for host in self._hosts:
            host.patience = END_SECONDS
        await cancel_all(*(host.task for host in self._hosts))
        if self._starter is not None:
            self._starter.close()
            self._starter = None

    async def _call(self, key: str, timeout: float, **request: Any) -> Reply:
        if not self.knows(key):
            raise KeyError(key)
        host = self._host_of[key]
        reply = None
        try:
            process = await asyncio.shield(host.process)
            async with asyncio.timeout(timeout + GRACE_SECONDS):
                answer, _ = await process.ask({**request, "key": key, "timeout": timeout})
            if answer.get("last"):
                host.is_open = False
            if "error" in answer:
                raise EnvironmentFailed(str(answer["error"]), str(answer["place"]))
            reply = _reply_of(answer)
            return reply
        except TimeoutError:
            host.lose()
            reason = f"took more than {timeout:g} s, and blocked the event loop of its process"
            raise EnvironmentFailed(f"the environment {reason}") from None
        except ProcessEnded as ended:
            raise EnvironmentFailed(f"the environment {ended}") from None
        finally:
            bound_log(self._log, LOG_BYTES)
            if reply is None:
                await self.close(key)

    def _least_loaded(self) -> _Host:
        """Return a process with room for a trajectory; a new one where all have some and there may
        be more."""
        hosts = [host for host in self._hosts if host.is_open and not host.lost]
        host = min(hosts, key=lambda host: len(host.keys), default=None)
        if host is None or (host.keys and len(hosts) < self._most):
            host = _Host(asyncio.get_running_loop().create_future())
            host.task = asyncio.create_task(self._keep(host))
            self._hosts.append(host)
        return host

    async def _keep(self, host: _Host) -> None:
        """Start the process of ``host``, and end it when its line ends, or when it is cancelled."""
        process = None
        reason = "the pool was ended"
        try:
            self._starter = self._starter or self._starter_of(ENTRY)
            process = await self._start(self._starter)
            host.process.set_result(process)
            await process.wait()
        except Exception as error:
            reason = str(error)
        finally:
            host.is_lost = True
            if not host.process.done():
                host.process.set_exception(EnvironmentFailed(reason))
                host.process.exception()  # what waited for it may have been closed
            for key in list(host.keys):
                self._forget(key)
            self._hosts.remove(host)
            if process is not None:
                await process.end(host.patience)

    async def _start(self, starter: Starter) -> UserProcess:
        """Start a process that has imported the classes. Raises CodeUnusable, OSError."""
        async with self._preparing:
            if self._setup.sandbox is not None and not self._setup.sandbox.mechanism:
                self._setup = dataclasses.replace(self._setup, sandbox=await self._found_sandbox())
        where = (dict(self._environment), os.getcwd(), str(self._log), "asyncdock environments")
        process = await UserProcess.start(starter, Launch(ENTRY + ":main", [], *where))
        try:
            await process.send(dataclasses.asdict(self._setup))
            self._check(await process.greet(START_SECONDS))
        except BaseException as error:
            await process.end()
            if isinstance(error, ProcessEnded):
                raise self._unusable(f"importing it {error}; see {self._log}") from None
            raise
        return process

    def _starter_of(self, *preload: str) -> Starter:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        return Starter(FORKSERVER, preload=preload, environment=self._environment)

    async def _found_sandbox(self) -> Sandbox:
        assert self._setup.sandbox is not None
        limits = self._setup.sandbox
        sandbox = dataclasses.replace(
            limits,
            processes=limits.processes + TRAJECTORY_PROCESSES * self._concurrency,
            files=limits.files + TRAJECTORY_FILES * self._concurrency,
            memory=self._setup.memory,
        )
        names = [*self._names.values()]
        try:
            return await asyncio.to_thread(found_sandbox, sandbox, names, ENTRY_POINTS)
        except SandboxRefused as refused:
            raise self._unusable(str(refused)) from None

    def _check(self, head: Mapping[str, Any]) -> None:
        """Raise CodeUnusable where a process says so."""
        if "problems" in head:
            raise CodeUnusable(*PROBLEMS.validate_python(head["problems"]))
        if "refused" in head:
            raise self._unusable(str(head["refused"]))

    def _unusable(self, reason: str) -> CodeUnusable:
        return CodeUnusable(Problem(KEY, self._setup.use, reason))

    def _forget(self, key: str) -> None:
        host = self._host_of.pop(key)
        host.keys.discard(key)
        self._free.release()
        if not host.is_open and not host.keys:
            host.lose()


@dataclass(eq=False)
class _Host:
    """A process, the trajectories in it, and whether it takes further ones. ``patience``: seconds
    that it has to end by itself."""

    process: asyncio.Future[UserProcess]
    keys: set[str] = field(default_factory=set)
    task: asyncio.Task[None] | None = None
    is_open: bool = True
    is_lost: bool = False
    patience: float = 0.0

    @property
    def lost(self) -> bool:
        """Whether the process has ended, or is about to be ended."""
        return self.is_lost or (self.process.done() and self.process.result().ended)

    def lose(self) -> None:
        """End the process."""
        if not self.is_lost and self.task is not None:
            self.is_lost = True
            self.task.cancel()


def _reply_of(answer: Mapping[str, Any]) -> Reply:
    """Return the reply in the message of a process, which is not trusted.

    Raises EnvironmentFailed.
    """
    try:
        reply = REPLY.validate_python(answer.get("reply"))
    except ValidationError:
        raise EnvironmentFailed(NO_REPLY) from None
    if reply.request is not None:
        if reply.request.prompt_ids:
            return Reply(request=dataclasses.replace(reply.request, messages=(), tools=()))
        from stages.environments.programs.messages import RequestRefused, read_messages

        try:
            messages = read_messages([*reply.request.messages])
        except RequestRefused:
            raise EnvironmentFailed(NO_REPLY) from None
        return Reply(request=dataclasses.replace(reply.request, messages=messages))
    counts = 0 <= reply.failed_calls <= reply.calls <= len(reply.messages)
    if not (
        counts and abs(reply.reward or 0.0) <= LARGEST and all(map(is_message, reply.messages))
    ):
        raise EnvironmentFailed(NO_REPLY)
    return reply
