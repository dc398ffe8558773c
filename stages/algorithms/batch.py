"""A train batch as algorithms see it: the columns that the loss reads, cut into the tokens of
micro-batches.

TensorDict of whole groups ─▶ TrainBatch ─▶ algorithm.prepare (whitening …) ─▶ TokenBatch for each micro-batch
                                               tokens that loss_mask or row_mask leave out end here

A ragged column stays as it lies in the batch, row after row: no row is a tensor of its own. What a
micro-batch takes of a column is gathered by one index of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from tensordict import TensorDictBase

from pipeline.data.columns import Packed
from stages.algorithms.token_batch import TokenBatch
from stages.flow.catalogue import (
    AGE,
    BRANCHES,
    MASK,
    OBSERVED,
    OPTIONAL,
    ROUTED,
    ROW_MASK,
    TEACHER_PROMPT,
    WEIGHT,
    trained_reads,
)
from stages.flow.declarations import AlgorithmDeclaration, token_shape

if TYPE_CHECKING:
    from pipeline.data.columns import Schema


def trained_columns(algorithm: AlgorithmDeclaration, schema: Schema) -> tuple[str, ...]:
    """Return the columns of samples that :class:`TrainBatch` is made from: what the loss reads of
    them, what every train engine reads, and the optional ones where a stage makes them."""
    optional = [name for name in OPTIONAL if name in schema]
    return tuple(
        dict.fromkeys(["prompt_ids", "response_ids", *trained_reads(algorithm), *optional])
    )


class TrainedAlgorithm(AlgorithmDeclaration, Protocol):
    """What a train batch needs of an algorithm."""

    def prepare(self, batch: TrainBatch) -> Mapping[str, torch.Tensor]: ...


class TrainBatch:
    """The columns that the loss reads of B rows: the share of one rank.

    ``batch[name]`` is [B, …] for a column with one value in each row, and [T] for a ragged one, or
    [T, k] for one of k values for each token, row after row. ``row`` int64 [T] is the row of each
    token, ``sequence`` int64 [T] its sequence, counted over the batch: a row is one, or each of its
    branches, without the tokens that it shares. ``is_trained`` bool [T]: whether it is trained on;
    ``trained`` int64 [B] counts the tokens of each row that are.

    ``total`` adds a tensor up over all ranks, for statistics of the whole train batch.
    ``computed``: ragged columns [T, …] that the model in training has made. ``control``: the numbers
    of :attr:`TokenBatch.control`.
    """

    def __init__(
        self,
        batch: TensorDictBase,
        algorithm: TrainedAlgorithm,
        total: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
        computed: Mapping[str, torch.Tensor] | None = None,
        control: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._control = control
        self._responses = ragged(batch, "response_ids")
        self.lengths = self._responses.lengths()
        self.row = torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)
        self.sequence = self.row
        if BRANCHES in batch and len((branches := ragged(batch, BRANCHES)).values):
            self.sequence = _sequences(self._responses, branches)
        self.total = total
        self._rows: dict[str, torch.Tensor] = {}
        self._tokens = dict(computed or {})
        # in their order
        for name in (name for name in algorithm.loss_reads if name not in algorithm.prepare_makes):
            if name not in self._tokens and name in batch and not batch[name].is_nested:
                self._rows[name] = batch[name].cpu()
            elif name not in self._tokens:
                shape = token_shape(algorithm.loss_reads[name])
                packed = ragged(batch, name, self.lengths, math.prod(shape))
                self._tokens[name] = packed.values.view(-1, *shape)
        self.weight = batch[WEIGHT].cpu() if WEIGHT in batch else None
        self.age = ragged(batch, AGE, self.lengths).values if AGE in batch else None
        self.is_trained = torch.ones(len(self.row), dtype=torch.bool)
        if MASK in batch:
            self.is_trained = ragged(batch, MASK, self.lengths).values
        if ROW_MASK in batch:
            self.is_trained = self.is_trained & batch[ROW_MASK].cpu()[self.row]
        self.trained = Packed(self.is_trained, self._responses.offsets).sums()
        self._refuse_observed()
        for name, values in algorithm.prepare(self).items():
            shape = self.row.shape if name in algorithm.prepare_makes else self[name].shape
            if values.shape != shape:
                raise ValueError(
                    f"prepare: {name} has shape {list(values.shape)}, not {list(shape)}"
                )
            if name in self._rows:
                self._rows[name] = values
            else:
                self._tokens[name] = values

    def _refuse_observed(self) -> None:
        """Raise ValueError where a token is trained that no policy has generated."""
        if self.age is None:
            return
        is_wrong = self.is_trained & (self.age == OBSERVED)
        if bool(is_wrong.any()):
            row = int(self.row[is_wrong][0])
            raise ValueError(
                f"{MASK}: row {row} trains {int(is_wrong[self.row == row].sum())} tokens of "
                f"version {OBSERVED}, which no policy has generated; leave them out"
            )

    @property
    def names(self) -> list[str]:
        """The columns that there are."""
        return [*self._rows, *self._tokens]

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a copy: what the batch is made of may be the memory of a warehouse."""
        return (self._rows[name] if name in self._rows else self._tokens[name]).clone()

    def whitened(
        self, values: torch.Tensor, over: Literal["tokens", "rows"] = "rows"
    ) -> torch.Tensor:
        """Return ``values``, [T] or [B], with mean 0 and variance 1 over the trained tokens of the
        whole train batch. Of values [B] each counts once where its row has such tokens, or,
        ``over`` "tokens", once for each of them."""
        if values.shape != self.lengths.shape:
            weight = self.is_trained.double()
        else:
            weight = (self.trained if over == "tokens" else self.trained > 0).double()
        count, mean, squares = self._moments(values, weight)
        return ((values - mean) / ((squares / max(1, count)) ** 0.5 + 1e-8)).to(values.dtype)

    def moments(self, values: torch.Tensor) -> tuple[float, float]:
        """Return the mean and the standard deviation, with n - 1 in its denominator, of ``values``
        [B] over the rows of the whole train batch that have trained tokens."""
        count, mean, squares = self._moments(values, (self.trained > 0).double())
        return mean, (squares / max(1, count - 1)) ** 0.5

    def _moments(self, values: torch.Tensor, weight: torch.Tensor) -> tuple[float, float, float]:
        """Return the sum of ``weight``, the weighted mean of ``values``, and the weighted sum of
        their squared distances from it, of all ranks."""
        # what is not trained on may be anything
        finite = torch.where(weight > 0, values.double(), 0.0)
        count, total = self.total(torch.stack([weight.sum(), (weight * finite).sum()])).tolist()
        mean = total / max(1, count)
        squares = self.total((weight * (finite - mean).square()).sum()).item()
        return count, mean, squares

    def tokens(
        self,
        numbers: Sequence[int],
        groups: Sequence[int],
        logprobs: torch.Tensor,
        entropy: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        *,
        total_tokens: int,
        total_rows: int,
        total_groups: int,
    ) -> TokenBatch:
        """Return the rows ``numbers``, of the micro-batch's groups ``groups``, as the loss takes
        them.

        ``logprobs``, ``entropy`` and ``values`` are those of all their response tokens, on the
        device to compute on. ``logprobs`` [T, 1 + k]: those of the k candidates of each token
        follow its own.
        """
        at = torch.tensor(numbers)
        device = logprobs.device
        row = torch.arange(len(numbers)).repeat_interleave(self.lengths[at])
        index = self._responses.indexes(numbers)
        is_branched = self.sequence is not self.row
        is_trained = self.is_trained[index]
        if not bool(is_trained.all()):
            index = index[is_trained]
            row = row[is_trained]
            there = is_trained.to(device)
            logprobs = logprobs[there]
            entropy = None if entropy is None else entropy[there]
            values = None if values is None else values[there]
        candidates = None
        if logprobs.dim() == 2:
            candidates = logprobs[:, 1:]
            logprobs = logprobs[:, 0]
        single = {name: column[at] for name, column in self._rows.items()}
        columns = {name: column.index_select(0, index) for name, column in self._tokens.items()}
        columns |= {name: column[row] for name, column in single.items()}
        return TokenBatch(
            logprobs=logprobs,
            columns={name: column.to(device) for name, column in columns.items()},
            row=row.to(device),
            row_tokens=self.trained[at].to(device),
            total_tokens=total_tokens,
            total_rows=total_rows,
            total_groups=total_groups,
            rows={name: column.to(device) for name, column in single.items()},
            group=torch.tensor(groups).to(device),
            entropy=entropy,
            values=values,
            candidates=candidates,
            age=None if self.age is None else self.age[index].to(device),
            weight=None if self.weight is None else self.weight[at][row].to(device),
            sequence=self._sequences_of(index, row).to(device) if is_branched else None,
            control=self._control,
        )

    def _sequences_of(self, index: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Return int64 [T], the sequence of each token of a micro-batch: ``index`` of the batch,
        in its ``row``. Rows that are there twice have sequences of their own."""
        count = len(self.row) + 1
        return (row * count + self.sequence[index]).unique(return_inverse=True)[1]


def _sequences(responses: Packed, branches: Packed) -> torch.Tensor:
    """Return int64 [T], the sequence of each response token. ``branches``: the column."""
    lengths = responses.lengths()
    firsts = lengths.cumsum(0) - lengths
    begins = firsts.repeat_interleave(branches.lengths() // 2) + branches.values[::2]
    starts = torch.zeros(len(responses.values), dtype=torch.int64)
    starts[torch.cat([firsts[lengths > 0], begins])] = 1
    return starts.cumsum(0) - 1


def ragged(
    batch: TensorDictBase, name: str, lengths: torch.Tensor | None = None, per_token: int = 1
) -> Packed:
    """Return the ragged column ``name`` on the CPU: of a batch there, on the same memory.

    Raises ValueError where a row does not have ``per_token`` values for each of the ``lengths``
    tokens.
    """
    if name not in batch:
        raise ValueError(f"batch: column {name} is missing; it has {sorted(batch.keys())}")
    packed = Packed.of(batch[name])
    packed = Packed(packed.values.cpu(), packed.offsets)
    if lengths is None:
        return packed
    if len(wrong := (packed.lengths() != lengths * per_token).nonzero()):
        row = int(wrong[0, 0])
        each = f", which take {per_token} each" if per_token > 1 else ""
        raise ValueError(
            f"{name}: row {row} has {int(packed.lengths()[row])} values for a response of "
            f"{int(lengths[row])} tokens{each}"
        )
    return packed


def seen_by_teacher(batch: TensorDictBase) -> TensorDictBase:
    """Return ``batch`` with the column ``teacher_prompt_ids``, where it has one, in the place of
    ``prompt_ids``. Rows of a group whose prompts differ there are groups of their own."""
    if TEACHER_PROMPT not in batch:
        return batch
    prompts = ragged(batch, TEACHER_PROMPT).lists()
    numbers: dict[tuple[int, ...], int] = {}
    groups = [
        numbers.setdefault((group, *prompt), len(numbers))
        for group, prompt in zip(batch["group"].tolist(), prompts, strict=True)
    ]
    seen = batch.exclude(TEACHER_PROMPT, ROUTED)  # routers chose for another prompt
    seen["prompt_ids"] = batch[TEACHER_PROMPT]
    seen["group"] = torch.tensor(groups)
    return seen


def over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of several optimizer steps as one: their mean, of maxima the largest, of
    counted tokens the sum. Gaps by age are those of the first step, as the others compare with
    weights that have moved."""
    if len(steps) == 1:
        return dict(steps[0])
    out = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        values = [step[name] for step in steps if name in step][
            : 1 if name.startswith("gap_mean_") else None
        ]
        largest = name.startswith("max_") or name == "gap_max"
        out[name] = (
            max(values) if largest else sum(values) / (1 if name == "fed_tokens" else len(values))
        )
    return out
