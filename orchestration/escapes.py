"""Escapes for characters with which foreign text (samples, reasons, logs) could control a
terminal."""

from __future__ import annotations

import json
import re

# Control characters except tab and newline; marks, embeddings, overrides and isolates of direction;
# line and paragraph separators; surrogates, which cannot be encoded; tags, which are invisible.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def escaped(text: str) -> str:
    """Return ``text`` with unsafe characters written as in JSON; text that is JSON keeps its
    meaning.

    >>> escaped("a\\x1b[2Jb") == r"a\\u001b[2Jb"
    True
    """
    return _UNSAFE.sub(lambda found: json.dumps(found[0])[1:-1], text)
