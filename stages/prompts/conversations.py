"""Conversations as the model reads them: which chat template, the prompt, and responses with the
tokens to train.

messages ──▶ prompt: up to the assistant's turn, or its last message to be continued
messages + response ──▶ the rest of the rendering, whose assistant turns are trained ─▶ token ids and spans
                          └ by the template's own {% generation %}, or where each turn begins and ends in renderings of the
                            messages before it; a template that renders these otherwise is refused by name
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.prompts.rows.files import PromptError
from stages.prompts.rows.templates import Message, read_chat_template

if TYPE_CHECKING:
    from stages.model.load import Tokenizer

DEFAULT = "default"  # of several named chat templates
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = "0a1b2c3d"  # a message's content, of which the end of a turn is found
NO_END = "the tokenizer has no end-of-sequence token (eos_token), with which a response ends"
GIVE_END = (
    "set one in tokenizer_config.json, or use a chat template whose turns end with a special token"
)

Span = tuple[int, int]  # begin and end, of characters or tokens


@dataclass(frozen=True)
class Response:
    """A given response: ``ids``, its tokens; ``spans``, those that are trained, the assistant's
    turns."""

    ids: list[int]
    spans: list[Span]


def is_template_name(text: str) -> bool:
    """Return whether ``prompts.chat_template`` names a template of the tokenizer, and no file."""
    return os.sep not in text and not Path(text).suffix and not Path(text).exists()


def chosen_template(chosen: str | None, tokenizer: Tokenizer) -> str | None:
    """Return the text of the chat template that ``prompts.chat_template`` chooses: a file, or a
    template of the tokenizer by its name; by default the tokenizer's own. None: it has none. Raises
    PromptError."""
    template: Any = tokenizer.chat_template
    named: Mapping[str, str] = (
        template if isinstance(template, dict) else {} if template is None else {DEFAULT: template}
    )
    if chosen is None:
        if named and DEFAULT not in named:
            problem = (
                f"the tokenizer has the chat templates {sorted(named)}, and none is {DEFAULT!r}"
            )
            raise PromptError(problem, "choose one with prompts.chat_template")
        return named.get(DEFAULT)
    if chosen in named:
        return named[chosen]
    if is_template_name(chosen):
        has = f"it has {sorted(named)}" if named else "it has none"
        problem = f"is no file, and no chat template of the tokenizer ({has})"
        fix = "give the path of a Jinja file, or one of these names"
        raise PromptError(problem, fix, "prompts.chat_template", chosen)
    return read_chat_template(chosen)


class Conversations:
    """Renders messages with the chat ``template`` and its ``options``. ``tools``: the functions that
    the model may call, as JSON Schemas."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        options: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._options = dict(options)
        self._tools = list(tools)
        specials = {
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        }
        self._specials = specials | {str(tokenizer.eos_token)} if tokenizer.eos_token else specials
        self._end: str | None = None

    def prompt(self, messages: Sequence[Message], where: str) -> str:
        """Return the text with which the assistant's turn begins; of a last message of the
        assistant, up to its end, so that it is continued. Raises PromptError."""
        if messages[-1]["role"] == "assistant":
            return self.render(messages, where, continue_final_message=True)
        return self.render(messages, where, add_generation_prompt=True)

    def render(self, messages: Sequence[Mapping[str, Any]], where: str, **how: bool) -> str:
        """Return the text of ``messages``; ``how``: what apply_chat_template adds or leaves out.
        Raises PromptError, which names them by ``where``."""
        options: dict[str, Any] = {"add_generation_prompt": False, **how, **self._options}
        if self._tools:
            options["tools"] = self._tools
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(map(dict, messages)),
                    chat_template=self._template,
                    tokenize=False,
                    **options,
                )
            )
        except Exception as error:  # a template is a program and may raise anything
            raise PromptError(
                f"{where} is refused by the chat template ({error})", "change the messages"
            ) from error

    def responses(
        self,
        messages: Sequence[Message],
        turns: Sequence[Sequence[Message]],
        cut: Sequence[bool],
        where: str,
    ) -> tuple[int, list[Response]]:
        """Return how many tokens of the prompt all responses continue, and each of them.

        ``turns``: the messages of each, the first and the last of the assistant. ``cut``: whether a
        response was cut before its end. Raises PromptError.

        A template may begin the assistant's turn otherwise once it has a response, as those of
        reasoning models do: the prompt then ends at the first token that differs, as in TRL.
        """
        opened = self.prompt(messages, where)
        prompt_ids = self._ids(opened)
        offset = len(opened)
        texts = [
            self._text(messages, response_turns, is_cut, where)
            for response_turns, is_cut in zip(turns, cut, strict=True)
        ]
        if not all(text.startswith(opened) for text, _ in texts):
            closed = "" if messages[-1]["role"] == "assistant" else self.render(messages, where)
            least = self._ids(closed)
            offset = len(closed)
            common = min(_common(prompt_ids, self._ids(text)) for text, _ in texts)
            if not closed or prompt_ids[: len(least)] != least or common < len(least):
                raise PromptError(
                    f"{where} is rendered otherwise by the chat template once a response follows",
                    "use another template (prompts.chat_template)",
                )
            prompt_ids = prompt_ids[:common]
        return len(prompt_ids), [
            self._response(prompt_ids, offset, *rendered, where) for rendered in texts
        ]

    def _text(
        self, messages: Sequence[Message], turns: Sequence[Message], cut: bool, where: str
    ) -> tuple[str, list[Span]]:
        """Return the rendering of a prompt with a response, and the spans of the assistant's turns
        in it but for the first, whose span begins at 0, as it begins with the prompt's end."""
        turns = [self._without_end(messages, message, where) for message in turns]
        whole = [*messages, *turns]
        first = len(messages)
        if messages[-1]["role"] == "assistant":
            joined = {**messages[-1], "content": messages[-1]["content"] + turns[0]["content"]}
            whole = [*messages[:-1], joined, *turns[1:]]
            first -= 1
        text = self.render(whole, where)
        end = self.end_of_turn(messages, where)
        spans = self._spans(whole, first, text, where)
        if not self.end_token(end):
            if self._tokenizer.eos_token is None:
                raise PromptError(f"{where} has a response, and {NO_END}", GIVE_END)
            text += str(self._tokenizer.eos_token)
            end += str(self._tokenizer.eos_token)
            spans[-1] = (spans[-1][0], len(text))
        if cut and text.endswith(end):
            text = text[: len(text) - len(end)]
            spans[-1] = (spans[-1][0], len(text))
        return text, spans

    def end_of_turn(self, messages: Sequence[Message], where: str) -> str:
        """Return what the template writes after the content of an assistant's message."""
        if self._end is None:
            role = {"role": "assistant", "content": PROBE}
            before = messages[:-1] if messages[-1]["role"] == "assistant" else messages
            self._end = self.render([*before, role], where).rpartition(PROBE)[2]
        return self._end

    def end_token(self, end: str) -> str:
        """Return the first special token in the ``end`` of a turn, at which generation stops; "":
        there is none."""
        tokens = [token for token in self._specials if token in end]
        return min(tokens, key=lambda token: (end.index(token), -len(token)), default="")

    def _without_end(self, messages: Sequence[Message], message: Message, where: str) -> Message:
        """Return a message of the assistant without the end of its turn, which the template
        adds."""
        end = self.end_of_turn(messages, where)
        content = message["content"]
        if message["role"] != "assistant":
            return message
        for written in (end, end.rstrip(), str(self._tokenizer.eos_token or "")):
            if self.end_token(written) and content.endswith(written):
                return {**message, "content": content.removesuffix(written)}
        return message

    def _spans(self, whole: Sequence[Message], first: int, text: str, where: str) -> list[Span]:
        """Return where the assistant's turns from the message ``first`` on are in ``text``.

        Raises PromptError where the template renders a turn otherwise when others follow.
        """
        numbers = [
            number for number in range(first, len(whole)) if whole[number]["role"] == "assistant"
        ]
        if len(numbers) > 1 and GENERATION.search(self._template):
            return self._marked_spans(whole, text, where)
        spans: list[Span] = []
        for number in numbers:
            begin = 0
            end = len(text)
            if number > first:
                before = whole[:number]
                opened = self.render(whole[:number], where, add_generation_prompt=True)
                begin = _common(opened, text)
                self._require_prefix(self.render(before, where), text[:begin], number, where)
            if number < numbers[-1]:
                closed = self.render(whole[: number + 1], where)
                self._require_prefix(closed, text, number, where)
                end = len(closed)
            spans.append((begin, end))
        return spans

    def _require_prefix(self, part: str, text: str, number: int, where: str) -> None:
        if not text.startswith(part):
            at = _common(part, text)
            raise PromptError(
                f"{where} has a response of several turns, and the chat template renders message "
                f"{number + 1} otherwise when others follow (from {part[at:][:40]!r} on), so that "
                "its turns cannot be told apart",
                "use a template with {% generation %} around them, or a row for each turn",
            )

    def _marked_spans(self, whole: Sequence[Message], text: str, where: str) -> list[Span]:
        """Return what the template marks with ``{% generation %}``."""
        from transformers.utils.chat_template_utils import render_jinja_template

        variables: dict[str, Any] = {**self._tokenizer.special_tokens_map, **self._options}
        rendered: Any = render_jinja_template(
            [list(whole)],
            chat_template=self._template,
            return_assistant_tokens_mask=True,
            **variables,
        )
        texts, marks = rendered
        if texts != [text] or not marks[0]:
            problem = (
                ("marks nothing with {% generation %}")
                if texts == [text]
                else "renders it otherwise with its marks"
            )
            raise PromptError(
                f"{where} has a response of several turns, and the chat template {problem}",
                "correct it",
            )
        return [(int(begin), int(end)) for begin, end in marks[0]]

    def _response(
        self, prompt_ids: list[int], offset: int, text: str, spans: Sequence[Span], where: str
    ) -> Response:
        """Return the tokens of ``text`` after those of the prompt, which is its first ``offset``
        characters. Where a turn does not begin or end between two tokens, its parts are read one by
        one, as a model reads a prompt and then its own tokens."""
        inside = [(max(begin, offset), end) for begin, end in spans if end > offset]
        bounds = sorted({offset, *(at for span in inside for at in span), len(text)})
        whole = self._ids(text)
        known = len(prompt_ids)
        counts = [self._count(whole, text[:at]) for at in bounds[1:]]
        if whole[:known] == prompt_ids and None not in counts:
            ids = whole[known:]
            numbers = [0, *(max(0, int(count or 0) - known) for count in counts)]
        else:
            parts = [self._ids(text[begin:end]) for begin, end in pairwise(bounds)]
            ids = [token for part in parts for token in part]
            numbers = [sum(map(len, parts[:at])) for at in range(len(bounds))]
            if self._tokenizer.decode([*prompt_ids, *ids]) != self._tokenizer.decode(whole):
                raise PromptError(
                    f"{where} has a response whose turns the tokenizer joins with what stands "
                    f"around them",
                    "use a chat template with special tokens around each turn",
                )
        tokens = dict(zip(bounds, numbers, strict=True))
        return Response(
            ids,
            [(tokens[begin], tokens[end]) for begin, end in inside if tokens[end] > tokens[begin]],
        )

    def _count(self, whole: list[int], text: str) -> int | None:
        """Return how many of the tokens ``whole`` are those of ``text``, their beginning; None: it
        ends within one."""
        ids = self._ids(text)
        return len(ids) if whole[: len(ids)] == ids else None

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def plain_response(
    tokenizer: Tokenizer, prompt: str, prompt_ids: list[int], text: str, cut: bool, where: str
) -> Response:
    """Return a response without a chat template: its tokens as they follow the prompt's, and the
    tokenizer's end token unless the ``text`` ends with it, or was ``cut``. Raises PromptError where
    there is no such token."""
    whole: list[int] = tokenizer(prompt + text)["input_ids"]
    ids: list[int] = whole[len(prompt_ids) :]
    if whole[: len(prompt_ids)] != prompt_ids:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not cut:
        if tokenizer.eos_token_id is None:
            raise PromptError(f"{where} has a response, and {NO_END}", GIVE_END)
        if ids[-1:] != [tokenizer.eos_token_id]:
            ids = [*ids, int(tokenizer.eos_token_id)]
    return Response(ids, [(0, len(ids))])


def _common(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return how many items two sequences have in common at their beginning."""
    differ = (at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differ, min(len(left), len(right)))
