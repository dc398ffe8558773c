"""Advantage: the algorithm's credit, and which responses are left out of training because they were
truncated.

whole groups ─▶ algorithm.credit, group by group ─▶ its columns, committed together; or dropped with the reason

A truncated response, cut at ``rollout.max_tokens``, has a reward of something unfinished.
``rollout.truncated`` is

    train   as any other response
    mask    no token of it is in the loss; its reward is one of the group's, in the mean that the others are compared with
    drop    the group is what is left without it, for credit too: N - 1 rewards have their own mean and deviation

A group with too few responses left is dropped, and another one generated: with ``mask`` one without
any, with ``drop`` one with fewer than the algorithm's credit compares, and with either one that
lacks any where the loss compares whole groups (``Algorithm.unit``). The index drops whole groups
only, so single rows stay in their group, masked (:data:`MASK`; :data:`ROW_MASK` where another stage
makes that one), and the ledger counts them as trained; the train engine does not compute them.

A group with a row on which a reward function failed is dropped, and credit does not see it. A row
to which no function applies has no reward: credit is that of the others, and its own is zeros, as
in TRL. Where credit is not an advantage of rows, or compares more rows than have a reward, such a
group is dropped.

Of the groups that credit drops because they teach nothing, a step drops a bounded number
(``algorithm.max_refill``). Further ones are trained with credit that teaches nothing
(:func:`spared`), so no run generates for ever, whatever its prompts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from pipeline.data.columns import Packed
from pipeline.index.client import Claim, Index
from pipeline.index.prompts import PassRateCalls
from pipeline.worker.controller import Stage
from pipeline.worker.outputs import Output
from stages.algorithms.named import AlgorithmLike, NamedAlgorithm
from stages.flow.catalogue import CREDIT, DROPPED_ENDING, ENDING, MASK, ROW_MASK, Truncated
from stages.flow.declarations import Drop, Result, StageDeclaration
from stages.flow.drop_alarm import DropAlarm
from stages.flow.groups import GROUPS_AT_ONCE, groups_of, outputs_of, plain_columns, rows_at
from stages.flow.resolver import passed_column
from stages.rewards.scores import has_reward

DROPPED = "truncated"  # reason of a group with too few responses that were not truncated
ENVIRONMENT_FAILED = "the environment failed"  # reason of a group with such a trajectory
ABSENT = "no reward function applies"  # reason of a group with too few responses that have a reward


class Advantage(Stage):
    """The stage of an algorithm's credit, as the flow has ``declared`` it, with ``truncated`` as
    ``rollout.truncated`` says.

    ``rewards``: the functions, in the order of ``scores``; none where these are not read.
    ``rated``: the index that keeps the pass rates of prompts. ``alarm`` watches that not all groups
    are dropped. ``refill``: the index that knows how far a step is, and the number of groups that
    it may drop; None: any number.
    """

    name = CREDIT

    def __init__(
        self,
        algorithm: AlgorithmLike,
        declared: StageDeclaration,
        truncated: Truncated = "train",
        rewards: Sequence[str] = (),
        rated: PassRateCalls | None = None,
        alarm: DropAlarm | None = None,
        refill: tuple[Index, int] | None = None,
    ) -> None:
        self._alarm = alarm
        self._refill = refill
        self.algorithm = algorithm
        self.truncated = truncated
        self.rewards = rewards
        self._rated = rated
        self._rows_alone = ROW_MASK in declared.makes
        self.fetches = tuple(declared.needs)

    def room(self, held: int) -> int:
        return GROUPS_AT_ONCE

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        tokens = claim.tokens.tolist()
        lengths = Packed.of(rows[MASK]).lengths().tolist() if MASK in rows else tokens
        groups = claim.group.tolist()
        members, results = credits(
            self.algorithm,
            rows,
            groups,
            lengths,
            self.truncated,
            self.rewards,
            rows_alone=self._rows_alone,
        )
        if self._alarm is not None:
            await self._alarm.add(results)
        if self._rated is not None:  # before the commit, by which the groups may leave
            rewards = rewards_of_groups(rows, groups, members, bool(self.rewards))
            from stages.prompts.difficulty import outcome

            await self._rated.put_outcomes(
                {group: outcome(of_group) for group, of_group in rewards.items()}
            )
        if self._refill is not None and any(
            isinstance(result, Drop) and result.instead for result in results
        ):
            index, most = self._refill
            numbers = [groups[at[0]] for at in members]
            original = results
            results = spared(numbers, results, (await index.status()).droppable(most))
            spared_groups = [
                number
                for number, a, b in zip(numbers, original, results, strict=True)
                if a is not b
            ]
            if spared_groups:
                await index.spare_groups(spared_groups)
        for output in outputs_of(members, results, tokens):
            yield output


def rewards_of_groups(
    rows: TensorDict, groups: Sequence[int], members: Iterable[list[int]], scored: bool
) -> dict[int, list[float]]:
    """Return the rewards of each group by its number, for the pass rate of its prompt: of the rows
    that have one (``scored``: as the column ``scores`` says). A group that is to be dropped for a
    failure, or has none, is left out."""
    counted = torch.ones(len(rows), dtype=torch.bool)
    dropped = torch.zeros(len(rows), dtype=torch.bool)
    if scored:
        counted = has_reward(rows["scores"])
        dropped = rows["scores"].isinf().any(dim=1)
    whole = [at for at in members if not dropped[at].any()]
    of_groups = {groups[at[0]]: rows["reward"][at][counted[at]].tolist() for at in whole}
    return {group: of_group for group, of_group in of_groups.items() if of_group}


def spared(groups: Sequence[int], results: Sequence[Result], below: int) -> list[Result]:
    """Return ``results`` of the numbered ``groups``, in which a group from ``below`` on that would
    be dropped gets the columns with which it is trained instead, where its Drop has any."""
    return [
        result.instead
        if isinstance(result, Drop) and result.instead is not None and group >= below
        else result
        for group, result in zip(groups, results, strict=True)
    ]


def credits(
    algorithm: AlgorithmLike,
    rows: TensorDict,
    groups: Sequence[int],
    tokens: Sequence[int] = (),
    truncated: Truncated = "train",
    rewards: Sequence[str] = (),
    *,
    rows_alone: bool = False,
) -> tuple[list[list[int]], list[Result]]:
    """Return the credit of each group of ``rows``, and the positions of its rows.

    ``groups`` names the group of each row; ``tokens`` has the length of each response. A group in
    which one of the functions ``rewards`` or an environment failed is dropped. ``rows_alone``: truncated responses
    are left out by row_mask, which has no tokens.
    """
    optional = [name for name in algorithm.credit_optional if name in rows]
    read = (*algorithm.credit_reads, *optional) if algorithm.credit_makes else ()
    columns = plain_columns(rows, read)
    members = groups_of(groups)
    failed = rows["scores"].isinf() if rewards else torch.zeros(len(rows), 0)
    absent = (
        rows["scores"].isnan().all(dim=1) if rewards else torch.zeros(len(rows), dtype=torch.bool)
    )
    results: list[Result] = []
    for at in members:
        if ENDING in rows and bool((rows[ENDING][at] == DROPPED_ENDING).any()):
            results.append(Drop(ENVIRONMENT_FAILED))
            continue
        group = {name: rows_at(column, at) for name, column in columns.items()}
        if failures := failed[at].any(dim=0).nonzero()[:, 0].tolist():
            results.append(Drop(f"reward {rewards[failures[0]]} failed"))
            continue
        cut = rows["truncated"][at].tolist() if truncated != "train" else [False] * len(at)
        lengths = [tokens[row] for row in at] if tokens else [0] * len(at)
        is_absent = absent[at].tolist()
        result = _credit(algorithm, group, cut, is_absent, lengths, truncated, rows_alone)
        results.append(result)
    return members, results


def _credit(
    algorithm: AlgorithmLike,
    group: Mapping[str, Any],
    truncated: Sequence[bool],
    absent: Sequence[bool],
    tokens: Sequence[int],
    how: Truncated,
    rows_alone: bool,
) -> Result:
    """Return the credit of one group, and, but with "train", the mask of its responses that are not
    ``truncated``. Credit gets neither these, with "drop", nor those whose reward is ``absent``, and
    is 0 for them. Or a Drop, where too few are left, or where a 0 would teach something."""
    least = max(1, algorithm.least_group_size) if algorithm.credit_makes else 1
    uncut = truncated.count(False)
    if how != "train" and uncut < (
        len(truncated) if algorithm.unit == "group" else least if how == "drop" else 1
    ):
        return Drop(DROPPED)
    left_out = [
        lacks or (cut and how == "drop") for lacks, cut in zip(absent, truncated, strict=True)
    ]
    rest = [row for row, is_out in enumerate(left_out) if not is_out]
    # Of responses that are compared with one another a 0 says nothing; other credit is used in
    # other ways.
    compares = algorithm.unit == "row" and "advantage" in algorithm.credit_makes and least > 1
    if any(absent) and not (compares and len(rest) >= least):
        present = [False] * len(absent)
        credit = _credit(algorithm, group, truncated, present, tokens, how, rows_alone)
        return credit if isinstance(credit, Drop) else Drop(ABSENT, instead=credit)
    # the stage drops groups, and does nothing else
    if not algorithm.credit_makes and how == "train":
        return {passed_column(CREDIT): torch.ones(len(truncated), dtype=torch.bool)}

    def complete(columns: Mapping[str, Any]) -> Mapping[str, Any]:
        if len(rest) < len(truncated):
            columns = {name: _with_zeros(column, rest, tokens) for name, column in columns.items()}
        if how == "train":
            return columns
        if rows_alone:
            uncut = ~torch.tensor(truncated)
            return {**columns, ROW_MASK: columns.get(ROW_MASK, uncut) & uncut}
        # a credit may make one too
        mask = columns.get(MASK) or [torch.ones(n, dtype=torch.bool) for n in tokens]
        return {
            **columns,
            MASK: [row & (not cut) for row, cut in zip(mask, truncated, strict=True)],
        }

    credit = {}
    if algorithm.credit_makes:
        credit = algorithm.credit({name: rows_at(column, rest) for name, column in group.items()})
        credit_columns = credit.instead if isinstance(credit, Drop) else credit
        if isinstance(algorithm, NamedAlgorithm) and any(tokens) and credit_columns is not None:
            algorithm.check_columns(credit_columns, [tokens[row] for row in rest])
    if not isinstance(credit, Drop):
        return complete(credit)
    return credit if credit.instead is None else Drop(credit.reason, complete(credit.instead))


def _with_zeros(column: Any, rows: Sequence[int], tokens: Sequence[int]) -> Any:
    """Return the values of ``column`` at ``rows`` of a group, and zeros at its others: as many as
    ``tokens`` where it is ragged."""
    if isinstance(column, torch.Tensor):
        out = column.new_zeros(len(tokens), *column.shape[1:])
        out[list(rows)] = column
        return out
    values = dict(zip(rows, column, strict=True))
    return [
        values.get(row, column[0].new_zeros(n, *column[0].shape[1:]))
        for row, n in enumerate(tokens)
    ]
