"""What an engine's process is made of: who trains and who samples."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.calls.interface import CalledModel, ModelOptions, Sampler, ServedBase

if TYPE_CHECKING:
    from orchestration.calls.engines.ranks import Ranks

MAX_ROWS = 64  # that are sampled at once, unless an engine's options say it


@dataclass(frozen=True)
class Parts:
    """``new_model`` makes models on a base model, and ``sampler`` samples with their weights.
    ``ranks``: the others, of which this process is the first; they have no sampler."""

    new_model: Callable[[ModelOptions], CalledModel]
    sampler: Sampler | None
    ranks: Ranks | None = None


Opening = Callable[[ServedBase, Mapping[str, Any]], Awaitable[Parts]]
"""Opens the parts of a base model, with options."""
