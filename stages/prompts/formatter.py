"""Makes prompts of rows: template, chat template, token ids, and the check of how long a prompt is.

row ── prompt_in ──▶ string ── template ──▶ (chat template) ──▶ text ── tokenizer ──▶ Prompt
          └────────▶ messages ───────────── chat template ──────┘                       ▲
     └ responses_in ──▶ given responses, rendered after the prompt ── tokenizer ────────┘
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from stages.prompts.rows.files import PromptError, Row, Table
from stages.prompts.rows.options import PromptLimits, PromptOptions
from stages.prompts.rows.templates import (
    Message,
    fill_template,
    parse_template,
    prompt_in,
    responses_in,
    turns_of,
    with_prompt,
)
from stages.prompts.rows.values import Changes, plain_row
from stages.prompts.too_long import LongPrompts

if TYPE_CHECKING:
    import torch

    from stages.model.load import Tokenizer
    from stages.prompts.conversations import Conversations, Response


# recipes are read, and runs watched over the network, without torch, which takes seconds to import


@dataclass(frozen=True)
class Prompt:
    """A prompt: ``ids`` int64 [P] as the model reads them; ``text`` that they spell (chat template
    included); ``given``, the prompt as its row had it; ``fields``, the row's other columns, which
    reward functions get. ``responses`` that its row gives continue the first ``context`` tokens
    (None: all)."""

    ids: torch.Tensor
    text: str
    given: str | list[Message]
    fields: dict[str, Any]
    responses: Sequence[Response] = ()
    context: int | None = None

    @property
    def responses_json(self) -> str:
        """``responses`` as the column of that name has them."""
        return json.dumps(
            [{"ids": each.ids, "spans": each.spans} for each in self.responses],
            separators=(",", ":"),
        )

    @property
    def given_json(self) -> str:
        """``given`` as the column of that name has it."""
        return json.dumps(self.given)

    @property
    def fields_json(self) -> str:
        """``fields`` as the column of that name has them: plain values
        (:mod:`stages.prompts.rows.values`)."""
        return json.dumps(self.fields)

    @property
    def row(self) -> dict[str, Any]:
        """The row as an environment gets it, for it to keep."""
        return {**json.loads(self.fields_json), "prompt": json.loads(self.given_json)}


def plain_of(options: PromptOptions, row: Row, where: str, changes: Changes | None = None) -> Row:
    """Return the columns of ``row`` as plain values, with a prompt. Raises PromptError."""
    plain = plain_row(row, where, options.leave_out, changes)
    return with_prompt(plain, options.column, options.responses, where)


def identity_of(
    options: PromptOptions,
    row: Row,
    where: str,
    *,
    by_row: bool,
    changes: Changes | None = None,
) -> str | list[Message] | Row:
    """Return the part of ``row`` that decides whether it is held out: its prompt. With ``by_row``
    it is all columns: an environment reads its task from them. Raises PromptError."""
    plain = plain_of(options, row, where, changes)
    return plain if by_row else prompt_in(plain, options.column, where)


class OpensConversation(Protocol):
    """Renders the conversation with which a trajectory begins, up to what its environment adds."""

    def prompt(self, messages: Sequence[Message], row: Mapping[str, Any], where: str) -> str:
        """Return the text of ``messages``, the prompt of ``row``, tools included, without the
        beginning of the assistant's turn. Raises PromptError, which names it by ``where``."""


class PromptFormatter:
    """Makes a :class:`Prompt` of a row, within ``limits`` (default:
    ``prompts.max_prompt_tokens``). ``opens``: renders conversations of a run with environments,
    whose prompts end before the assistant's turn."""

    def __init__(
        self,
        options: PromptOptions,
        tokenizer: Tokenizer,
        limits: PromptLimits | None = None,
        opens: OpensConversation | None = None,
    ) -> None:
        self.options = options
        self._opens = opens
        self._tokenizer = tokenizer
        self.changes: Changes = {}  # of the columns that were read so far
        self.limits = limits or PromptLimits(options.max_prompt_tokens)
        self._pieces = parse_template(options.template)
        self._chats: Conversations | None = None
        if options.chat_template is not None or tokenizer.chat_template is not None:
            from stages.prompts.conversations import Conversations, chosen_template

            template = chosen_template(options.chat_template, tokenizer)
            if template is not None:
                self._chats = Conversations(tokenizer, template, options.chat_template_options)
        has_template = self._chats is not None
        self._chat = has_template if options.chat is None else options.chat
        if self._chat and not has_template:
            problem = "but the tokenizer has no chat template"
            raise PromptError(problem, "set chat = false", "prompts.chat", True)
        if options.system is not None and not has_template:
            problem = "needs a chat template, and the tokenizer has none"
            raise PromptError(problem, "use prompts.template", "prompts.system")
        # Without normalization a token spells at least one byte; with it, one character may become
        # up to 18 of them.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._most_tokens_per_byte = (
            2**31 if backend is None else 1 if backend.normalizer is None else 18
        )

    def identity(self, row: Row, where: str) -> str | list[Message] | Row:
        """Return :func:`identity_of` the row, by row for environments. Raises PromptError."""
        by_row = self._opens is not None
        return identity_of(self.options, row, where, by_row=by_row, changes=self.changes)

    def prompt(self, row: Row, where: str) -> Prompt:
        """Return the prompt of ``row``, however long; its beginning is cut off if the options say
        so."""
        return self._prompt(self._read(row, where), where)

    def _prompt(self, read: _Read, where: str) -> Prompt:
        if read.text is None:
            raise PromptError(
                f"{where} has more than {self.limits.characters} characters", "shorten it"
            )
        ids = self._ids(read, where)
        text = read.text
        limit = self.limits.tokens
        context, responses = (
            self._responses(read, ids, where) if self.options.responses else (None, [])
        )
        if self.options.too_long == "cut" and limit is not None and len(ids) > limit:
            context = None if context is None else max(0, context - len(ids) + limit)
            ids = ids[-limit:]
            text = str(self._tokenizer.decode(ids))
        import torch

        return Prompt(
            torch.tensor(ids, dtype=torch.int64), text, read.given, read.fields, responses, context
        )

    def bounded(self, row: Row, where: str, too_long: LongPrompts) -> Prompt | None:
        """Return the prompt of ``row``.

        One that is too long is added to ``too_long``; None when it is skipped. Raises PromptError
        when prompts.too_long = "fail".
        """
        read = self._read(row, where)
        return self._prompt(read, where) if self._fits(read, where, too_long) else None

    def fitting(self, rows: Table, too_long: LongPrompts) -> Iterator[int]:
        """Yield the numbers of the ``rows`` that :meth:`bounded` does not skip.

        Every row is checked.
        """
        for number in range(len(rows)):
            if rows.is_unread(number):
                self._refuse(
                    rows.where(number),
                    "more bytes than are read of one line",
                    too_long,
                    can_cut=False,
                )
            else:
                where = rows.where(number)
                if self._fits(self._read(rows[number], where), where, too_long):
                    yield number

    def _fits(self, read: _Read, where: str, too_long: LongPrompts) -> bool:
        """Return whether a row makes a prompt.

        A text that is surely too long is not built, and one whose bytes already show that it is
        short enough is not tokenized.
        """
        text = read.text
        limit = self.limits.tokens
        most = self.limits.nbytes
        if most is not None and (size := self._bytes(read)) > most:
            length = f"{size} bytes, more than the {most} for which pipeline.arena has room"
            return self._refuse(where, length, too_long, can_cut=False)
        if text is None or len(text) > self.limits.characters:
            length = f"more than {self.limits.characters} characters"
            return self._refuse(where, length, too_long, can_cut=text is not None)
        if limit is None or (
            text.strip() and (len(text.encode()) + 16) * self._most_tokens_per_byte <= limit
        ):
            return True
        tokens = len(self._ids(read, where))
        return tokens <= limit or self._refuse(where, f"{tokens} tokens", too_long)

    def _refuse(
        self, where: str, length: str, too_long: LongPrompts, *, can_cut: bool = True
    ) -> bool:
        """Count a prompt that is too long; return whether it stays, with its beginning cut off.

        Raises PromptError.
        """
        if self.options.too_long == "fail":
            bound = f"{self.limits.tokens} tokens ({self.limits.why})"
            raise PromptError(
                f"{where} has {length}, where a prompt may have {bound}",
                "shorten it, raise the limit, or set prompts.too_long = 'skip' or 'cut'",
            )
        stays = can_cut and self.options.too_long == "cut"
        too_long.add(where, length, "cut" if stays else "skipped")
        return stays

    def _bytes(self, read: _Read) -> int:
        """Return how many bytes the columns of the row have at most."""
        size = len(json.dumps(read.given)) + len(json.dumps(read.fields))
        # a token of it is a byte or more, and a number of up to six digits
        for response in read.responses:
            characters = len(json.dumps(response))
            size += 7 * min(characters, self.limits.response or characters)
        return size

    def _ids(self, read: _Read, where: str) -> list[int]:
        """Return the tokens of the text, which are made once."""
        has_special_tokens = read.messages is not None  # a chat template writes them itself
        if read.ids is None:
            tokens = self._tokenizer(read.text, add_special_tokens=not has_special_tokens)
            read.ids = tokens["input_ids"]
        ids = read.ids
        if not ids:
            raise PromptError(
                f"{where} has no tokens: {read.text!r:.100}",
                "give a prompt that the model can read",
            )
        return ids

    def _responses(
        self, read: _Read, prompt_ids: list[int], where: str
    ) -> tuple[int, list[Response]]:
        """Return how many of the prompt's tokens the responses continue, and the responses."""
        from stages.prompts.conversations import Response, plain_response

        cut = [read.fields.get(f"{name}_truncated") is True for name in self.options.responses]
        if read.messages is not None and self._chats is not None:
            row_messages = (
                [{"role": "user", "content": read.given}]
                if isinstance(read.given, str)
                else read.given
            )
            prompts = (read.messages, row_messages, read.messages[-len(row_messages) :])
            turns = [turns_of(response, prompts, where) for response in read.responses]
            context, responses = self._chats.responses(read.messages, turns, cut, where)
        else:
            of_row = [{"role": "user", "content": str(read.given)}]
            turns = [turns_of(response, [of_row], where) for response in read.responses]
            if any(len(messages) > 1 for messages in turns):
                raise PromptError(
                    f"{where} has a response of several turns, which needs a chat template",
                    "use a model that has one, give one with prompts.chat_template, or make a row "
                    "of each turn",
                )
            texts = [messages[0]["content"] for messages in turns]
            context = len(prompt_ids)
            text = str(read.text)
            responses = [
                plain_response(self._tokenizer, text, prompt_ids, response, is_cut, where)
                for response, is_cut in zip(texts, cut, strict=True)
            ]
        # which shows that it is longer
        most = None if self.limits.response is None else self.limits.response + 1
        return context, [Response(each.ids[:most], each.spans) for each in responses]

    def _read(self, row: Row, where: str) -> _Read:
        """Return the parts of a row, and the text of its prompt.

        Of a string that is longer than the limits allow, the text's end, one character longer than
        they allow; of such a conversation, None.
        """
        row = plain_of(self.options, row, where, self.changes)
        prompt = prompt_in(row, self.options.column, where)
        most = self.limits.characters + 1
        fields = {name: value for name, value in row.items() if name != self.options.column}
        responses = responses_in(fields, self.options.responses, where)
        if isinstance(prompt, str):
            filled = fill_template(self._pieces, fields | {"prompt": prompt}, most, where)
            if not self._chat:
                return _Read(prompt, fields, responses, None, filled)
            messages = [{"role": "user", "content": filled}]
        else:
            messages = prompt
        if self._chats is None:
            raise PromptError(
                f"{where} is a conversation, but the tokenizer has no chat template",
                "use one that has, or texts",
            )
        if self.options.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.options.system}, *messages]
        is_long = (
            not isinstance(prompt, str)
            and sum(len(message["content"]) + 1 for message in prompt) >= most
        )
        text = None
        if not is_long and self._opens is not None:
            text = self._opens.prompt(messages, fields, where)
        elif not is_long:
            text = self._chats.prompt(messages, where)
        return _Read(prompt, fields, responses, messages, text)


@dataclass
class _Read:
    """The parts of a row: ``messages`` of its prompt (None: it is read as a text), the ``text``
    that the model reads, and its tokens where they were needed."""

    given: str | list[Message]
    fields: Row
    responses: list[str | list[Message]]
    messages: list[Message] | None
    text: str | None
    ids: list[int] | None = None
