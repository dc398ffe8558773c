"""Data packed into micro-batches: what several begin with is computed once.

    tokens of data ─▶ shared_beginnings ─▶ deal: to the replicas
                                       ─▶ plan_micro_batches: within the token budget
                                       ─▶ pack: [ beginning | rest of A | rest of B | … ]

Every token that is fed predicts targets of its own, which need not be the tokens that follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from stages.calls.losses import DatumColumns
from stages.engines.plans import GroupShape, Piece, deal, plan_micro_batches
from stages.engines.torch.model.packing import PackedBatch, pack


@dataclass(frozen=True)
class Beginning:
    """The first ``length`` tokens, which ``data``, by number, have in common."""

    length: int
    data: tuple[int, ...]


@dataclass(frozen=True)
class MicroBatch:
    """Data that are computed at once: by beginning, in the order in which they are packed."""

    pieces: tuple[Beginning, ...]

    @property
    def data(self) -> list[int]:
        """Their numbers in the order of the outputs."""
        return [number for piece in self.pieces for number in piece.data]


def shared_beginnings(tokens: Sequence[np.ndarray]) -> list[Beginning]:
    """Put every datum into one group, by common first tokens, such that few tokens are fed. Each of
    ``tokens`` has one at least.

    >>> shared_beginnings([np.array(t) for t in ([1, 2, 3, 4], [7, 8], [1, 2, 3, 5, 6])])
    [Beginning(length=3, data=(0, 2)), Beginning(length=2, data=(1,))]
    """
    order = sorted(range(len(tokens)), key=lambda number: tokens[number].astype(">u8").tobytes())
    groups: list[Beginning] = []
    for number in order:
        if groups:
            last = groups[-1]
            length = min(last.length, _common(tokens[last.data[-1]], tokens[number]))
            count = len(last.data)
            if count * length > (count - 1) * last.length:  # fewer are fed with it than beside it
                groups[-1] = Beginning(length, (*last.data, number))
                continue
        groups.append(Beginning(len(tokens[number]), (number,)))
    return groups


def plan(
    tokens: Sequence[np.ndarray], token_budget: int | None, replicas: int = 1
) -> tuple[list[list[MicroBatch]], int]:
    """Return the micro-batches of each replica, of at most ``token_budget`` fed tokens (None: no
    limit) or of one datum; and the number of fed tokens. The first replica has one at least. A
    beginning is computed by several replicas only where they would have too uneven shares."""
    groups = shared_beginnings(tokens)
    shapes = [_shape(group, tokens) for group in groups]
    shares = [_data_of(share, groups) for share in deal(shapes, min(replicas, len(tokens)))]
    fed = sum(
        _shape(piece, tokens).tokens(range(len(piece.data))) for share in shares for piece in share
    )
    shares += [()] * (replicas - len(shares))
    return [_micro_batches(share, tokens, token_budget) for share in shares], fed


def _shape(group: Beginning, tokens: Sequence[np.ndarray]) -> GroupShape:
    rests = (len(tokens[number]) - group.length for number in group.data)
    return GroupShape(group.length, tuple(rest + 1 for rest in rests))


def _micro_batches(
    groups: Sequence[Beginning], tokens: Sequence[np.ndarray], token_budget: int | None
) -> list[MicroBatch]:
    planned = plan_micro_batches([_shape(group, tokens) for group in groups], token_budget)
    return [MicroBatch(_data_of(pieces, groups)) for pieces in planned]


def _data_of(pieces: Iterable[Piece], groups: Sequence[Beginning]) -> tuple[Beginning, ...]:
    return tuple(
        Beginning(
            groups[piece.group].length, tuple(groups[piece.group].data[row] for row in piece.rows)
        )
        for piece in pieces
    )


def pack_data(
    micro_batch: MicroBatch, columns: Sequence[DatumColumns], device: torch.device
) -> PackedBatch:
    """Pack the data of ``micro_batch``. The T targets are those of :attr:`MicroBatch.data`, one
    datum after the other; a datum's row by row where a token has several."""
    unfed = np.zeros(1, np.int64)  # the last token of a row is not fed
    prompts = []
    rows: list[list[torch.Tensor]] = []
    places = []  # of the fed tokens, those that predict each target
    at = 0
    for piece in micro_batch.pieces:
        beginning = np.arange(at, at + piece.length)
        prompts.append(torch.from_numpy(columns[piece.data[0]].tokens[: piece.length]))
        rows.append([])
        at += piece.length
        for number in piece.data:
            rest = columns[number].tokens[piece.length :]
            rows[-1].append(torch.from_numpy(np.concatenate([rest, unfed])))
            of_datum = np.concatenate([beginning, np.arange(at, at + len(rest))])
            places.append(of_datum.repeat(columns[number].targets.size // len(of_datum)))
            at += len(rest)
    targets = np.concatenate([columns[number].targets.ravel() for number in micro_batch.data])
    return replace(
        pack(prompts, rows, device),
        places=torch.arange(at, device=device),
        source=torch.from_numpy(np.concatenate(places)).to(device),
        targets=torch.from_numpy(targets).to(device),
    )


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many first tokens ``a`` and ``b`` have in common."""
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size
