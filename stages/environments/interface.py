"""What a trajectory's environment gets and answers, and how it is called.

    open(trajectory) ──▶ Reply ──▶ rollout generates a turn ──▶ step(key, Turn) ──▶ Reply ──▶ … ──▶ close(key)
                           └ messages before the first turn           └ messages, a reward, whether it was the last
                             or a program's Request                     or its next Request
                                                           a limit ends it ──▶ finish(key) ──▶ Reply: the reward

Importing this needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

Message = dict[str, Any]
"""A message of a conversation, as chat templates read it: ``role``, ``content``, and of an assistant
``tool_calls``, of a tool ``name`` and ``tool_call_id``."""

Tool = Mapping[str, Any]
"""The JSON Schema of a function, as chat templates read it."""


COLUMN = "environment"  # of a prompt's row: which one, where the run has several


@dataclass(frozen=True)
class EnvironmentDeclaration:
    """What is known of an environment before it is opened.

    ``tools``: what the policy may call. ``replayable``: opened again with the same row and seed, and
    given the same turns, it gives the same replies. ``gives_reward``: its replies have the reward.
    ``roles``: of the messages after a turn. ``requests``: it is a program: each of
    its replies has a Request. ``waits``: its opening takes until a program from outside comes.
    """

    tools: tuple[Tool, ...] = ()
    replayable: bool = False
    gives_reward: bool = False
    roles: tuple[str, ...] = ("tool",)
    requests: bool = False
    waits: bool = False


@dataclass(frozen=True)
class Declarations:
    """The declarations of a run's environments, ``by_name`` ("": its only one), as its processes
    pass them on."""

    by_name: Mapping[str, EnvironmentDeclaration]

    def to_json(self) -> str:
        return json.dumps({name: asdict(each) for name, each in self.by_name.items()})

    @classmethod
    def from_json(cls, text: str) -> Declarations:
        by_name = {}
        for name, fields in json.loads(text).items():
            sequences = {key: tuple(fields[key]) for key in ("tools", "roles")}
            by_name[name] = EnvironmentDeclaration(**fields | sequences)
        return cls(by_name)


@dataclass(frozen=True)
class Trajectory:
    """A trajectory that begins.

    ``key``: its name in all further calls. ``environment``: which one, where the run has several
    (""). ``row``: the columns of the prompt's row, with ``prompt``. ``seed``: of its random numbers,
    the same when it begins again.
    """

    key: str
    row: Mapping[str, Any]
    seed: int
    environment: str = ""


@dataclass(frozen=True)
class Turn:
    """What the policy generated at one go.

    ``message``: as an assistant's message, with ``tool_calls`` where it calls tools, each
    ``{"id": ..., "type": "function", "function": {"name": ..., "arguments": {...}}}``. ``fault``: why
    a tool call in it cannot be read (""): the content is all of its text then. ``truncated``: it was
    cut at its longest. ``tokens``: for a program. ``stop``: the stop string at which it ended ("").
    """

    message: Message
    fault: str = ""
    truncated: bool = False
    tokens: TurnTokens | None = None
    stop: str = ""


@dataclass(frozen=True)
class TurnTokens:
    """The tokens of a turn: ``prompt_ids``, all before it, ``token_ids``, and the ``logprobs`` and
    policy ``versions`` of these. The lists are empty unless the request asks for them; ``prompt``
    and ``generated`` are how many there are, and ``cached`` how many of the prompt were not computed
    again."""

    prompt: int
    generated: int
    prompt_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    versions: Sequence[int] = ()
    cached: int = 0


@dataclass(frozen=True)
class Request:
    """What a program asks the policy to go on with: all of its conversation, and the ``tools`` that
    the turn may call. The last of ``messages`` is not the assistant's. ``prompt_ids``: all tokens
    before the turn, in place of ``messages``. ``wants_tokens``: the turn is to come with its
    tokens."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    wants_tokens: bool = False
    prompt_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Reply:
    """The environment's answer to a turn, or to the beginning.

    ``messages`` are appended to the conversation. ``reward`` of the turn; None: none. A
    trajectory's reward is the sum of its replies'. ``done``: the trajectory ends here. ``calls``:
    how many tools were called, and ``failed_calls``, how many of these failed. ``request``: of a
    program, in place of ``messages``.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    calls: int = 0
    failed_calls: int = 0
    request: Request | None = None


class EnvironmentFailed(RuntimeError):
    """A call of an environment raised, took too long, or its process ended: its trajectory cannot go
    on. ``place`` is the file and line, where known."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place


def environment_of(row: Mapping[str, Any], names: Collection[str]) -> str:
    """Return which of a run's environments ``names`` ("": its only one) the prompt's ``row`` wants.
    Raises EnvironmentFailed."""
    if "" in names:
        return ""
    name = row.get(COLUMN)
    if not isinstance(name, str) or name not in names:
        raise EnvironmentFailed(f"the row has {COLUMN} = {name!r}; give one of {sorted(names)}")
    return name


class EnvironmentCaller(Protocol):
    """Calls the environments of many trajectories, each in an order, different ones at the same
    time.

    ``places``: trajectories that can be open at the same time; a further one waits. A trajectory of
    which a call raised EnvironmentFailed is not open any more.
    """

    places: int

    async def declare(self) -> Mapping[str, EnvironmentDeclaration]:
        """Return the declarations of the run's environments by name ("": its only one). Raises
        CodeUnusable for a name that is none."""

    async def open(self, trajectory: Trajectory, timeout: float) -> Reply:
        """Begin. Raises EnvironmentFailed, also after ``timeout`` seconds."""

    async def step(self, key: str, turn: Turn, timeout: float) -> Reply:
        """Answer a turn. Raises EnvironmentFailed; KeyError for a trajectory that is not open
        here."""

    async def finish(self, key: str, timeout: float) -> Reply:
        """Return the last reply, with the reward that is due, of a trajectory that ended by a limit:
        no reply was ``done``. Raises as :meth:`step`."""

    def knows(self, key: str) -> bool:
        """Return whether the trajectory ``key`` is open here."""

    async def close(self, key: str) -> None:
        """Let the trajectory go. Does nothing for one that is not open."""

    async def end(self) -> None:
        """Close all, and end the processes."""
