"""The form that responses have, where one is asked for. Imported without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from pipeline.compat.extras import extra

# where one text alone can follow, all tokens that begin it may, not the tokenizer's alone
EXACT = '%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True)
class Structure:
    """The form of a response: one text of a JSON list, a regular expression, a JSON schema, or a
    grammar in Lark or GBNF, as ``text``."""

    kind: Literal["choice", "regex", "json_schema", "grammar"]
    text: str

    def compiled(self) -> str:
        """Return llguidance's grammar. Raises ValueError for one that it cannot follow, and
        ExtraMissing."""
        with extra("structured"):
            from llguidance import LLMatcher, grammar_from, regex_to_lark
        if self.kind == "regex":
            grammar = f"start: /{regex_to_lark(self.text, '')}/"
        elif self.kind == "json_schema":
            grammar = f"start: %json {json.dumps(json.loads(self.text))}"
        else:
            grammar = grammar_from(self.kind, self.text)
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(EXACT + grammar)
        if is_wrong:
            raise ValueError(messages[0])
        return EXACT + grammar
