"""Parallel strategies of a train engine: how many ranks divide its work, and along what.

    rank = ((stage · dp + replica) · cp + part of the sequences) · tp + part of the matrices

Pipeline stages are outermost and tensor-parallel ranks neighbours. The data-parallel ranks are ``dp_replicate`` copies of
``dp / dp_replicate`` shards. Experts are dealt over the ranks of a stage in an order of their own: see
:mod:`stages.parallel.placement`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from stages.json_schema import key, unit
from stages.parallel.schedules import Kind

ContextParallel = Literal["ulysses", "ring"]
Count = Annotated[int, Field(ge=1), unit("ranks")]


class Strategies(BaseModel):
    """Keys of a section whose engine may have several ranks."""

    dp: Count = key(1, "Data-parallel ranks, which divide a step's rows and each layer's weights (FSDP2).")
    dp_replicate: Count = key(
        1,
        "Of them, so many hold the same weights (HSDP): weights are sharded over the other `dp / dp_replicate` alone.",
    )
    tp: Count = key(1, "Tensor-parallel ranks, over which each replica's matrices are sharded.")
    cp: Count = key(
        1,
        "Context-parallel ranks, which divide the tokens of each micro-batch: it has `cp` times `token_budget` of them. "
        "Weights are sharded over them as over data-parallel ones.",
    )
    context_parallel: ContextParallel = key(
        "ulysses",
        "How context-parallel ranks compute attention. `ulysses`: each has some heads, over all tokens, which come and go "
        "by all-to-all. `ring`, for any number of heads: each has its tokens; keys and values of prompts are gathered, "
        "those of responses go from rank to rank.",
    )
    pp: Count = key(
        1,
        "Pipeline stages, each of which has some of the layers; micro-batches go through them one after the other (1F1B). "
        "Layers are dealt out by the weights that a token meets in them, those of the output head included.",
    )
    vpp: Annotated[int, Field(ge=1), unit("parts")] = key(
        1,
        "Parts of the layers that each pipeline stage has (interleaved 1F1B): stages wait less and send more.",
    )
    pipeline: Kind = key(
        "auto",
        "Order of passes through the pipeline. `auto`: 1F1B, interleaved with `vpp > 1`. `zbv`: gradients of matrices are "
        "computed while a stage would wait. Each stage has two parts, in a V: the first stage has the output head, too.",
    )
    ep: Count = key(
        1,
        "Expert-parallel ranks, to which the experts of each layer are dealt out whole; tokens go to them by all-to-all. "
        "They are those of `dp / dp_replicate · cp · tp`, of which it is a divisor.",
    )

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        return prod(getattr(self, name, 1) for name in ("dp", "tp", "pp", "cp"))

    @property
    def shards(self) -> int:
        """Of them, so many divide the weights; the others hold copies."""
        return self.ranks // self.dp_replicate


@dataclass(frozen=True)
class Ranks:
    """``rank`` of those of a train engine. Ranks of one replica take the same rows of the batch. ``cp`` ranks divide each
    row's tokens, ``pp`` stages the layers, each in ``vpp`` parts, and ``ep`` ranks the experts.

    >>> ranks = Ranks(5, dp=2, tp=2, pp=2)
    >>> ranks.world, ranks.stage, ranks.replica
    (8, 1, 0)
    """

    rank: int
    dp: int = 1
    tp: int = 1
    dp_replicate: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    pipeline: Kind = "auto"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank: {self.rank} of {self.world}; ranks are counted from 0")
        if self.dp % self.dp_replicate:
            raise ValueError(f"dp_replicate: {self.dp_replicate} does not divide dp = {self.dp}; use a divisor of it")
        if self.pipeline == "zbv" and (self.pp == 1 or self.vpp != 2):
            raise ValueError(
                f"pipeline: 'zbv' with pp = {self.pp}, vpp = {self.vpp}; use pp > 1 and vpp = 2, or 'auto'"
            )

    @classmethod
    def of(cls, rank: int, chosen: Any) -> Ranks:
        """Rank ``rank`` of the ranks that a section has chosen."""
        return cls(rank, **{name: getattr(chosen, name) for name in STRATEGIES if hasattr(chosen, name)})

    @property
    def world(self) -> int:
        return self.pp * self.of_stage

    @property
    def of_stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.cp * self.tp

    @property
    def stage(self) -> int:
        """The pipeline stage of this rank."""
        return self.rank // self.of_stage

    @property
    def replica(self) -> int:
        """The share of the batch that this rank takes, of ``dp``."""
        return self.rank // (self.cp * self.tp) % self.dp


def fits_ulysses(heads: int, tp: int, cp: int) -> bool:
    """Whether ``cp`` ranks can share evenly the ``heads`` of queries that each of ``tp`` ranks has."""
    return heads % (tp * cp) == 0


STRATEGIES = ("dp", "tp", "dp_replicate", "pp", "vpp", "cp", "ep", "pipeline")
