"""Text that can be encoded as UTF-8."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator


def sendable(value: object) -> object:
    """Return ``value``; in a text, surrogates (which headers and arguments may hold) are
    replaced."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(sendable)]
