"""What a part of the check reports."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Figure:
    """One line of the report: ``value`` in ``unit``, beside its ``floor`` or its ``limit`` where it
    has one. ``timed`` figures mean nothing on a CPU."""

    name: str
    value: float
    unit: str
    floor: float | None = None
    limit: float | None = None
    timed: bool = True

    @property
    def failed(self) -> bool:
        return self.limit is not None and not self.value <= self.limit


def line(figure: Figure, device: torch.device) -> str:
    text = f"{figure.name:<38}{figure.value:>12.4g} {figure.unit}"
    if figure.floor is not None:
        text += f", {figure.value / figure.floor:.0%} of {figure.floor:.4g}"
    if figure.limit is not None:
        text += f", limit {figure.limit:g}: {'FAILED' if figure.failed else 'ok'}"
    return text + (" (no meaning on a CPU)" if figure.timed and device.type == "cpu" else "")
