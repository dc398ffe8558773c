"""What an engine's process is made of: who trains and who samples."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stages.calls.interface import CalledModel, ModelOptions, Sampler, ServedBase


@dataclass(frozen=True)
class Parts:
    """``new_model`` makes models on a base model, and ``sampler`` samples with their weights."""

    new_model: Callable[[ModelOptions], CalledModel]
    sampler: Sampler


Opening = Callable[[ServedBase, Mapping[str, Any]], Awaitable[Parts]]
"""Opens the parts of a base model, with options."""
