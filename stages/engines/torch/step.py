"""The training step: what a batch's mini-batches are, and the forward and backward pass of one.

prepare            scores by the model in training ─▶ mini-batches of the rows of all ranks, cut or drawn
                     ─▶ micro-batches of at most token_budget tokens ─▶ totals over ranks
forward_backward   for each micro-batch: pack ─▶ model ─▶ logprobs ─▶ algorithm.loss ─▶ backward
                     ─▶ metrics of all ranks
optimizer_step     clip ─▶ finite? ─▶ AdamW                              (in the engine: train.py)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from tensordict import TensorDictBase

from pipeline.data.columns import Packed, offsets_of
from stages.algorithms.batch import TrainBatch, seen_by_teacher
from stages.algorithms.named import AlgorithmLike, split_gap
from stages.engines.plans import Piece, cut_mini_batches, plan_micro_batches
from stages.engines.torch.model.packed_model import Outputs, PackedModel
from stages.engines.torch.model.packing import Group, Rows
from stages.engines.torch.parallel.interface import Parallel
from stages.engines.torch.parallel.runner import Packing
from stages.flow.catalogue import TEACHER_IDS, TEACHER_LOGPROBS
from stages.flow.declarations import BASE, ENTROPY, IN_TRAINING, token_shape
from stages.weights.published import PROBE


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """The rows and micro-batches that one optimizer step trains on."""

    batch: TrainBatch

    rows: Rows
    """Those of this rank."""

    plan: Sequence[Sequence[Piece]]
    """The micro-batches."""

    passes: int
    """Passes through the model that each rank makes."""

    everywhere: bool
    """Every replica has a row of it."""

    totals: Mapping[str, int]
    """The sizes ``total_tokens``, ``total_rows`` and ``total_groups`` of the mini-batch on all
    ranks, by which its loss is divided."""


class TrainingStep:
    """Computes gradients and scores with ``packed_model``, which ``parallel`` has placed."""

    def __init__(
        self, packed_model: PackedModel, parallel: Parallel, token_budget: int | None
    ) -> None:
        self._packed_model = packed_model
        self._parallel = parallel
        self._token_budget = token_budget

    def prepare(
        self,
        batch: TensorDictBase,
        algorithm: AlgorithmLike,
        control: Mapping[str, float],
        version: int,
    ) -> tuple[TrainBatch, list[MiniBatch]]:
        """Compute the scores that ``algorithm`` has of the model in training, and cut the batch of
        all ranks, of which this one has the rows of ``batch``, into mini-batches. ``control``: of
        :attr:`~stages.algorithms.token_batch.TokenBatch.control`; ``version``: the number of the
        train batch."""
        named = self._teacher_columns(batch, algorithm)
        rows = self._rows(batch)
        scored_by = {name: by for name, by in algorithm.scores.items() if by in IN_TRAINING}
        scored_by = {name: by for name, by in scored_by.items() if name not in named}
        scores = self._scores_by(rows, set(scored_by.values()))
        named |= {name: scores[by] for name, by in scored_by.items()}
        train_batch = TrainBatch(batch, algorithm, self._parallel.total, named, control)
        if algorithm.candidates:
            rows = replace(rows, candidates=train_batch[algorithm.candidates])

        whole = algorithm.unit == "group"
        tokens = self._of_all_rows(rows, train_batch.trained)
        if algorithm.drawn_by:
            cut = self._drawn(rows, train_batch, tokens, algorithm, version)
        else:
            cut = cut_mini_batches(tokens, algorithm.mini_batches, whole=whole)
        parts = []
        for places in cut:
            part = [group.part(places.get(group.number, ())) for group in rows.groups]
            parts.append([group for group in part if group.rows])
        plans = [self._plan(part, whole=whole) for part in parts]
        passes = self._parallel.all_gather_counts([len(plan) for plan in plans])

        least = algorithm.least_group_size if whole else 1
        mini_batches = []
        for places, part, plan, (fewest, most) in zip(cut, parts, plans, passes, strict=True):
            counts = [
                [tokens[number][place] for place in group_places]
                for number, group_places in places.items()
            ]
            trained_rows = [sum(count > 0 for count in of_group) for of_group in counts]
            totals = {
                "total_tokens": sum(map(sum, counts)),
                "total_rows": sum(trained_rows),
                "total_groups": sum(count >= least for count in trained_rows),
            }
            of_rank = replace(rows, groups=part)
            mini_batches.append(MiniBatch(train_batch, of_rank, plan, most, fewest > 0, totals))
        return train_batch, mini_batches

    def _of_all_rows(self, rows: Rows, numbers: torch.Tensor) -> dict[int, dict[int, int]]:
        """Return ``numbers`` int64 [B] of the rows of all ranks, by group and place."""
        values = numbers.tolist()
        triples = [
            (group.number, place, values[row])
            for group in rows.groups
            for place, row in zip(group.places, group.rows, strict=True)
        ]
        by_group: dict[int, dict[int, int]] = {}
        for number, place, value in self._parallel.all_gather_rows(torch.tensor(triples)).tolist():
            by_group.setdefault(number, {})[place] = value
        return by_group

    def _drawn(
        self,
        rows: Rows,
        train_batch: TrainBatch,
        tokens: Mapping[int, Mapping[int, int]],
        algorithm: AlgorithmLike,
        version: int,
    ) -> Sequence[Mapping[int, tuple[int, ...]]]:
        """Return the mini-batches that ``algorithm`` draws. ``tokens``: to train on, by group and
        place."""
        column = train_batch[algorithm.drawn_by].float()
        bits = self._of_all_rows(rows, column.view(torch.int32).long())
        drawn_by = {
            number: {
                place: float(
                    torch.tensor(bits[number][place], dtype=torch.int32).view(torch.float32)
                )
                for place, count in of_group.items()
                if count
            }
            for number, of_group in tokens.items()
            if any(of_group.values())
        }
        return algorithm.draw(drawn_by, version) if drawn_by else []

    def forward_backward(self, mini_batch: MiniBatch, algorithm: AlgorithmLike) -> dict[str, float]:
        """Add the gradients of the algorithm's loss to those that there are. Return the metrics of
        all ranks, among them ``loss`` and ``fed_tokens``, the tokens that went through models."""
        rows = mini_batch.rows
        plan = mini_batch.plan
        totals = mini_batch.totals
        model = self._packed_model
        parallel = self._parallel
        sums: dict[str, torch.Tensor] = {"loss": torch.zeros((), device=model.device)}

        def loss_of(
            number: int, logprobs: torch.Tensor, entropy: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            if number >= len(plan):
                return logprobs.sum() * 0
            pieces = plan[number]
            tokens = mini_batch.batch.tokens(
                [number for piece in pieces for number in rows.numbers(piece)],
                [at for at, piece in enumerate(pieces) for _ in piece.rows],
                logprobs,
                entropy,
                values if model.value_head else None,
                **totals,
            )
            output = algorithm.loss(tokens)
            measured = {"loss": output.loss.detach(), **output.metrics, **tokens.behaviour_gap()}
            of_tokens = tokens.entropy.detach()  # type: ignore[union-attr]
            measured["entropy"] = of_tokens.sum() / totals["total_tokens"]
            _add(sums, measured)
            return output.loss

        if model.expert_load is not None:
            model.expert_load.counts.zero_()
        micro_batches = [partial(rows.pack, pieces) for pieces in plan]
        if model.router_loss is not None:
            # a forward pass for the counts alone
            with torch.no_grad(), model.router_loss.counting(parallel.total_of_tokens):
                parallel.runner.score(micro_batches, mini_batch.passes)
            parallel.reshard()
        parallel.runner.learn(micro_batches, mini_batch.passes, loss_of)

        fed = sum(
            rows.groups[piece.group].shape.tokens(piece.rows) for pieces in plan for piece in pieces
        )
        of_engine = {"fed_tokens": float(fed)}
        if model.expert_load is not None:
            of_engine |= model.expert_load.metrics(parallel.total_of_tokens)
        measured = {name: value.item() for name, value in sums.items()}
        reduced = parallel.reduce_metrics(measured | of_engine, mini_batch.everywhere)
        of_engine = {name: reduced.pop(name) for name in ("loss", *of_engine)}
        gap, metrics = split_gap(reduced)
        if model.routing is not None:
            gap |= model.routing.metrics(parallel.total_of_tokens)
        if model.router_loss is not None:
            gap |= model.router_loss.metrics(parallel.total_of_tokens)
        if math.isfinite(of_engine["loss"]):
            metrics = algorithm.finish(metrics)
        return {**of_engine, **gap, **metrics}

    def logprobs(self, batch: TensorDictBase) -> Packed:
        """Return the logprobs of the response tokens, on the CPU, without a gradient. Each group
        is computed alone."""
        rows = self._rows(batch)
        return Packed(self._scores(rows)[0], rows.column.offsets)

    def top_logprobs(self, batch: TensorDictBase, k: int) -> tuple[Packed, Packed]:
        """Return the ``k`` largest logprobs of the distribution of each response token, on the CPU,
        and their tokens, int32: k values of each token, one token after the other. Each group is
        computed alone."""
        rows = self._rows(batch)
        offsets = offsets_of(rows.column.lengths().numpy() * k)
        logprobs, tokens = self._top(rows, k)
        return Packed(logprobs.flatten(), offsets), Packed(tokens.flatten(), offsets)

    def _teacher_columns(
        self, batch: TensorDictBase, algorithm: AlgorithmLike
    ) -> dict[str, torch.Tensor]:
        """Return the columns of the most probable tokens, [T, k], where the model in training
        computes them for ``algorithm``."""
        by = algorithm.scores.get(TEACHER_IDS)
        if by not in IN_TRAINING:
            return {}
        [k] = token_shape(algorithm.loss_reads[TEACHER_IDS])
        with self._without_adapters() if by == BASE else nullcontext():
            logprobs, tokens = self._top(self._rows(seen_by_teacher(batch)), k)
        return {TEACHER_LOGPROBS: logprobs, TEACHER_IDS: tokens}

    @torch.no_grad()
    def _top(self, rows: Rows, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ``k`` largest logprobs float32 [T, k] and their tokens int32 [T, k] at the
        response tokens of ``rows``, on the CPU."""
        pieces, micro_batches, passes = self._one_by_one(rows)
        logprobs = torch.empty(len(rows.column.values), k)
        tokens = torch.empty(len(logprobs), k, dtype=torch.int32)
        tops = self._parallel.runner.top(micro_batches, passes, k)
        for piece, of_piece in zip(pieces, tops, strict=True):
            index = rows.column.indexes(rows.numbers(piece))
            logprobs[index], tokens[index] = (each.cpu() for each in of_piece)
        return logprobs, tokens

    def _one_by_one(self, rows: Rows) -> tuple[list[Piece], list[Packing], int]:
        """Return pieces of one group each, their micro-batches, and the passes of each rank."""
        pieces = [
            Piece(number, piece.rows)
            for number, group in enumerate(rows.groups)
            for (piece,) in self._plan([group])
        ]
        [(_, passes)] = self._parallel.all_gather_counts([len(pieces)])
        return pieces, [partial(rows.pack, [piece]) for piece in pieces], passes

    @torch.no_grad()
    def _scores(self, rows: Rows, *, with_entropy: bool = False) -> Outputs:
        """Return the logprobs [T], the entropies [T] and the values [T] of the response tokens of
        ``rows``, on the CPU; entropies are empty without ``with_entropy``, values without a value
        head. Each group is computed alone."""
        pieces, micro_batches, passes = self._one_by_one(rows)
        outputs = self._parallel.runner.score(micro_batches, passes, with_entropy=with_entropy)
        tokens = len(rows.column.values)
        logprobs = torch.empty(tokens)
        entropies = torch.empty(tokens if with_entropy else 0)
        values = torch.empty(tokens if self._packed_model.value_head else 0)
        columns = (logprobs, entropies, values)
        for piece, scores in zip(pieces, outputs, strict=False):
            index = rows.column.indexes(rows.numbers(piece))
            for column, score in zip(columns, scores, strict=True):
                if len(column):
                    column[index] = score.cpu()
        return columns

    def _rows(self, batch: TensorDictBase) -> Rows:
        model = self._packed_model
        experts = [] if model.routing is None else model.routing.rows(batch)
        masks_of = None if PROBE in batch else model.masks_of
        layout = self._parallel.coordinates.layout
        is_ring = layout.cp > 1 and layout.context_parallel == "ring"
        counted = model.counts_tokens
        return Rows.of(batch, model.device, experts, masks_of, expanded=is_ring, counted=counted)

    def _plan(self, groups: Sequence[Group], *, whole: bool = False) -> list[list[Piece]]:
        shapes = [group.shape for group in groups]
        return plan_micro_batches(shapes, self._token_budget, whole=whole)

    def _scores_by(self, rows: Rows, scorers: set[str]) -> dict[str, torch.Tensor]:
        """Return the score [T] of each response token by each of ``scorers``, of
        ``IN_TRAINING``."""
        scores: dict[str, torch.Tensor] = {}
        if scorers - {BASE}:
            logprobs, entropies, values = self._scores(rows, with_entropy=ENTROPY in scorers)
            scores = {"policy": logprobs, ENTROPY: entropies, "value head": values}
        if BASE in scorers:
            with self._without_adapters():
                scores[BASE] = self._scores(rows)[0]
        return scores

    def _without_adapters(self) -> AbstractContextManager[None]:
        if self._packed_model.adapters is None:
            raise ValueError("scores: 'base' is the model without its adapters, and it has none")
        from stages.adapters.training import adapters_off

        return adapters_off(self._packed_model.model)


def _add(sums: dict[str, torch.Tensor], measured: Mapping[str, torch.Tensor]) -> None:
    """Add a micro-batch's metrics to ``sums``; of those called ``max_…`` keep the largest."""
    for name, value in measured.items():
        together = torch.maximum if name.startswith("max_") else torch.add
        sums[name] = together(sums[name], value) if name in sums else value
