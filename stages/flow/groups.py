"""Groups of a claim's rows: their columns, and what is committed of the results of a call for each.

its groups ─▶ columns or Drop for each ─▶ committed together, or dropped with the reason
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from pipeline.data.columns import Packed
from pipeline.worker.outputs import Dropped, Output, Written
from stages.flow.declarations import Drop, Result

GROUPS_AT_ONCE = 256


def plain_columns(rows: TensorDict, names: Sequence[str]) -> dict[str, Any]:
    """Return the columns of fetched rows, ragged ones as lists of tensors and texts as lists of
    strings."""
    return {name: _plain(rows[name]) for name in names}


def _plain(column: Any) -> Any:
    if isinstance(column, torch.Tensor):
        return Packed.of(column).rows() if column.is_nested else column
    return list(column)


def rows_at(column: Any, positions: Sequence[int]) -> Any:
    return (
        column[positions] if isinstance(column, torch.Tensor) else [column[at] for at in positions]
    )


def groups_of(groups: Sequence[int]) -> list[list[int]]:
    """Return the positions of each group's rows, where ``groups`` names the group of each row."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    return list(members.values())


def outputs_of(
    members: Sequence[Sequence[int]], results: Sequence[Result], tokens: Sequence[int]
) -> Iterator[Output]:
    """Yield the outputs to commit of groups at the positions ``members``: one output of all that
    stay, one for each reason to drop."""
    remaining = [
        (at, result)
        for at, result in zip(members, results, strict=True)
        if not isinstance(result, Drop)
    ]
    if remaining:
        positions = [row for at, _ in remaining for row in at]
        columns = {
            name: _joined([result[name] for _, result in remaining]) for name in remaining[0][1]
        }
        yield Written(positions, rows=columns, tokens=sum(tokens[row] for row in positions))
    dropped: dict[str, list[int]] = {}
    for at, result in zip(members, results, strict=True):
        if isinstance(result, Drop):
            dropped.setdefault(result.reason, []).extend(at)
    for reason, rows in dropped.items():
        yield Dropped(rows, reason=reason, tokens=sum(tokens[row] for row in rows))


def _joined(parts: Sequence[Any]) -> Any:
    """Return the same column of several groups as one."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], torch.Tensor) and not parts[0].is_nested:
        return torch.cat(list(parts))
    return [value for part in parts for value in part]
