"""Text that follows others, as tokens; contents of messages are data.

content ── as_data ──▶ "…<␣|im_end|>…" ── chat template ──▶ text ── ids ──▶ tokens of each piece between breaks
                          └ a break inside each text of a control token
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stages.model.load import Tokenizer

BREAK = "\U000f5a1b"  # of a private-use plane; contents lose it


class DialogueEncoder:
    """Encodes text that continues another one.

    Control tokens are the tokenizer's special tokens, and the other added tokens that stand in the
    chat ``template``, such as ``<tool_call>``. Written by the template, each is its token; in data
    it is ordinary text.
    """

    def __init__(self, tokenizer: Tokenizer, template: str = "") -> None:
        self._tokenizer = tokenizer
        control = [
            re.escape(token.content)
            for token in tokenizer.added_tokens_decoder.values()
            if token.special or (token.content in template and not token.content.isspace())
        ]
        # The first character of each text, also of texts that overlap.
        self._begins = re.compile(f"(?={'|'.join(control) or '(?!)'}).", re.DOTALL)
        newline = self._encode("\n")
        begins_with_space = self._encode("\na") != [*newline, *self._encode("a")]
        self._before = newline if begins_with_space else []

    def as_data(self, value: Any) -> Any:
        """Return ``value`` with a break in each text of a control token in its strings, but for
        keys. Surrogates, which have no UTF-8, become question marks."""
        if isinstance(value, str):
            text = value.replace(BREAK, "").encode("utf-8", "replace").decode()
            return self._begins.sub(lambda begin: begin[0] + BREAK, text)
        if isinstance(value, Mapping):
            return {name: self.as_data(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.as_data(item) for item in value]
        return value

    def ids(self, text: str) -> list[int]:
        """Return the tokens of ``text``, piece by piece between its breaks."""
        return [token for piece in text.split(BREAK) for token in self._continued(piece)]

    def _continued(self, text: str) -> list[int]:
        """Return the tokens of ``text`` without the space that some tokenizers put before a text."""
        if not self._before:
            return self._encode(text)
        ids = self._encode("\n" + text)
        length = len(self._before)
        return ids[length:] if ids[:length] == self._before else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


class DataTokenizer:
    """The tokenizer that a renderer writes texts with: contents of messages are data. It says no
    offsets, so that pieces may be encoded one by one."""

    def __init__(self, tokenizer: Tokenizer, encoder: DialogueEncoder) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder

    def encode(self, text: str, **_: Any) -> list[int]:
        """Return the tokens of ``text``."""
        return self._encoder.ids(text)

    def __getattr__(self, name: str) -> Any:
        if name == "__call__":
            raise AttributeError(name)
        return getattr(self._tokenizer, name)
