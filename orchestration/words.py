"""Words for people in the place of names of numbers: of steps, of alarms, and of simulated costs.

The web page reads the same table, ``words.json``.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

TABLE = Path(__file__).with_suffix(".json")


@functools.cache
def _table() -> dict[str, str]:
    table: dict[str, str] = json.loads(TABLE.read_text())
    return table


def words(name: str) -> str:
    """Return the words for the number ``name``.

    >>> words("equal_groups"), words("my_own_number")
    ('share of groups with equal rewards', 'my own number')
    """
    return _table().get(name, name.replace("_", " "))
