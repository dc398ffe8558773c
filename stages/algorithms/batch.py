"""A train batch as algorithms see it: the columns that the loss reads, cut into the tokens of
micro-batches.

TensorDict of whole groups ─▶ TrainBatch ─▶ algorithm.prepare (whitening …) ─▶ TokenBatch for each micro-batch
                                               tokens that loss_mask leaves out end here
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from tensordict import TensorDictBase

from stages.algorithms.token_batch import TokenBatch
from stages.flow.catalogue import AGE, MASK, OPTIONAL, WEIGHT, made_in_training
from stages.flow.declarations import AlgorithmDeclaration

if TYPE_CHECKING:
    from pipeline.data.columns import Schema


def trained_columns(algorithm: AlgorithmDeclaration, schema: Schema) -> tuple[str, ...]:
    """Return the columns of samples that :class:`TrainBatch` is made from: what the loss reads of
    them, what every train engine reads, and the optional ones where a stage makes them."""
    trainer_columns = made_in_training(algorithm)
    read = [name for name in algorithm.loss_reads if name not in trainer_columns]
    return tuple(
        dict.fromkeys(
            ["prompt_ids", "response_ids", *read, *(name for name in OPTIONAL if name in schema)]
        )
    )


class TrainedAlgorithm(AlgorithmDeclaration, Protocol):
    """What a train batch needs of an algorithm."""

    def prepare(self, batch: TrainBatch) -> Mapping[str, torch.Tensor]: ...


class TrainBatch:
    """The columns that the loss reads of B rows: the share of one rank.

    ``batch[name]`` is [B, …] for a column with one value in each row, and [T, …] for a ragged one,
    row after row. ``row`` int64 [T] is the row of each token; ``is_trained`` bool [T]: whether it
    is trained on; ``trained`` int64 [B] counts the tokens of each row that are.

    ``total`` adds a tensor up over all ranks, for statistics of the whole train batch.
    """

    def __init__(
        self,
        batch: TensorDictBase,
        algorithm: TrainedAlgorithm,
        total: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
        computed: Mapping[str, Sequence[torch.Tensor]] | None = None,
    ) -> None:
        self.lengths = torch.tensor([len(row) for row in jagged_rows(batch, "response_ids")])
        self.row = torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)
        self.total = total
        self._rows: dict[str, torch.Tensor] = {}
        self._tokens: dict[str, list[torch.Tensor]] = {
            name: list(rows) for name, rows in (computed or {}).items()
        }
        # in their order
        for name in (name for name in algorithm.loss_reads if name not in algorithm.prepare_makes):
            if name not in self._tokens and name in batch and not batch[name].is_nested:
                self._rows[name] = batch[name].cpu()
            elif name not in self._tokens:
                self._tokens[name] = jagged_rows(batch, name, self.lengths)
        self.mask = jagged_rows(batch, MASK, self.lengths) if MASK in batch else None
        self.weight = batch[WEIGHT].cpu() if WEIGHT in batch else None
        self.age = jagged_rows(batch, AGE, self.lengths) if AGE in batch else None
        self.trained = (
            self.lengths if self.mask is None else torch.stack([row.sum() for row in self.mask])
        )
        self.is_trained = (
            torch.ones(len(self.row), dtype=torch.bool)
            if self.mask is None
            else torch.cat(self.mask)
        )
        for name, values in algorithm.prepare(self).items():
            shape = self.row.shape if name in algorithm.prepare_makes else self[name].shape
            if values.shape != shape:
                raise ValueError(
                    f"prepare: {name} has shape {list(values.shape)}, not {list(shape)}"
                )
            if name in self._rows:
                self._rows[name] = values
            else:
                self._tokens[name] = list(values.split(self.lengths.tolist()))

    @property
    def names(self) -> list[str]:
        """The columns that there are."""
        return [*self._rows, *self._tokens]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._rows[name] if name in self._rows else torch.cat(self._tokens[name])

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
        # what is not trained on may be anything
        finite = torch.where(weight > 0, values.double(), 0.0)
        count, total = self.total(torch.stack([weight.sum(), (weight * finite).sum()])).tolist()
        mean = total / max(1, count)
        variance = self.total((weight * (finite - mean).square()).sum()).item() / max(1, count)
        return ((values - mean) / (variance**0.5 + 1e-8)).to(values.dtype)

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
        device to compute on.
        """
        at = torch.tensor(numbers)
        device = logprobs.device
        row = torch.arange(len(numbers)).repeat_interleave(self.lengths[at])
        flat = {
            name: torch.cat([rows[number] for number in numbers])
            for name, rows in self._tokens.items()
        }
        age = None if self.age is None else torch.cat([self.age[number] for number in numbers])
        if self.mask is not None:
            mask = torch.cat([self.mask[number] for number in numbers])
            row = row[mask]
            logprobs = logprobs[mask.to(device)]
            entropy = None if entropy is None else entropy[mask.to(device)]
            values = None if values is None else values[mask.to(device)]
            flat = {name: values[mask] for name, values in flat.items()}
            age = None if age is None else age[mask]
        single = {name: values[at] for name, values in self._rows.items()}
        flat |= {name: values[row] for name, values in single.items()}
        return TokenBatch(
            logprobs=logprobs,
            columns={name: values.to(device) for name, values in flat.items()},
            row=row.to(device),
            row_tokens=self.trained[at].to(device),
            total_tokens=total_tokens,
            total_rows=total_rows,
            total_groups=total_groups,
            rows={name: values.to(device) for name, values in single.items()},
            group=torch.tensor(groups).to(device),
            entropy=entropy,
            values=values,
            age=None if age is None else age.to(device),
            weight=None if self.weight is None else self.weight[at][row].to(device),
        )


def jagged_rows(
    batch: TensorDictBase, name: str, lengths: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return the rows of the ragged column ``name``, on the CPU.

    Raises ValueError where one is not as long as ``lengths`` says.
    """
    if name not in batch:
        raise ValueError(f"batch: column {name} is missing; it has {sorted(batch.keys())}")
    rows = list(batch[name].cpu().unbind())
    for number, (row, length) in enumerate(
        zip(rows, [] if lengths is None else lengths.tolist(), strict=False)
    ):
        if len(row) != length:
            raise ValueError(
                f"{name}: row {number} has {len(row)} values for a response of {length} tokens"
            )
    return rows


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
