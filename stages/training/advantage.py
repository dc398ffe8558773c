"""Advantage: the algorithm's credit, and which responses are left out of training because they were truncated.

whole groups ─▶ algorithm.credit, group by group ─▶ its columns, committed together; or dropped with the reason

A truncated response, cut at ``rollout.max_tokens``, has a reward of something unfinished. ``rollout.truncated`` is

    train   as any other response
    mask    no token of it is in the loss; its reward is one of the group's, in the mean that the others are compared with
    drop    the group is what is left without it, for credit too: N - 1 rewards have their own mean and deviation

A group with too few responses left is dropped, and another one generated: with ``mask`` one without any, with ``drop`` one
with fewer than the algorithm's credit compares, and with either one that lacks any where the loss compares whole groups
(``Algorithm.unit``). The index drops whole groups only, so single rows stay in their group, masked (:data:`MASK`), and the
ledger counts them as trained; the train engine does not compute them.

A group with a row on which a reward function failed is dropped, and credit does not see it.

Of the groups that credit drops because they teach nothing, a step drops a bounded number (``algorithm.max_refill``). Further
ones are trained with credit that teaches nothing (:func:`spared`), so no run generates for ever, whatever its prompts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from pipeline.controller import Output, Stage
from pipeline.events import AlarmEvent
from pipeline.index.client import Claim, Index
from pipeline.index.prompts import PassRateCalls
from stages.algorithms.named import AlgorithmLike
from stages.difficulty import outcome
from stages.flow.adapter import GROUPS_AT_ONCE, Result, groups_of, outputs_of, plain_columns, rows_at
from stages.flow.catalogue import CREDIT, MASK, Truncated, credit_stage
from stages.flow.declarations import Drop
from stages.flow.resolver import passed_column

DROPPED = "truncated"  # reason of a group with too few responses that were not truncated
METRIC = "dropped_groups"  # of the alarm when no group teaches
LOOK = (
    "Nothing is learned, and tokens are generated for it. Look at the newest samples and what the reward functions return: "
    "a reward that is the same for all responses, or fails; prompts that are all too easy or too hard."
)


class DropAlarm:
    """Raises an alarm when ``most`` groups in a row were to be dropped; the next one after a group that was not."""

    def __init__(self, index: Index, most: int, worker: str) -> None:
        self._index, self._most, self._worker, self._in_a_row = index, most, worker, 0

    async def add(self, results: Iterable[Result]) -> None:
        for result in results:
            self._in_a_row = self._in_a_row + 1 if isinstance(result, Drop) else 0
            if isinstance(result, Drop) and self._in_a_row == self._most:
                status, count = await self._index.status(), float(self._most)
                reason = (
                    f"{METRIC}: {self._most} groups in a row taught nothing, the last one because of: {result.reason}"
                )
                await self._index.emit(
                    AlarmEvent(
                        metric=METRIC, step=status.trained, value=count, limit=count, reason=reason, look=LOOK,
                        worker=self._worker,
                    )
                )  # fmt: skip


class Advantage(Stage):
    """The stage of an algorithm's credit, with ``truncated`` as ``rollout.truncated`` says. ``rewards``: the functions, in
    the order of ``scores``, whose failure drops a group. ``rated``: the index that keeps the pass rates of prompts.
    ``alarm`` watches that not all groups are dropped. ``refill``: the index that knows how far a step is, and the number of
    groups that it may drop; None: any number. ``masked``: a stage before this one makes ``loss_mask``."""

    name = CREDIT

    def __init__(
        self,
        algorithm: AlgorithmLike,
        truncated: Truncated = "train",
        rewards: Sequence[str] = (),
        rated: PassRateCalls | None = None,
        alarm: DropAlarm | None = None,
        refill: tuple[Index, int] | None = None,
        masked: bool = False,
    ) -> None:
        self._alarm, self._refill = alarm, refill
        self.algorithm, self.truncated, self.rewards, self._rated = algorithm, truncated, rewards, rated
        also = {name: "" for name, reads in {"scores": rewards, "reward": rated}.items() if reads}
        declared = credit_stage(algorithm, truncated, also)  # type: ignore[arg-type]
        optional = declared.optional if declared and masked else ()
        self.fetches = (*(declared.needs if declared else ()), *optional)

    def room(self, held: int) -> int:
        return GROUPS_AT_ONCE

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        tokens = claim.tokens.tolist()
        groups = claim.group.tolist()
        members, results = credits(self.algorithm, rows, groups, tokens, self.truncated, self.rewards)
        if self._alarm is not None:
            await self._alarm.add(results)
        if self._rated is not None:  # before the commit, by which the groups may leave
            failed = rows["scores"].isinf().any(dim=1) if self.rewards else torch.zeros(len(groups), dtype=torch.bool)
            whole = [at for at in members if not failed[at].any()]
            await self._rated.put_outcomes({groups[at[0]]: outcome(rows["reward"][at].tolist()) for at in whole})
        if self._refill is not None and any(isinstance(result, Drop) and result.instead for result in results):
            index, most = self._refill
            numbers = [groups[at[0]] for at in members]
            given, results = results, spared(numbers, results, (await index.status()).droppable(most))
            kept = [number for number, a, b in zip(numbers, given, results, strict=True) if a is not b]
            if kept:
                await index.spare_groups(kept)
        for output in outputs_of(members, results, tokens):
            yield output


def spared(groups: Sequence[int], results: Sequence[Result], below: int) -> list[Result]:
    """``results`` of the numbered ``groups``, in which a group from ``below`` on that would be dropped gets the columns with
    which it is trained instead, where its Drop has any."""
    return [
        result.instead if isinstance(result, Drop) and result.instead is not None and group >= below else result
        for group, result in zip(groups, results, strict=True)
    ]


def credits(
    algorithm: AlgorithmLike,
    rows: TensorDict,
    groups: Sequence[int],
    tokens: Sequence[int] = (),
    truncated: Truncated = "train",
    rewards: Sequence[str] = (),
) -> tuple[list[list[int]], list[Result]]:
    """The credit of each group of ``rows``, and the positions of its rows. ``groups`` names the group of each row;
    ``tokens`` has the length of each response, which "train" does not need. A group in which one of the functions
    ``rewards`` failed is dropped."""
    optional = [name for name in algorithm.credit_optional if name in rows]
    read = (*algorithm.credit_reads, *optional) if algorithm.credit_makes else ()
    columns, members = plain_columns(rows, read), groups_of(groups)
    failed = rows["scores"].isinf() if rewards else torch.zeros(len(rows), 0)
    results: list[Result] = []
    for at in members:
        group = {name: rows_at(column, at) for name, column in columns.items()}
        if failures := failed[at].any(dim=0).nonzero()[:, 0].tolist():
            results.append(Drop(f"reward {rewards[failures[0]]} failed"))
        elif truncated != "train":
            cut, lengths = rows["truncated"][at].tolist(), [tokens[row] for row in at]
            results.append(_credit_of_rest(algorithm, group, cut, lengths, leave_out=truncated == "drop"))
        elif algorithm.credit_makes:
            results.append(algorithm.credit(group))
        else:  # the stage drops groups, and does nothing else
            results.append({passed_column(CREDIT): torch.ones(len(at), dtype=torch.bool)})
    return members, results


def _credit_of_rest(
    algorithm: AlgorithmLike,
    group: Mapping[str, Any],
    truncated: Sequence[bool],
    tokens: Sequence[int],
    *,
    leave_out: bool,
) -> Result:
    """The credit of one group, and the mask of its responses that are not ``truncated``. ``leave_out``: credit gets these
    alone, and is 0 for the others. Or a Drop, where they are too few."""
    rest = [row for row, cut in enumerate(truncated) if not cut]
    least = max(1, algorithm.least_group_size) if leave_out and algorithm.credit_makes else 1
    if len(rest) < (len(truncated) if algorithm.unit == "group" else least):
        return Drop(DROPPED)
    all_rows = not leave_out or len(rest) == len(truncated)
    credit: Result = {}
    if algorithm.credit_makes:
        credit = algorithm.credit(group if all_rows else {name: rows_at(c, rest) for name, c in group.items()})

    def masked(columns: Mapping[str, Any]) -> Mapping[str, Any]:
        if not all_rows:
            columns = {name: _with_zeros(column, rest, tokens) for name, column in columns.items()}
        mask = columns.get(MASK) or [torch.ones(n, dtype=torch.bool) for n in tokens]  # a credit may make one too
        return {**columns, MASK: [row & (not cut) for row, cut in zip(mask, truncated, strict=True)]}

    if not isinstance(credit, Drop):
        return masked(credit)
    return credit if credit.instead is None else Drop(credit.reason, masked(credit.instead))


def _with_zeros(column: Any, rows: Sequence[int], tokens: Sequence[int]) -> Any:
    """The values of ``column`` at ``rows`` of a group, and zeros at its others: as many as ``tokens`` where it is ragged."""
    if isinstance(column, torch.Tensor):
        out = column.new_zeros(len(tokens), *column.shape[1:])
        out[list(rows)] = column
        return out
    values = dict(zip(rows, column, strict=True))
    return [values.get(row, column[0].new_zeros(n, *column[0].shape[1:])) for row, n in enumerate(tokens)]
