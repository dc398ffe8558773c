"""The interface of an algorithm: the columns that it reads and makes, its credit, its loss.

Importing this needs no torch.

scores: columns that a model computes ─┐
reward … ─▶ credit(one group) ─▶ columns ─┴▶ prepare(one train batch) ─▶ loss(tokens of a micro-batch) ─▶ finish(metrics)
               └▶ Drop: the group leaves the run            └── epochs × mini_batches optimizer steps of each batch ──┘
                                                                          └▶ control: numbers for the loss of the next batch
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from stages.algorithms.token_batch import TokenBatch
from stages.flow.declarations import Columns, Drop, RunsOn

if TYPE_CHECKING:  # a recipe's algorithm and its options are checked without torch
    import torch

    from stages.algorithms.batch import TrainBatch
    from stages.flow.user_stage import StageRows

# In the `json_schema_extra` of an option: the recipe's key whose value it has where it is not set.
FOLLOWS = "x-follows"
Derived = TypeVar("Derived", bound="Algorithm")


@dataclass(frozen=True)
class LossOutput:
    """The loss of a micro-batch, and its metrics.

    ``loss`` is this micro-batch's share of the mini-batch's loss: the shares add up. ``metrics``
    are detached scalars; those of all micro-batches are added (``mean`` of the batch: divide by a
    ``total_*`` inside), except names that begin with ``max_``, of which the largest is kept.
    """

    loss: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


def with_defaults(**values: Any) -> Callable[[type[Derived]], type[Derived]]:
    """Decorate the class of an algorithm that differs from its base by the defaults of some
    options."""

    def changed(algorithm: type[Derived]) -> type[Derived]:
        for name, value in values.items():
            field = copy(algorithm.model_fields[name])
            field.default = value
            algorithm.model_fields[name] = field
        algorithm.model_rebuild(force=True)
        return algorithm

    return changed


class Algorithm(BaseModel, ABC):
    """The base of every algorithm.

    Its fields are the options of a recipe. The declarations below are attributes, or properties
    where they depend on options; types are those of :mod:`stages.flow.declarations`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: ClassVar[str] = ""  # in recipes, of an algorithm of the product
    use_for: ClassVar[str] = ""  # when to take it, for docs/algorithms.md
    citation: ClassVar[str] = ""  # of its paper, in BibTeX, for model cards

    epochs: int = Field(
        default=1,
        ge=1,
        description="Times that each train batch is trained on before the next version.",
    )
    mini_batches: int = Field(
        default=1,
        ge=1,
        description="Optimizer steps of one epoch, each on its part of the train batch. The policy "
        "version counts train batches, not these steps.",
    )

    # what no micro-batch and no rank may cut in two
    unit: ClassVar[Literal["row", "group"]] = "row"
    least_group_size: ClassVar[int] = 1

    def under(self, staleness: int) -> tuple[Self, str]:
        """Return the algorithm as it runs under the staleness bound, and which options followed
        from it, with the reason."""
        return self, ""

    def constants(self, staleness: int) -> Mapping[str, str]:
        """Return the metrics that are constant by construction under the staleness bound, and why:
        nothing can be read from them."""
        return {}

    @property
    def scores(self) -> Mapping[str, RunsOn]:
        """Columns that a model computes, and which one: a frozen model or a critic, each a stage of
        the flow; or, before the first optimizer step of a train batch, the policy (logprobs, or
        entropies) or its value head (values)."""
        return {}

    @property
    def credit_reads(self) -> Columns:
        """The columns that :meth:`credit` is called with."""
        return {"reward": "float32"}

    @property
    def credit_optional(self) -> Columns:
        """The columns that :meth:`credit` is also called with where a stage makes them."""
        return {}

    @property
    def credit_makes(self) -> Columns:
        """The columns that :meth:`credit` returns; empty for an algorithm without credit."""
        return {"advantage": "float32 finite"}

    @property
    def prepare_makes(self) -> Columns:
        """Ragged columns that :meth:`prepare` makes and the loss reads, beside those that it puts
        in the place of others."""
        return {}

    @property
    def loss_reads(self) -> Columns:
        """The columns of ``tokens`` in :meth:`loss`.

        A ragged one has a value for each response token.
        """
        return {"rollout_logprobs": "float32 ragged", "advantage": "float32"}

    @property
    def teacher_reads(self) -> Columns:
        """The columns that :meth:`teacher_prompts` is called with; empty: a teacher reads the
        student's prompt."""
        return {}

    def teacher_prompts(self, group: StageRows) -> Sequence[Any] | Drop:
        """Return the prompts that a teacher reads with each response of one group, texts or
        conversations as ``group.prompts`` has them. Or a :class:`Drop`."""
        raise NotImplementedError

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any] | Drop:
        """Return the columns of one group's N rows from those that :attr:`credit_reads` names: [N,
        …] for a column with one value in each row, a list of N tensors for a ragged one. Or a
        :class:`Drop`.
        """
        raise NotImplementedError

    def prepare(self, batch: TrainBatch) -> Mapping[str, torch.Tensor]:
        """Return the columns to put in the place of those of the whole train batch, and those of
        :attr:`prepare_makes`, before its first optimizer step."""
        return {}

    def signal(self, batch: TrainBatch) -> float:
        """Return the share of the trained rows of the whole train batch that :meth:`loss` can learn
        from, in [0, 1]. The learning rate of the batch's steps is multiplied by it."""
        return 1.0

    @property
    def drawn_by(self) -> str:
        """The column, with one value in each row, by which :meth:`draw` chooses what is trained on.

        "": each row is, in one of the mini-batches."""
        return ""

    def draw(
        self, rows: Mapping[int, Mapping[int, float]], version: int
    ) -> Sequence[Mapping[int, tuple[int, ...]]]:
        """Return what each optimizer step of the train batch ``version`` trains on: places of rows
        by group, repeated where a row counts several times; at most :attr:`mini_batches` of them.

        ``rows``: by group and place, the column :attr:`drawn_by` of the rows of all ranks that have
        tokens to train on. All ranks make this call, and must get the same."""
        raise NotImplementedError

    @abstractmethod
    def loss(self, tokens: TokenBatch) -> LossOutput:
        """Return the micro-batch's share of the loss."""

    @property
    def candidates(self) -> str:
        """The column of token ids, ``int32 ragged [k]``, whose logprobs under the weights being
        trained the loss reads as ``tokens.candidates``; "": none."""
        return ""

    @property
    def control_begins(self) -> Mapping[str, float]:
        """The numbers that :meth:`loss` finds in ``tokens.control`` of the first train batch.

        They are in checkpoints, and reported as metrics of the batch that they were used for."""
        return {}

    def control(
        self, numbers: Mapping[str, float], metrics: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Return the numbers for the next train batch, after one that was trained with ``numbers``
        and gave ``metrics``."""
        return numbers

    @property
    def policy_begins(self) -> int:
        """The first train batch that the policy learns from; in those before it a critic learns
        alone."""
        return 0

    def value_rate(self, learning_rate: float) -> float:
        """Return the peak learning rate of a value head on the trunk of a policy whose own is
        ``learning_rate``."""
        return learning_rate

    def critic_algorithm(self) -> Algorithm | None:
        """Return the algorithm that trains a critic with an engine of its own, on the same rows:
        the loss reads the column ``values``, which that critic has made, and ``tokens.values``.
        None: there is no such critic."""
        return None

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the reported metrics of an optimizer step from its summed ones: the place for
        quotients of sums."""
        return metrics
