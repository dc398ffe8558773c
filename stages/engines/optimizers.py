"""Optimizers of the torch train engine by the names that ``train.optimizer`` may have.

    train.optimizer = "muon" ─▶ OPTIMIZERS["muon"] ─▶ checks: its extra, its ranks; bytes of its state
                                              └─▶ its class, which the engine imports

A further one is a row here and one file, with a class as
:class:`stages.engines.torch.optimizers.interface.EngineOptimizer` describes it. Recipes are checked
without torch, so this module does not import it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PLACE = "stages.engines.torch.optimizers"
BLOCK = 256  # numbers of 8-bit state that share a scale of float32


@dataclass(frozen=True)
class OptimizerKind:
    """How an optimizer is made, and what it needs."""

    place: str
    """``module:class`` of its EngineOptimizer."""

    state_bytes: Callable[[int, int, int], int]
    """Bytes of the state of so many numbers in hidden matrices and so many others, given the bytes
    of one trained number."""

    extra: str = ""
    """The extra of the package that it needs; "": none."""

    package: str = ""
    """That package's module."""

    one_rank: str = ""
    """Why it is for one rank alone; "": ranks may share its work."""


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": OptimizerKind(
        f"{PLACE}.adamw:AdamW",
        lambda matrices, others, item: 2 * (matrices + others) * item,
    ),
    "adamw8bit": OptimizerKind(
        f"{PLACE}.adamw8bit:AdamW8bit",
        lambda matrices, others, item: 2 * (matrices * (BLOCK + 4) // BLOCK + others * item),
        extra="optimizers",
        package="torchao",
        one_rank=f"{BLOCK} neighbouring numbers share a scale, which shards would cut",
    ),
    "muon": OptimizerKind(
        f"{PLACE}.muon:Muon",
        lambda matrices, others, item: (matrices + 2 * others) * item,
    ),
}
