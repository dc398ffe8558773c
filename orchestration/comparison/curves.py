"""Curves of a metric over steps, tokens or hours, of one run or of several that differ by their
seed.

    RunResult ──curve──▶ x, y ──reduced──▶ at most so many points
    curves of one setting ──band──▶ mean and interval at each x
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from orchestration.comparison.results import Floats, RunResult

By = Literal["step", "tokens", "hours"]
# Quantiles 0.975 of Student's t distribution with 1, 2, … degrees of freedom.
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
_Z = 1.959964  # of the normal distribution


def t_quantile(degrees: int) -> float:
    """Return the quantile 0.975 of Student's t distribution: from 11 ``degrees`` of freedom on by
    its expansion around the normal one (Cornish and Fisher, 1938), to four digits.

    >>> t_quantile(2), round(t_quantile(20), 3), round(t_quantile(1000), 3)
    (4.3027, 2.086, 1.962)
    """
    if degrees <= len(_T):
        return _T[degrees - 1]
    first = (_Z**3 + _Z) / 4
    second = (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    third = (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384
    return _Z + first / degrees + second / degrees**2 + third / degrees**3


@dataclass(frozen=True)
class Estimate:
    """The ``mean`` of ``count`` runs, with its 95 % interval: ``mean`` ± ``half``, None of one
    run."""

    mean: float
    half: float | None
    count: int


def estimate(values: Sequence[float | None]) -> Estimate | None:
    """Return the estimate by the finite ones of ``values``; None where there is none."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return None
    half = None
    if len(finite) > 1:
        half = t_quantile(len(finite) - 1) * float(np.std(finite, ddof=1)) / len(finite) ** 0.5
    return Estimate(float(np.mean(finite)), half, len(finite))


@dataclass(frozen=True)
class Curve:
    """``y`` [points] over ``x`` [points]; of a band ``half`` [points] is half of the 95 % interval
    of the mean, NaN where one run alone has a value."""

    x: Floats
    y: Floats
    half: Floats | None = None

    def reduced(self, points: int) -> Curve:
        """Return at most ``points`` points, each the mean of as many neighbours."""
        if len(self.x) <= points:
            return self
        starts = np.linspace(0, len(self.x), points, endpoint=False).astype(np.intp)
        sizes = np.diff(starts, append=len(self.x))
        return Curve(*(np.add.reduceat(values, starts) / sizes for values in (self.x, self.y)))


def curve(result: RunResult, metric: str, by: By) -> Curve:
    """Return the curve of ``metric``: all points that have a value."""
    versions, values = result.metric(metric)
    if by == "step" or not len(versions):
        return Curve(versions, values)
    axis = result.tokens if by == "tokens" else result.hours
    if not len(axis):
        return Curve(np.zeros(0), np.zeros(0))
    steps = np.concatenate(([0.0], result.versions))  # version 0 has had no step
    return Curve(np.interp(versions, steps, np.concatenate(([0.0], axis))), values)


def band(curves: Sequence[Curve], by: By, points: int) -> Curve:
    """Return the mean of ``curves`` at common places, where each lies between its own points."""
    present = [curve for curve in curves if len(curve.x)]
    if not present:
        return Curve(np.zeros(0), np.zeros(0))
    if len(present) == 1:
        return present[0].reduced(points)
    places = np.unique(np.concatenate([curve.x for curve in present]))
    if by != "step" or len(places) > points:
        places = np.linspace(places[0], places[-1], min(points, len(places)))
    table = np.array(
        [np.interp(places, curve.x, curve.y, np.nan, np.nan) for curve in present]
    )  # [curves, places]
    counts = np.isfinite(table).sum(axis=0)
    mean = np.nansum(table, axis=0) / np.maximum(counts, 1)
    squares = np.nansum((table - mean) ** 2, axis=0)
    quantiles = np.array([np.nan, np.nan, *map(t_quantile, range(1, len(present)))])
    half = quantiles[counts] * np.sqrt(squares / np.maximum(counts - 1, 1) / np.maximum(counts, 1))
    shown = counts > 0
    return Curve(places[shown], mean[shown], half[shown])
