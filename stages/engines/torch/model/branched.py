"""Rows with branches in a packed micro-batch: each token is fed once, and attends to its path.

    row   0 1 2 3 4 5   6 7 8         fed   prompt | 6 7 | 0 1 2 3 4
                  └──── fork 3              branches first, then trunks, among the other rows

Where the attention knows no branches (context_parallel = "ring"), a branch is fed with all that it
shares, and its own tokens alone are predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from stages.branches import Branch, PackedBranch, Strand


def strands_of(
    rows: Sequence[torch.Tensor], branches: Sequence[Sequence[Branch]], *, expanded: bool
) -> list[Strand]:
    """Return the strands of a piece with ``rows``, and the ``branches`` of each (none: its tokens
    follow one another), in the order in which they are packed. ``expanded``: each with its path."""
    strands = []
    for number, (ids, of_row) in enumerate(zip(rows, branches, strict=True)):
        if not of_row:
            strands.append(Strand(number, ids, len(ids) - 1, len(ids)))
        for branch in of_row:
            count = branch.end - branch.begin
            if expanded:
                path = ids[branch.path()]
                strands.append(Strand(number, path, len(path) - 1, count, branch.begin))
                continue
            branch_ids = ids[branch.begin : branch.end]
            before = branch.path(branch.begin)
            strands.append(
                Strand(number, branch_ids, fed_tokens(branch, of_row), count, branch.begin, before)
            )
    return sorted(strands, key=lambda strand: (not strand.path, -strand.fed))


def fed_tokens(branch: Branch, branches: Sequence[Branch], *, expanded: bool = False) -> int:
    """Return how many tokens of ``branch``, of these ``branches`` of a row, are fed: all but its
    last one, unless another branch follows that."""
    last = branch.end - 1
    if expanded:
        return branch.depth + last - branch.begin
    is_shared = any(last in part for other in branches for part in other.shared)
    return last - branch.begin + is_shared


def places_of(strands: Sequence[Strand], start: int) -> dict[int, torch.Tensor]:
    """Return by row the places int64 of its tokens among the packed ones, where the ``strands`` of
    a piece begin at ``start``; -1 of one that is not fed."""
    lengths: dict[int, int] = {}
    for strand in strands:
        lengths[strand.row] = max(lengths.get(strand.row, 0), strand.begin + strand.predicted)
    places = {row: torch.full((length,), -1) for row, length in lengths.items()}
    for strand in strands:
        places[strand.row][strand.begin : strand.begin + strand.fed] = torch.arange(
            start, start + strand.fed
        )
        start += strand.fed
    return places


def packed_branches(
    strands: Sequence[Strand], prompt: slice, device: torch.device
) -> Iterator[PackedBranch]:
    """Yield the branches among the ``strands`` that follow ``prompt``."""
    places = places_of(strands, prompt.stop)
    start = prompt.stop
    for strand in strands:
        end = start + strand.fed
        if strand.path and strand.fed:
            path = torch.cat(
                [
                    torch.arange(prompt.start, prompt.stop),
                    places[strand.row][list(strand.path)],
                    torch.arange(start, end),
                ]
            )
            positions = torch.arange(len(path) - strand.fed, len(path))
            yield PackedBranch(slice(start, end), path.to(device), positions)
        start = end


def in_order_of_rows(
    strands: Sequence[Sequence[Strand]], rows: Sequence[Sequence[torch.Tensor]]
) -> torch.Tensor:
    """Return int64 [T]: which token of the ``strands`` of all pieces, one after the other, each
    token of the pieces' ``rows`` is."""
    index = torch.full((sum(len(row) for of_piece in rows for row in of_piece),), -1)
    first = 0  # of a row
    begin = 0  # of a strand
    for of_piece, of_rows in zip(strands, rows, strict=True):
        firsts = []
        for row in of_rows:
            firsts.append(first)
            first += len(row)
        for strand in of_piece:
            at = firsts[strand.row] + strand.begin
            end = begin + len(strand.ids)
            index[at : at + strand.predicted] = torch.arange(end - strand.predicted, end)
            begin = end
    return index
