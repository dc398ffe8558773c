"""Keys of a recipe that say how many ranks an engine has, and along what they divide its work.

Sections with such keys have ``layout``, the one object that everything else reads
(stages/parallel/layout.py). What checks and estimates ask of a section before its layout is known
to be valid stands here as well.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Annotated

from pydantic import BaseModel, Field

from stages.json_schema import key, unit
from stages.parallel.layout import ContextParallel, Layout

Count = Annotated[int, Field(ge=1), unit("ranks")]
STRATEGIES = ("dp", "tp", "dp_replicate", "pp", "vpp", "cp", "ep", "context_parallel")


class RankSizes(BaseModel):
    """What a section knows of its ranks, by those of the keys ``STRATEGIES`` that it has."""

    @property
    def layout(self) -> Layout:
        """The layout of these sizes.

        Raises :class:`~stages.parallel.layout.LayoutError` for sizes that do not fit each other.
        """
        return Layout.for_training(**self.model_dump(include=set(STRATEGIES)))

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        return prod(getattr(self, name, 1) for name in ("dp", "tp", "pp", "cp"))

    @property
    def replicas(self) -> int:
        """Shares of a step's rows."""
        return getattr(self, "dp", 1)

    @property
    def cuts_matrices(self) -> bool:
        return getattr(self, "tp", 1) > 1

    @property
    def has_stages(self) -> bool:
        return getattr(self, "pp", 1) > 1

    def tokens_of_rank(self, tokens: int) -> int:
        """Return the most that a context-parallel rank has of so many ``tokens``."""
        return -(-tokens // getattr(self, "cp", 1))


class Strategies(RankSizes):
    """Keys of a section whose engine may have several ranks."""

    dp: Count = key(
        1, "Data-parallel ranks, which divide a step's rows and each layer's weights (FSDP2)."
    )
    dp_replicate: Count = key(
        1,
        "Of them, so many hold the same weights (HSDP): weights are sharded over the other `dp / "
        "dp_replicate` alone.",
    )
    tp: Count = key(1, "Tensor-parallel ranks, over which each replica's matrices are sharded.")
    cp: Count = key(
        1,
        "Context-parallel ranks, which divide the tokens of each micro-batch: it has `cp` times "
        "`token_budget` of them. Weights are sharded over them as over data-parallel ones.",
    )
    context_parallel: ContextParallel = key(
        "ulysses",
        "How context-parallel ranks compute attention. `ulysses`: each has some heads, over all "
        "tokens, which come and go by all-to-all. `ring`, for any number of heads: each has its "
        "tokens; keys and values of prompts are gathered, those of responses go from rank to rank.",
    )
    pp: Count = key(
        1,
        "Pipeline stages, each of which has some of the layers; micro-batches go through them one "
        "after the other (1F1B). Layers are dealt out by the weights that a token meets in them, "
        "those of the output head included.",
    )
    vpp: Annotated[int, Field(ge=1), unit("parts")] = key(
        1,
        "Parts of the layers that each pipeline stage has (interleaved 1F1B): stages wait less and "
        "send more.",
    )
    ep: Count = key(
        1,
        "Expert-parallel ranks, to which the experts of each layer are dealt out whole; tokens go "
        "to them by all-to-all. They are those of `dp / dp_replicate · cp · tp`, of which it is a "
        "divisor.",
    )

    @property
    def shards(self) -> int:
        """The number of replicas that divide the weights; the others hold copies."""
        return self.ranks // self.dp_replicate


def critic_layout(critic: RankSizes, train: Strategies) -> Layout:
    """Return the layout of a critic's ranks, which compute attention as those of the policy's
    trainer do."""
    return replace(critic.layout, context_parallel=train.context_parallel)


def fits_ulysses(heads: int, tp: int, cp: int) -> bool:
    """Return whether ``cp`` ranks can share evenly the ``heads`` of queries that each of ``tp``
    ranks has."""
    return heads % (tp * cp) == 0
