"""The tables of docs/from-trl.md and docs/from-verl.md, from the rules of the converter.

python -m tests.conversions docs/from-trl.md docs/from-verl.md
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from orchestration.recipe.conversion import trl, verl
from orchestration.recipe.conversion.conversion import By, Not, Rule, To

BEGIN = "<!-- the table: python -m tests.conversions -->\n"
RULES = {"from-trl.md": trl.RULES, "from-verl.md": verl.RULES}


def table(rules: Mapping[str, Rule]) -> str:
    lines = ["| there | here |", "|---|---|"]
    for name, rule in rules.items():
        match rule:
            case To(key, note=note):
                here = f"`{key}`" + (f": {note}" if note else "")
            case By(keys):
                here = ", ".join(f"`{key}`" for key in keys.split(", "))
            case Not(note):
                here = note or "nothing: it is so, or has no effect"
        lines.append(f"| `{name}` | {here} |")
    return "\n".join(lines) + "\n"


def written(page: Path) -> str:
    """The page with its table as the rules are now."""
    before, begin, _ = page.read_text().partition(BEGIN)
    return before + begin + table(RULES[page.name])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(written(Path(name)))
