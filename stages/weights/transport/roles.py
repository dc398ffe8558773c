"""The two roles of a transport of weights: a trainer publishes, a rollout engine reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from stages.weights.transport.depot import Depot
    from stages.weights.transport.network import WeightSender
    from stages.weights.transport.store import WeightStore

Publisher: TypeAlias = "WeightStore | WeightSender"
Reader: TypeAlias = "WeightStore | Depot"
