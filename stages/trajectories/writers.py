"""What the replies of an environment add to the tokens of its trajectory.

a class      messages ─────────────▶ the tokens of these, after the last turn
a program    its whole conversation ─▶ what is new after the longest beginning of it that ends with a turn
             (messages or tokens)        ├ the last turn: nothing was changed
                                         └ an earlier one: the program has left out or changed messages, and
                                           begins a branch there
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from stages.environments.dialogue.interface import Dialogue, MessagesRefused
from stages.environments.dialogue.program import ProgramDialogue
from stages.environments.interface import EnvironmentFailed, Message, Reply, Request, Tool, Turn


class Writer(Protocol):
    """Writes one trajectory, reply by reply and turn by turn. ``prefix_ids``: the tokens of the
    prompt, where a program gets the tokens of its turns; None: it gets none."""

    prefix_ids: Sequence[int] | None

    def write(self, reply: Reply, turns: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
        """Return behind which of ``turns``, the tokens of each, ``reply`` goes on, counted from 1
        (0: behind the prompt), and the tokens of what stands between that turn and the next. Raises
        EnvironmentFailed."""

    def turn(self, token_ids: Sequence[int], truncated: bool, number: int) -> Turn:
        """Return the turn ``number`` as the environment gets it."""


def writer_of(dialogue: Dialogue | ProgramDialogue) -> Writer:
    if isinstance(dialogue, ProgramDialogue):
        return RequestWriter(dialogue)
    return AppendingWriter(dialogue)


class AppendingWriter:
    """Writes the trajectory of a class, which appends messages."""

    prefix_ids: Sequence[int] | None = None

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue = dialogue

    def write(self, reply: Reply, turns: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
        if not turns:
            return 0, self._dialogue.opening(reply.messages)
        return len(turns), self._dialogue.continuation(turns[-1], reply.messages)

    def turn(self, token_ids: Sequence[int], truncated: bool, number: int) -> Turn:
        return self._dialogue.turn(token_ids, truncated, number)


@dataclass
class _Spoken:
    """What a request adds to the conversation that ends with turn ``after``, and the turn that
    answers it. ``is_of_tokens``: the request has tokens instead of messages."""

    after: int
    messages: list[Message]
    tools: Sequence[Tool]
    token_ids: list[int]
    is_of_tokens: bool


class RequestWriter:
    """Writes the trajectory of a program."""

    def __init__(self, dialogue: ProgramDialogue) -> None:
        self._program = dialogue
        self.prefix_ids: Sequence[int] | None = dialogue.prefix_ids
        self._spoken = list[_Spoken]()  # by turn; the last one may not be answered yet
        self._lengths = list[int]()  # of the conversation after each turn, in messages

    def write(self, reply: Reply, turns: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
        request = reply.request
        if request is None:
            raise EnvironmentFailed("a program's reply has no request")
        is_of_tokens = bool(request.prompt_ids)
        if is_of_tokens:
            after, ids = self._after_tokens(request.prompt_ids)
            new = request.messages
        elif after := self._after(request):
            new = request.messages[self._lengths[after - 1] :]
            dialogue = self._program.with_tools(request.tools)
            ids = dialogue.continuation(turns[after - 1], new)
        else:
            new = request.messages
            ids = self._program.after_prefix(request.messages, request.tools)
        self._spoken.append(_Spoken(after, [*new], request.tools, [*ids], is_of_tokens))
        return after, ids

    def turn(self, token_ids: Sequence[int], truncated: bool, number: int) -> Turn:
        spoken = self._spoken[-1]
        turn = self._program.with_tools(spoken.tools).turn(token_ids, truncated, number)
        spoken.messages.append(turn.message)
        spoken.token_ids.extend(token_ids)
        before = self._lengths[spoken.after - 1] if spoken.after else 0
        self._lengths.append(before + len(spoken.messages))
        return turn

    def _after(self, request: Request) -> int:
        """Return behind which turn ``request`` goes on, counted from 1: the one with the longest
        conversation that it begins with, of equal ones the last; 0: it begins anew."""
        fits = [
            number
            for number, length in enumerate(self._lengths, 1)
            if length <= len(request.messages) and not self._spoken[number - 1].is_of_tokens
        ]
        for number in sorted(fits, key=lambda number: (-self._lengths[number - 1], -number)):
            if list(self._spoken[number - 1].tools) == list(request.tools) and all(
                map(is_alike, self._conversation(number), request.messages)
            ):
                return number
        return 0

    def _after_tokens(self, prompt_ids: Sequence[int]) -> tuple[int, list[int]]:
        """Return behind which turn a request goes on that has all tokens of its conversation, as
        :meth:`_after` does, and the tokens after these. Raises MessagesRefused."""
        self._program.check_tokens(prompt_ids)
        after, begin = 0, len(self._program.prefix_ids)
        for number in range(1, len(self._lengths) + 1):
            path = [*self._program.prefix_ids]
            path += chain(*(spoken.token_ids for spoken in self._path(number)))
            if begin <= len(path) and list(prompt_ids[: len(path)]) == path:
                after, begin = number, len(path)
        new = list(prompt_ids[begin:])
        if not new:
            raise MessagesRefused("token_ids ends with a turn; add what follows it")
        return after, new

    def _conversation(self, number: int) -> list[Message]:
        """Return the conversation that ends with turn ``number``, counted from 1."""
        return [*chain(*(spoken.messages for spoken in self._path(number)))]

    def _path(self, number: int) -> list[_Spoken]:
        """Return what was spoken until the end of turn ``number``, from the first turn on."""
        path = list[_Spoken]()
        while number:
            path.append(self._spoken[number - 1])
            number = path[-1].after
        return path[::-1]


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
