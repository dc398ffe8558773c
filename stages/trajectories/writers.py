"""What the replies of an environment add to the tokens of its trajectory.

a class      messages ─────────────▶ the tokens of these, after the last turn
a program    its whole conversation ─▶ what is new after the longest beginning of it that ends with a turn
                                         ├ the last turn: nothing was changed
                                         └ an earlier one: the program has left out or changed messages, and
                                           the turns after it are cut off
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stages.environments.dialogue.interface import Dialogue
from stages.environments.dialogue.program import ProgramDialogue
from stages.environments.interface import EnvironmentFailed, Message, Reply, Request, Tool, Turn


class Writer(Protocol):
    """Writes one trajectory, reply by reply and turn by turn."""

    def write(self, reply: Reply, turns: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
        """Return after how many of ``turns``, the tokens of each, ``reply`` goes on, and the tokens
        of what stands between that turn and the next. Raises EnvironmentFailed."""

    def turn(self, token_ids: Sequence[int], truncated: bool, number: int) -> Turn:
        """Return the turn ``number`` as the environment gets it."""


class AppendingWriter:
    """Writes the trajectory of a class, which appends messages."""

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue = dialogue

    def write(self, reply: Reply, turns: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
        if not turns:
            return 0, self._dialogue.opening(reply.messages)
        return len(turns), self._dialogue.continuation(turns[-1], reply.messages)

    def turn(self, token_ids: Sequence[int], truncated: bool, number: int) -> Turn:
        return self._dialogue.turn(token_ids, truncated, number)


class RequestWriter:
    """Writes the trajectory of a program."""

    def __init__(self, dialogue: ProgramDialogue) -> None:
        self._program = dialogue
        self._messages = list[Message]()  # of the last request, and its turn
        self._tools: Sequence[Tool] = ()
        self._lengths = list[int]()  # of the conversation after each turn, in messages

    def write(self, reply: Reply, turns: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
        request = reply.request
        if request is None:
            raise EnvironmentFailed("a program's reply has no request")
        turns_kept = self._turns_kept(request)
        if turns_kept:
            new = request.messages[self._lengths[turns_kept - 1] :]
            dialogue = self._program.with_tools(request.tools)
            ids = dialogue.continuation(turns[turns_kept - 1], new)
        else:
            ids = self._program.after_prefix(request.messages, request.tools)
        self._messages = list(request.messages)
        self._tools = request.tools
        del self._lengths[turns_kept:]
        return turns_kept, ids

    def turn(self, token_ids: Sequence[int], truncated: bool, number: int) -> Turn:
        turn = self._program.with_tools(self._tools).turn(token_ids, truncated, number)
        self._messages.append(turn.message)
        self._lengths.append(len(self._messages))
        return turn

    def _turns_kept(self, request: Request) -> int:
        """Return how many turns ``request`` has as they were, with all that was before them."""
        if list(request.tools) != list(self._tools):
            return 0
        pairs = zip(self._messages, request.messages, strict=False)
        unchanged_messages = 0
        for before, now in pairs:
            if not is_alike(before, now):
                break
            unchanged_messages += 1
        return sum(length <= unchanged_messages for length in self._lengths)


def is_alike(before: Message, now: Message) -> bool:
    """Return whether a message is another one as a client gives it back: ids of tool calls may be
    others, blanks around what the assistant said may be gone, and thinking may be left out."""
    return _essence(before) == _essence(now)


def _essence(message: Mapping[str, Any]) -> tuple[Any, ...]:
    content = message.get("content") or ""
    if message["role"] != "assistant":
        return message["role"], content
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return message["role"], content.strip(), calls
