"""Rows of a run on their way to an external stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from orchestration.external.accounting import OVER
from pipeline.data.columns import Packed


@dataclass(frozen=True)
class ExperienceRow:
    """One row.

    ``id`` names it in commits, and never names another row. ``place`` is its index among the
    ``samples`` rows of its group. ``oldest_version`` among its tokens is -1 before it is generated.
    ``seed`` is its group's, for engines that draw tokens by seed, place and position.
    """

    id: int
    group: int
    place: int
    samples: int
    oldest_version: int
    tokens: int
    seed: int


@dataclass(frozen=True)
class Experience:
    """The answer to a claim: rows under a lease of ``lease`` seconds, or none, when ``token`` is
    None.

    ``columns`` by name; on the run's own node they are views of shared memory, valid while the
    lease is held. ``begun``: the ids of rows that were parked, and the columns that these have so
    far. ``sampling``: how a rollout draws tokens.
    """

    stage: str
    token: str | None
    lease: float
    state: str  # of the run
    reason: str
    published: int
    trained: int
    rows: Sequence[ExperienceRow] = ()
    columns: Mapping[str, Packed] = field(default_factory=dict)
    begun: tuple[Sequence[int], Mapping[str, Packed]] = ((), MappingProxyType({}))
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.token is not None

    @property
    def ids(self) -> list[int]:
        return [row.id for row in self.rows]

    @property
    def over(self) -> bool:
        """Return whether no claim of this run will get rows any more."""
        return self.state in OVER
