"""Text that UTF-8 carries, whatever came in."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator


def sendable(value: object) -> object:
    """``value``; a text without what UTF-8 cannot carry (surrogates, which headers and arguments may hold)."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(sendable)]
