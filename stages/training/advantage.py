"""Advantage: the algorithm's credit. Claims groups whose rows have all columns that credit reads.

whole groups ─▶ algorithm.credit, group by group ─▶ its columns, committed together; or dropped with the reason
   └ a row that a reward function failed on ─▶ the group is dropped, and credit does not see it
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import torch
from tensordict import TensorDict

from pipeline.controller import Output, Stage
from pipeline.index.client import Claim
from stages.algorithms.named import AlgorithmLike
from stages.flow.adapter import GROUPS_AT_ONCE, Result, groups_of, outputs_of, plain_columns, rows_at
from stages.flow.catalogue import CREDIT
from stages.flow.declarations import Drop
from stages.flow.resolver import passed_column


class Advantage(Stage):
    """The stage of an algorithm's credit. ``rewards``: the functions, in the order of ``scores``, whose failure drops a
    group."""

    name = CREDIT

    def __init__(self, algorithm: AlgorithmLike, fetches: Sequence[str], rewards: Sequence[str] = ()) -> None:
        self.algorithm, self.fetches, self.rewards = algorithm, tuple(fetches), rewards

    def room(self, held: int) -> int:
        return GROUPS_AT_ONCE

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        members, results = credits(self.algorithm, rows, claim.group.tolist(), self.rewards)
        for output in outputs_of(members, results, claim.tokens.tolist()):
            yield output


def credits(
    algorithm: AlgorithmLike, rows: TensorDict, groups: Sequence[int], rewards: Sequence[str] = ()
) -> tuple[list[list[int]], list[Result]]:
    """The credit of each group of ``rows``, and the positions of its rows; ``groups`` names the group of each row. A group
    in which one of the functions ``rewards`` failed is dropped."""
    members = groups_of(groups)
    if algorithm.credit_makes:
        columns = plain_columns(rows, tuple(algorithm.credit_reads))
    else:  # the stage drops groups, and does nothing else
        columns = {passed_column(CREDIT): torch.ones(len(rows), dtype=torch.bool)}
    failed = rows["scores"].isinf() if rewards else torch.zeros(len(rows), 0)
    results: list[Result] = []
    for at in members:
        group = {name: rows_at(column, at) for name, column in columns.items()}
        if failures := failed[at].any(dim=0).nonzero()[:, 0].tolist():
            results.append(Drop(f"reward {rewards[failures[0]]} failed"))
        else:
            results.append(algorithm.credit(group) if algorithm.credit_makes else group)
    return members, results
