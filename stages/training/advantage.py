"""Advantage: the algorithm's credit. Claims groups whose rows have all columns that credit reads.

whole groups ─▶ algorithm.credit, group by group ─▶ its columns, committed together; or dropped with the reason
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from tensordict import TensorDict

from pipeline.controller import Output, Stage
from pipeline.index.client import Claim
from stages.algorithms.named import AlgorithmLike
from stages.flow.adapter import GROUPS_AT_ONCE, Result, groups_of, outputs_of, plain_columns, rows_at
from stages.flow.catalogue import CREDIT


class Advantage(Stage):
    """The stage of an algorithm's credit."""

    name = CREDIT

    def __init__(self, algorithm: AlgorithmLike) -> None:
        self.algorithm = algorithm
        self.fetches = tuple(algorithm.credit_reads)

    def room(self, held: int) -> int:
        return GROUPS_AT_ONCE

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        members, results = credits(self.algorithm, rows, claim.group.tolist())
        for output in outputs_of(members, results, claim.tokens.tolist()):
            yield output


def credits(algorithm: AlgorithmLike, rows: TensorDict, groups: Sequence[int]) -> tuple[list[list[int]], list[Result]]:
    """The credit of each group of ``rows``, and the positions of its rows; ``groups`` names the group of each row."""
    columns, members = plain_columns(rows, tuple(algorithm.credit_reads)), groups_of(groups)
    return members, [algorithm.credit({n: rows_at(c, at) for n, c in columns.items()}) for at in members]
