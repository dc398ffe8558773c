"""The table of a recipe that says which form responses have."""

from __future__ import annotations

import json
from typing import Any, Self

from pydantic import model_validator

from orchestration.units import Section
from stages.engines.structure import Structure
from stages.json_schema import faults, key


class StructureSection(Section):
    """Structured outputs: one of the keys. Tokens with which a response would not have the form
    have no probability, in sampling and in training
    ([serving.md](serving.md#structured-outputs))."""

    choice: list[str] = key([], "A response is one of these texts.", max_length=1024)
    regex: str = key("", "A response matches this regular expression as a whole.")
    json_schema: dict[str, Any] = key({}, "A response is JSON of this schema.")
    grammar: str = key("", "A response is one of this grammar, in Lark or GBNF.")

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        names = list(self._given())
        faults(self, ((name, f"comes with {names[0]}", "give one") for name in names[1:]))
        return self

    @property
    def of_responses(self) -> Structure | None:
        """What the table asks for; None: any text."""
        for name, value in self._given().items():
            text = value if isinstance(value, str) else json.dumps(value)
            return Structure(name, text)  # type: ignore[arg-type]
        return None

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in self.model_dump().items() if value}
