"""A user's class as an environment, in the shape of TRL's ``environment_factory``.

    reset(**row) ─▶ a user message ─▶ turn ─┬─ calls tools, which are public methods ─▶ their results ─▶ turn …
                                            ├─ calls none ─▶ the end ─▶ get_reward()
                                            └─ of a class with step: step(text) ─▶ a user message, a reward, the end

Methods are plain or async. Plain ones of a trajectory are called in a thread of its own, where no
handlers of signals can be set; async ones on the event loop. A tool that raises answers the turn
with its error; what any other method raises ends the trajectory. Importing this needs no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import inspect
import json
import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from pipeline.compat.extras import install, is_installed
from pipeline.problems import Problem
from stages.environments.interface import (
    EnvironmentDeclaration,
    EnvironmentFailed,
    Message,
    Reply,
    Trajectory,
    Turn,
)
from stages.rewards.calls import named_by, plain_number, raised
from stages.threads import CallThread
from stages.user_code import CodeUnusable, find, place_in, place_of, shown

ENTRY_POINTS = "asyncdock.environments"
BUILT_IN = {  # by name
    "calculator": "stages.tasks.calculator:Calculator",
    "guess": "stages.tasks.guess:Guess",
    "maze": "stages.tasks.maze:MazeWalk",
    "sessions": "stages.environments.programs.outside:sessions",
}
LIBRARIES = {  # by their module: of "module:name", the class that is made with this name
    "reasoning_gym": "stages.environments.libraries.reasoning_gym:ReasoningGym",
    "skyrl_gym": "stages.environments.libraries.skyrl_gym:SkyRLGym",
    "textarena": "stages.environments.libraries.textarena:TextArena",
}
PROGRAM_LIBRARIES = {  # the same, whose method ``solve`` is a program
    "verifiers": "stages.environments.libraries.verifiers:VerifiersTaskset",
}
KEY = "environment.use"
NO_TOOLS = ("reset", "step", "get_reward", "close")
SCHEMA_LIBRARY = "transformers.utils.chat_template_utils"  # that schema_of imports
MOST_CHARACTERS = 65_536  # that an environment adds after one turn
CLOSE_SECONDS = 5.0  # of the method close

Outcome = tuple[Any, BaseException | None]  # what a call returned, or what it raised


@dataclass(frozen=True)
class EnvironmentFactory:
    """Makes environments: ``make``, which the recipe calls ``use``, called with ``options``."""

    use: str
    make: Callable[..., Any]
    options: Mapping[str, Any]

    @property
    def is_program(self) -> bool:
        """Whether ``make`` is a program: an async function, or one that takes a ``session``."""
        if isinstance(self.make, type | partial):
            return False
        return inspect.iscoroutinefunction(self.make) or "session" in (named_by(self.make) or ())

    @property
    def constructor(self) -> Callable[..., Any]:
        """The function in whose file an error of ``make`` is sought."""
        if isinstance(self.make, partial):
            return self.make.func.__init__  # type: ignore[misc]
        return self.make.__init__ if isinstance(self.make, type) else self.make  # type: ignore[misc]

    def declare(self) -> EnvironmentDeclaration:
        """Make an environment, and return what it declares. Raises CodeUnusable."""
        if self.is_program:
            if "client" in (named_by(self.make) or ()) and not is_installed("openai"):
                reason = "takes a client, and openai is not installed"
                raise CodeUnusable(Problem(KEY, self.use, reason, install("agents")))
            return EnvironmentDeclaration(
                replayable=bool(getattr(self.make, "replayable", False)),
                gives_reward=bool(getattr(self.make, "gives_reward", True)),
                roles=(),
                requests=True,
                waits=bool(getattr(self.make, "waits", False)),
            )
        try:
            instance = self.make(**self.options)
        except (Exception, SystemExit) as error:
            place = place_of(error, self.constructor)
            reason = f"cannot be made: it {raised(error, self.make)} ({place})"
            fix = "correct its constructor, or environment.options"
            raise CodeUnusable(Problem(KEY, self.use, reason, fix)) from error
        if not callable(getattr(instance, "reset", None)):
            fix = "write reset(**row), which returns None or a text"
            raise CodeUnusable(Problem(KEY, self.use, "has no method reset", fix))
        schemas, problems = [], []
        for name, method in tools_of(instance).items():
            try:
                schemas.append(schema_of(method))
            except Exception as error:  # transformers has several of its own
                fix = f"write types and a docstring with Args: for it, or call it _{name}"
                reason = f"has a tool {name!r} without a schema: {error}"
                problems.append(Problem(KEY, self.use, reason, fix))
        if problems:
            raise CodeUnusable(*problems)
        return EnvironmentDeclaration(
            tools=tuple(schemas),
            replayable=bool(getattr(instance, "replayable", False)),
            gives_reward=gives_reward(instance),
            roles=("user",) if answers_text(instance) else ("tool",),
        )


def environments(
    use: str | Mapping[str, str], options: Mapping[str, Any]
) -> dict[str, EnvironmentFactory]:
    """Return the factories of a recipe's environments by name ("": its only one).

    ``use``: ``module:Class``, or several by the names that rows have in their column
    ``environment``. ``options``: keyword arguments of the class; of several, by their names. Raises
    CodeUnusable.
    """
    uses = {"": use} if isinstance(use, str) else use
    by_name = {"": options} if isinstance(use, str) else options
    factories = {}
    for name, place in uses.items():
        library, _, member = place.partition(":")
        if member and library in LIBRARIES:
            make: Any = partial(pkgutil.resolve_name(LIBRARIES[library]), member)
        elif member and library in PROGRAM_LIBRARIES:
            make = _program_of(place, PROGRAM_LIBRARIES[library], member, by_name.get(name, {}))
        else:
            make = find(
                KEY, place, BUILT_IN, lambda: importlib.metadata.entry_points(group=ENTRY_POINTS)
            )
        if not callable(make):
            reason = f"is a {type(make).__name__}, not a class"
            raise CodeUnusable(Problem(KEY, place, reason, "correct the name"))
        factories[name] = EnvironmentFactory(place, make, by_name.get(name, {}))
    return factories


def _program_of(
    use: str, library: str, member: str, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the program that ``library`` makes of ``member``. Raises CodeUnusable."""
    try:
        program: Callable[..., Any] = pkgutil.resolve_name(library)(member, **options).solve
    except (Exception, SystemExit) as error:
        fix = "correct the name, or environment.options"
        raise CodeUnusable(Problem(KEY, use, f"cannot be made: {error}", fix)) from error
    return program


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON Schema of ``tool``, from its types and its docstring.

    Raises what the library raises. It would import torch, to know a type of audio: that takes
    seconds, and temporary files, which a sandbox may refuse.
    """
    from transformers.utils import chat_template_utils as library

    with mock.patch.object(library, "is_torch_available", return_value=False, create=True):
        schema: dict[str, Any] = library.get_json_schema(tool)
    return schema


def tools_of(instance: Any) -> dict[str, Callable[..., Any]]:
    """Return the methods of ``instance`` that the policy may call, by name; none of one with
    ``step``."""
    if answers_text(instance):
        return {}
    names = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
    return {
        name: getattr(instance, name)
        for name in names
        if not name.startswith("_") and name not in NO_TOOLS
    }


def answers_text(instance: Any) -> bool:
    """Return whether ``instance`` answers the text of a turn, and not calls of tools."""
    return hasattr(type(instance), "step")


def gives_reward(instance: Any) -> bool:
    """Return whether ``instance`` knows the reward: by ``get_reward()``, or an attribute ``reward``
    that it has from the beginning, or that ``reset`` names, unless its attribute ``gives_reward``
    says otherwise."""
    code = getattr(inspect.unwrap(type(instance).reset), "__code__", None)
    has_attribute = "reward" in (*dir(instance), *(code.co_names if code else ()))
    is_tool = inspect.isfunction(inspect.getattr_static(instance, "reward", None))
    known = (has_attribute and not is_tool) or hasattr(type(instance), "get_reward")
    return bool(getattr(instance, "gives_reward", known))


def reset_columns(instance: Any, trajectory: Trajectory) -> dict[str, Any]:
    """Return the columns of the row that ``reset`` names, or all. Where it names ``seed``, it gets
    the trajectory's, unless the row has one."""
    parameters = inspect.signature(instance.reset).parameters
    columns = dict(trajectory.row)
    if trajectory.environment:
        columns.pop("environment", None)
    if "seed" in parameters:
        columns = {"seed": trajectory.seed, **columns}
    names = named_by(instance.reset)
    return {name: value for name, value in columns.items() if names is None or name in names}


class ClassEnvironment:
    """A trajectory of an environment of ``factory``. Its calls are made one after the other.

    All raise EnvironmentFailed.
    """

    def __init__(self, factory: EnvironmentFactory) -> None:
        self._factory = factory
        self._thread = CallThread(f"environment {factory.use}")
        self._process = os.getpid()
        self._instance: Any = None
        self._tools: dict[str, Callable[..., Any]] = {}
        self._calls: tuple[str, Callable[..., Any]] = ("", factory.make)  # the last one

    async def open(self, trajectory: Trajectory) -> Reply:
        self._instance = instance = await self._must(
            "__init__", self._factory.make, **self._factory.options
        )
        self._tools = tools_of(instance)
        columns = await self._must("reset", partial(reset_columns, instance, trajectory))
        text = await self._must("reset", instance.reset, **columns)
        if text is not None and not isinstance(text, str):
            raise self._failed(f"returned {shown(text)}; a text or None is wanted")
        return Reply(_cut(messages_of(text)))

    async def step(self, turn: Turn) -> Reply:
        if answers_text(self._instance):
            return await self._step_by_text(turn)
        calls = turn.message.get("tool_calls") or ()
        if not calls and not turn.fault:
            return await self.finish()
        messages = []
        failed_calls = 0
        for call in calls:
            name = str(call["function"].get("name"))
            content, error = await self._result(name, call["function"].get("arguments") or {})
            failed_calls += error is not None
            ids = {"tool_call_id": call["id"]} if call.get("id") else {}
            messages.append({"role": "tool", "name": name, **ids, "content": content})
        if turn.fault:
            failed_calls += 1
            messages.append({"role": "tool", "name": "", "content": _error_text(turn.fault)})
        return Reply(_cut(messages), calls=len(messages), failed_calls=failed_calls)

    async def finish(self) -> Reply:
        """Return the last reply, with the reward of the trajectory."""
        instance = self._instance
        reward = None
        if hasattr(type(instance), "get_reward"):
            reward = self._number(await self._must("get_reward", instance.get_reward))
        elif gives_reward(instance) and not answers_text(instance):
            value = await self._must("reward", partial(getattr, instance, "reward", None))
            reward = self._number(value)
        return Reply(reward=reward, done=True)

    async def close(self) -> None:
        """Call its method ``close``, if it has one, whatever that raises, and end its thread."""
        if callable(close := getattr(self._instance, "close", None)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._call(close)
        self._thread.end()

    def abandon(self) -> CallThread:
        """Return its thread, which ends when the call returns that is made in it."""
        self._thread.end()
        return self._thread

    def doing(self) -> tuple[str, str]:
        """Return the method that was called last, and the line where it is."""
        method, function = self._calls
        frame = None if inspect.iscoroutinefunction(function) else self._thread.frame()
        return f"{self._factory.use}.{method}", place_in(frame, function)

    async def _step_by_text(self, turn: Turn) -> Reply:
        result = await self._must("step", self._instance.step, turn.message.get("content") or "")
        answer, error = await self._call(partial(step_answer, result))
        if error is not None:
            raise self._failed(f"returned {shown(result)}: {error}")
        messages, value, done = answer
        reward = self._number(value)
        if hasattr(type(self._instance), "get_reward"):
            reward = (await self.finish()).reward if done else None
        elif reward is not None and not gives_reward(self._instance):
            raise self._failed("returned a reward; write gives_reward = True in its class")
        return Reply(_cut(messages), reward, done)

    async def _result(self, name: str, arguments: Any) -> Outcome:
        """Return the text that answers a call of a tool, and the error in it."""
        tool = self._tools.get(name)
        if tool is None:
            error: BaseException = LookupError(
                f"there is no tool {name!r}; the tools are {[*self._tools]}"
            )
            return _error_text(error), error
        signature = inspect.signature(tool)
        try:
            signature.bind(**arguments)
        except TypeError as error:
            names = [*signature.parameters]
            return _error_text(f"{name}: {error}; its arguments are {names}"), error
        self._calls = (name, tool)
        result, raised_error = await self._call(tool, **arguments)
        if raised_error is None and not isinstance(result, str):
            written = partial(json.dumps, result, default=str, ensure_ascii=False)
            result, raised_error = await self._call(written)
        if raised_error is None:
            return result, None
        if isinstance(raised_error, MemoryError) or not isinstance(raised_error, Exception):
            raise self._failed(str(raised(raised_error, tool)), place_of(raised_error, tool))
        return _error_text(raised_error), raised_error

    async def _must(
        self, method: str, function: Callable[..., Any], /, *arguments: Any, **named: Any
    ) -> Any:
        """Return what a call of the user's ``method`` returns."""
        self._calls = (method, function)
        result, error = await self._call(function, *arguments, **named)
        if error is not None:
            seen = self._factory.constructor if method == "__init__" else function
            raise self._failed(str(raised(error, function)), place_of(error, seen)) from error
        return result

    async def _call(
        self, function: Callable[..., Any], /, *arguments: Any, **named: Any
    ) -> Outcome:
        work = partial(function, *arguments, **named)
        result: Any = None
        try:
            if inspect.iscoroutinefunction(function):
                return await work(), None
            result, error = await self._thread.run(partial(_attempt, work))
            if error is None and inspect.isawaitable(result):
                result = await result
            return result, error
        except BaseException as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return None, error
        finally:
            if os.getpid() != self._process:
                os._exit(0)  # a child that the method has forked must not answer too

    def _number(self, value: Any) -> float | None:
        score = plain_number(value)
        if isinstance(score, str):
            raise self._failed(score.replace("as a score", "as a reward"))
        return score

    def _failed(self, reason: str, place: str = "") -> EnvironmentFailed:
        method, line = self.doing()
        return EnvironmentFailed(f"{method} {reason}", place or line)


def _attempt(work: Callable[[], Any]) -> Outcome:
    """Call ``work``. A future cannot hold everything that it may raise, as StopIteration."""
    try:
        return work(), None
    except BaseException as error:
        return None, error


def step_answer(result: Any) -> tuple[list[Message], Any, bool]:
    """Return the messages, the reward and the end that ``step`` returned. Raises ValueError.

    ``result``: None at the end, a text, ``(text, reward)``, ``(text, reward, done)``, a tuple of
    gym or gymnasium, or what has ``observation`` or ``observations``, ``reward`` and ``done``.
    """
    if result is None or isinstance(result, str):
        return messages_of(result), None, result is None
    if isinstance(result, tuple) and 2 <= len(result) <= 5:
        observation, reward, *ends = result
        ends = ends[: 2 if len(ends) == 3 else 1]  # gymnasium's: terminated, truncated
        done = any(map(bool, ends)) if ends else observation is None
    else:
        read = result.get if isinstance(result, Mapping) else partial(getattr, result)
        observation = read("observations", None)
        if observation is None:
            observation = read("observation", None)
        reward = read("reward", None)
        done = read("done", None)
        if done is None:
            raise ValueError("None, a text, (text, reward, done) or an object with them is wanted")
    messages = messages_of(observation)
    if not messages and not done:
        raise ValueError("without a text it must be done")
    return messages, reward, bool(done)


def messages_of(observation: Any) -> list[Message]:
    """Return ``observation``, None, a text or messages of a user or a tool, as messages.

    Raises ValueError.
    """
    if observation is None:
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if not isinstance(observation, Sequence) or not all(map(is_message, observation)):
        raise ValueError(f"{shown(observation)} is no text, and no list of messages")
    return [dict(message) for message in observation]


def is_message(message: Any) -> bool:
    """Return whether ``message`` is one that an environment may add."""
    return (
        isinstance(message, Mapping)
        and message.get("role") in ("user", "tool", "system")
        and isinstance(message.get("content"), str)
    )


def _error_text(error: object) -> str:
    return json.dumps({"error": str(error) or type(error).__name__}, ensure_ascii=False)


def _cut(messages: list[Message]) -> tuple[Message, ...]:
    """Return ``messages`` within MOST_CHARACTERS, and as text that can be encoded."""
    room = MOST_CHARACTERS
    for message in messages:
        content = message["content"]
        message["content"] = content[:room].encode(errors="replace").decode()
        if len(content) > room:
            message["content"] += f"\n[cut: it has {len(content)} characters]"
        room = max(0, room - len(content))
    return tuple(messages)
