"""Keys that recipes had before 0.2, and what to write in their place.

A recipe that names one has a problem with its fix. The recipe that a run has recorded names every
key: one that has gone is left out there if it has the value that it had by default.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple


class Retired(NamedTuple):
    """A key that has gone."""

    default: Any
    fix: str


RETIRED: dict[str, Retired] = {
    "critic.threads": Retired(0, "take it out; a critic's ranks have `train.threads`"),
    "launch.collective_timeout": Retired(
        300.0, "take it out; ranks wait 2.5 times `launch.hang_timeout` for one another"
    ),
    "launch.leave_timeout": Retired(60.0, "write `launch.stop_timeout`, which holds for both"),
    "sync.rolling": Retired(
        True, "take it out; in place of false write `sync.at_once` = the number of replicas"
    ),
    "train.pipeline": Retired("auto", "take it out; `train.vpp = 2` makes stages wait less"),
}


def without_retired(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables that a run has ``recorded`` without the keys that have gone and that had
    their default.

    >>> without_retired({"train": {"steps": 3, "pipeline": "auto"}})
    {'train': {'steps': 3}}
    """
    tables = copy.deepcopy(dict(recorded))
    for key, retired in RETIRED.items():
        *sections, name = key.split(".")
        table: Any = tables
        for section in sections:
            table = table.get(section) if isinstance(table, dict) else None
        if isinstance(table, dict) and name in table and table[name] == retired.default:
            del table[name]
    return tables
