"""OpenAI's responses and Anthropic's messages, answered as chats are.

body ──▶ messages, tools ──▶ a chat ──▶ Responder ──▶ its text as it comes: events of a stream
                                                └───▶ at the end the turn, with calls of tools: events, or one answer
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from api.policy.handler import Responder, answering
from api.policy.latency import Latencies
from api.policy.pieces import ChoiceText
from api.policy.sampling import refused
from api.policy.structure import calls_tool
from api.schemas.completions import Asking, NamedFunction, NamedTool, ReadChat
from api.schemas.forms import (
    FormRequest,
    MessagesRequest,
    NamedChoice,
    ResponsesRequest,
    ToolChoice,
)
from api.server.http.problems import HTTPProblem, problem_of
from orchestration.policy.served import Policies
from stages.environments.dialogue.turns import BEGIN, read_turn, settled
from stages.environments.interface import Request as Conversation
from stages.environments.interface import Turn, TurnTokens
from stages.environments.programs import anthropic, responses
from stages.environments.programs.messages import RequestRefused

# fields of a chat, as the forms name them
FIELDS = {
    ResponsesRequest: {"messages": "input", "max_tokens": "max_output_tokens"},
    MessagesRequest: {"stop": "stop_sequences"},
}


async def respond(
    policies: Policies, request: FormRequest, owner: str = "", latencies: Latencies | None = None
) -> AsyncGenerator[bytes, None]:
    """Yield the body of the answer to ``request``: JSON, or server-sent events where it asks for a
    stream. Arguments and errors are those of :func:`api.policy.handler.respond`."""
    form: Any = responses if isinstance(request, ResponsesRequest) else anthropic
    body = request.model_dump(exclude_unset=True)
    try:
        conversation: Conversation = form.read(body)
    except RequestRefused as error:
        raise refused(f"{error}.", error.field, "see /docs for what it takes") from None
    events = form.Events(body)
    begun = False
    try:
        chat = _chat(request, conversation)
        async with answering(policies, chat, owner, latencies) as responder:
            is_call = calls_tool(chat)
            text = _Text(responder, has_tools=bool(conversation.tools), is_call=is_call)
            async with aclosing(responder.changed()) as changed:
                async for choice in changed:
                    new = text.add(choice)
                    if request.stream:
                        for event in _begin(events, responder, new, begun):
                            yield event.encode()
                            begun = True
            turn = text.turn(sum(each["role"] == "assistant" for each in conversation.messages))
        if not request.stream:
            yield json.dumps(form.answer(body, turn), ensure_ascii=False).encode()
        else:
            for event in events.end(turn):
                yield event.encode()
    except Exception as error:
        problem = problem_of(error) if begun else error
        if isinstance(problem, HTTPProblem):
            field = problem.details.field
            problem.details.field = FIELDS[type(request)].get(field or "", field)
        if not begun:
            raise
        assert isinstance(problem, HTTPProblem)
        error_body = problem.openai() if form is responses else problem.anthropic()
        yield events.error(error_body).encode()


def _chat(request: FormRequest, conversation: Conversation) -> ReadChat:
    """Return ``request`` as a chat."""
    fields = {name: getattr(request, name) for name in Asking.model_fields}
    if isinstance(request, ResponsesRequest):
        fields["max_tokens"] = request.max_output_tokens
    else:
        fields |= {"max_tokens": request.max_tokens, "stop": request.stop_sequences or request.stop}
    fields["tool_choice"] = _demanded(request.tool_choice)
    return ReadChat.model_construct(**fields, conversation=conversation)


def _demanded(choice: str | NamedChoice | ToolChoice | None) -> str | NamedTool | None:
    """Return a ``tool_choice`` that demands a call, as chats have it; None for another one."""
    if isinstance(choice, NamedChoice | ToolChoice) and choice.type in ("function", "tool"):
        return NamedTool(type="function", function=NamedFunction(name=choice.name or ""))
    kind = choice if isinstance(choice, str | None) else choice.type
    return "required" if kind in ("required", "any") else None


def _begin(events: Any, responder: Responder, text: str, begun: bool) -> Iterator[str]:
    """Yield the first events where none was sent, and those of ``text``."""
    if not begun:
        yield from events.begin(Turn({}, tokens=TurnTokens(responder.usage().prompt_tokens, 0)))
    if text:
        yield from events.text(text)


class _Text:
    """The text of an answer, as it comes. ``has_tools``: it may have calls. ``is_call``: it is the
    JSON of one."""

    def __init__(self, responder: Responder, *, has_tools: bool, is_call: bool) -> None:
        self._responder = responder
        self._has_tools = has_tools
        self._is_call = is_call
        self._sent = list[str]()
        self._rest = ""  # that may be part of a call
        self._choice: ChoiceText | None = None

    def add(self, choice: ChoiceText) -> str:
        """Add what is new in ``choice``. Returns the text that the answer's content goes on
        with."""
        self._choice = choice
        self._rest += choice.take()[0]
        new = "" if self._is_call else self._rest
        if self._has_tools:
            new = settled(new)
        self._sent.append(new)
        self._rest = self._rest[len(new) :]
        return new

    def turn(self, number: int) -> Turn:
        """Return the whole answer as the turn with this ``number``."""
        assert self._choice is not None
        usage = self._responder.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        stopped_by = self._choice.stopped_by
        truncated = self._choice.reason == "length"
        text = "".join(self._sent) + self._rest
        written = f"{BEGIN}{text}" if self._is_call else text
        turn = read_turn(written, truncated, number, calls=self._has_tools)
        if turn.fault:
            turn.message["content"] = text
        return replace(
            turn,
            tokens=TurnTokens(usage.prompt_tokens, usage.completion_tokens, cached=cached),
            stop=stopped_by if isinstance(stopped_by, str) else "",
        )
