"""The tokens of a response as OpenAI's API names them: the bytes of each, its text, and where in
the text it begins.

token ──▶ ResponseText ──▶ new text of one token, or of several that make a character together
  └─────▶ Pieces: its own bytes ──▶ each token of that text: its bytes, and the character at which it begins
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from stages.engines.protocols import Completion, Token
from stages.engines.response_text import BROKEN, ResponseText
from stages.model.load import Tokenizer


class Pieces:
    """The bytes and names of a tokenizer's tokens. ``special_tokens``: they are text, too."""

    def __init__(self, tokenizer: Tokenizer, *, special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._decode = partial(tokenizer.decode, skip_special_tokens=not special_tokens)
        self._added = dict(getattr(tokenizer, "added_tokens_decoder", {}))
        decoders = _decoders(tokenizer)
        self._byte_level = "ByteLevel" in decoders
        self._byte_fallback = "ByteFallback" in decoders
        # A token's text depends on whether it begins the response: it is decoded after this one.
        self._anchor: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that ``token`` adds to a text; none of a special one."""
        if token not in self._known:
            self._known[token] = self._bytes(token)
        return self._known[token]

    def name(self, token: int, own: bytes, *, prefix: str = "") -> str:
        r"""Return the text of ``token`` with the bytes ``own``, or ``prefix`` and the bytes as
        ``\xf0\x9f`` where they are no text. A special token has the name that the tokenizer gives
        it."""
        if not own:
            return str(self._tokenizer.decode([token]))
        try:
            return own.decode()
        except UnicodeDecodeError:
            return prefix + "".join(
                chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in own
            )

    def _bytes(self, token: int) -> bytes:
        if (added := self._added.get(token)) is not None:
            has_text = self._special_tokens or not added.special
            return str(added.content).encode() if has_text else b""
        piece = str(self._tokenizer.convert_ids_to_tokens(token) or "")
        if self._byte_level and all(character in BYTES for character in piece):
            return bytes(BYTES[character] for character in piece)
        if self._byte_fallback and (byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece)):
            return bytes.fromhex(byte[1])
        before = str(self._decode(self._anchor))
        return str(self._decode([*self._anchor, token]))[len(before) :].encode()


def _decoders(tokenizer: Tokenizer) -> set[str]:
    """Return the kinds of decoders that the tokenizer applies."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"ByteLevel"} if hasattr(tokenizer, "byte_decoder") else set()
    if backend.decoder is None:
        return set()
    decoder = json.loads(backend.decoder.__getstate__())
    return {component["type"] for component in (decoder, *decoder.get("decoders", ()))}


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character that byte-level tokenizers write in its place: itself, or
    from U+0100 on where it is no visible one (GPT-2's ``bytes_to_unicode``)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(0x100 + place): byte for place, byte in enumerate(hidden)
    }


BYTES = _byte_characters()


@dataclass(frozen=True)
class Placed:
    """A token, the bytes of the text that it makes, and the character of the text at which they
    begin."""

    token: Token
    own: bytes
    offset: int


class ChoiceText:
    """One choice of an answer: its new ``text``, and its tokens; without ``pieces`` these have no
    bytes. It ends at one of the tokens ``ends``, with its token number ``limit``, or at a stop
    string of the decoded text (``options`` of :class:`ResponseText`). ``reason``: why it has ended;
    ``stopped_by``: the stop string, or the token, at which."""

    def __init__(
        self,
        number: int,
        tokenizer: Tokenizer,
        pieces: Pieces | None,
        stops: Sequence[str] = (),
        *,
        ends: Collection[int] = (),
        limit: int | None = None,
        **options: Any,
    ) -> None:
        self.number = number
        self.limit = limit
        self._ends = ends
        self._pieces = pieces
        self._decoded = ResponseText(tokenizer, stops, **options)
        self._waiting: list[Token] = []  # for the rest of a character
        self._placed: list[Placed] = []
        self._characters = 0  # of the decoded text, in which tokens are placed
        self.text = ""
        self.reason: Literal["stop", "length"] | None = None
        self.stopped_by: str | int | None = None
        self.offset: int | None = None  # characters that were sent; None: nothing was

    def begin(self, text: str, tokens: Sequence[Placed]) -> None:
        """Let the choice begin with ``text`` and its ``tokens``: the prompt."""
        self.text = text
        self._placed = list(tokens)
        self._characters = len(text)

    @property
    def tokens(self) -> int:
        """The number of tokens that were added."""
        return len(self._decoded)

    @property
    def unsent(self) -> int:
        """The number of tokens that :meth:`take` has not returned."""
        return len(self._placed)

    def add(self, item: Token | Completion) -> list[Token]:
        """Add the tokens of ``item`` that are new, up to a stop string. Returns them."""
        new = item.tokens()[len(self._decoded) :] if isinstance(item, Completion) else [item]
        for number, token in enumerate(new):
            self.text += self._decoded.add(token.token_id)
            self._waiting.append(token)
            self._place()
            if self._decoded.stopped:
                self.stopped_by = self._decoded.stopped
                self.finish("stop")
            elif token.token_id in self._ends:
                self.stopped_by = token.token_id
                self.finish("stop")
            elif self.tokens == self.limit:
                self.finish("length")
            if self.reason:
                return new[: number + 1]
        if isinstance(item, Completion):
            self.finish(cast("Any", item).finish_reason)
        return new

    def finish(self, reason: Literal["stop", "length"]) -> None:
        """End the choice."""
        self.text += self._decoded.finish()
        self._place(all_of_them=True)
        self.reason = "stop" if self._decoded.stopped else reason
        self.stopped_by = self._decoded.stopped or self.stopped_by

    def take(self) -> tuple[str, list[Placed]]:
        """Return what has not been sent: text, and the tokens that begin in what was sent with it.

        All tokens at the end: those of a stop string, and those without text, begin where the text
        ends.
        """
        end = (self.offset or 0) + len(self.text)
        # offsets ascend
        count = sum(bool(self.reason) or placed.offset < end for placed in self._placed)
        text = self.text
        self.text = ""
        self.offset = end
        sent = self._placed[:count]
        self._placed = self._placed[count:]
        return text, [Placed(placed.token, placed.own, min(placed.offset, end)) for placed in sent]

    def _place(self, *, all_of_them: bool = False) -> None:
        """Give the waiting tokens their places in the text, as far as it is decoded."""
        count = len(self._waiting) if all_of_them else len(self._waiting) - self._decoded.pending
        tokens = self._waiting[:count]
        self._waiting = self._waiting[count:]
        if not tokens:
            return
        text = self._decoded.newest
        token_bytes = [
            self._pieces.bytes_of(token.token_id) if self._pieces else b"" for token in tokens
        ]
        if b"".join(token_bytes) != text.encode() and BROKEN not in text:
            token_bytes = [b""] * (count - 1) + [text.encode()]  # a first token may lose its space
        characters = codecs.getincrementaldecoder("utf-8")("replace")
        begin = self._characters
        end = self._characters + len(text)
        for token, part in zip(tokens, token_bytes, strict=True):
            self._placed.append(Placed(token, part, min(begin, end)))
            begin += len(characters.decode(part))
        self._characters = end
