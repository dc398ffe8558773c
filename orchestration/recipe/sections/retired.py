"""Keys and values that recipes had before 0.2, and what to write in their place.

A recipe that names one has a problem with its fix. The recipe that a run has recorded names every
key: one that has gone is left out there if it has the value that it had by default, and a value
gets the name that it has now.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

GONE = "is no key any more"


class Retired(NamedTuple):
    """A key that has gone. ``defaults``: the values that it had by default, in any release."""

    defaults: tuple[Any, ...]
    fix: str


RETIRED: dict[str, Retired] = {
    "critic.device": Retired((None,), "take it out; a critic is on `train.device`"),
    "critic.threads": Retired((0,), "take it out; a critic's ranks have `train.threads`"),
    "evaluate.share": Retired((0.25,), "take it out; it is a quarter"),
    "guard.window": Retired((32,), "take it out; it is 32 steps"),
    "launch.collective_timeout": Retired(
        (300.0,), "take it out; ranks wait 2.5 times `launch.hang_timeout` for one another"
    ),
    "launch.leave_timeout": Retired((60.0,), "write `launch.stop_timeout`, which holds for both"),
    "launch.restart_window": Retired((3600.0,), "take it out; a restart counts for an hour"),
    "pipeline.index_serve": Retired(
        ("auto", ""),
        "write `pipeline.serve`, the address of the index, the warehouse and the weights",
    ),
    "rollout.vllm.pause": Retired(
        ("keep",), "take it out; in place of 'abort' write `rollout.vllm.kv_cache = 'rebuild'`"
    ),
    "sync.probe_mean_tolerance": Retired(
        (0.0,), "take it out; it is a fifth of `sync.probe_tolerance`"
    ),
    "sync.serve": Retired(
        ("auto", "127.0.0.1"),
        "write `pipeline.serve`, the address of the index, the warehouse and the weights",
    ),
    "sync.rolling": Retired(
        (True,), "take it out; in place of false write `sync.at_once` = the number of replicas"
    ),
    "train.pipeline": Retired(("auto",), "take it out; `train.vpp = 2` makes stages wait less"),
}


RENAMED_VALUES = {("sync.transport", "collective"): "network"}


def migrated(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables that a run has ``recorded`` with the names of now, without the keys that
    have gone and that had their default.

    >>> migrated({"train": {"steps": 3, "pipeline": "auto"}, "sync": {"transport": "collective"}})
    {'train': {'steps': 3}, 'sync': {'transport': 'network'}}
    """
    tables = copy.deepcopy(dict(recorded))
    for key, retired in RETIRED.items():
        table, name = _table_of(tables, key)
        if name in table and table[name] in retired.defaults:
            del table[name]
    for (key, old), new in RENAMED_VALUES.items():
        table, name = _table_of(tables, key)
        if table.get(name) == old:
            table[name] = new
    return tables


def _table_of(tables: Any, key: str) -> tuple[dict[str, Any], str]:
    """The table of the dotted ``key``, an empty one where there is none, and the key's name in
    it."""
    *sections, name = key.split(".")
    for section in sections:
        tables = tables.get(section) if isinstance(tables, dict) else None
    return tables if isinstance(tables, dict) else {}, name
