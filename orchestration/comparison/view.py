"""A comparison as plain values, for JSON: what commands print, and what pages draw.

Comparison ──as_tables──▶ keys, runs, settings        ──as_curves──▶ x, y, half, rounded to six digits
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from orchestration.comparison.compare import Comparison
from orchestration.comparison.curves import By, Curve, Estimate
from orchestration.comparison.results import Floats


def as_tables(comparison: Comparison) -> dict[str, Any]:
    """Return the keys that differ, the runs and the settings, with results by metric."""
    return {
        "keys": comparison.keys,
        "metrics": [*comparison.metrics],
        "runs": [
            {
                "id": run.id,
                "name": run.name,
                "state": run.state,
                "tags": [*run.labels.tags],
                "notes": run.labels.notes,
                "seed": run.recipe.get("seed"),
                "setting": at,
                "results": {metric: asdict(result) for metric, result in outcomes.items()},
                "steps": len(run.versions),
                "tokens": _last(run.tokens),
                "hours": _last(run.hours),
            }
            for run, outcomes, at in zip(
                comparison.runs, comparison.outcomes, comparison.places, strict=True
            )
        ],
        "settings": [
            {
                "recipe": setting.keys,
                "runs": [comparison.runs[at].id for at in setting.runs],
                "results": {
                    metric: {
                        "end": _estimate(setting.end[metric]),
                        "best": _estimate(setting.best[metric]),
                    }
                    for metric in comparison.metrics
                },
                **{
                    name: _estimate(getattr(setting, name)) for name in ("steps", "tokens", "hours")
                },
            }
            for setting in comparison.settings
        ],
    }


def as_curves(
    comparison: Comparison, metric: str, by: By, points: int, *, fold: bool
) -> list[dict[str, Any]]:
    """Return the curves of all runs, or with ``fold`` of all settings."""
    curves: Iterable[Curve] = (
        comparison.bands(metric, by, points) if fold else comparison.curves(metric, by, points)
    )
    return [
        {
            "x": _rounded(curve.x),
            "y": _rounded(curve.y),
            "half": None if curve.half is None else _rounded(curve.half),
        }
        for curve in curves
    ]


def _rounded(values: Floats) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _estimate(known: Estimate | None) -> dict[str, Any] | None:
    return None if known is None else asdict(known)


def _last(values: Floats) -> float | None:
    return float(values[-1]) if len(values) and math.isfinite(values[-1]) else None
