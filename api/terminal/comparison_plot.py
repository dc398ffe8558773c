"""The plot of a comparison: one curve for each setting, with the interval of its mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.compat.extras import extra

if TYPE_CHECKING:
    from orchestration.comparison.compare import Comparison, Setting
    from orchestration.comparison.curves import By

AXES = {"step": "optimizer step", "tokens": "tokens trained", "hours": "hours of steps"}
MOST_NAMED = 12  # curves that a legend names
# Okabe and Ito's colours, which the colour-blind can distinguish; then dashed ones.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F")
DASHES = ("-", "--", ":", "-.")


def write_comparison_plot(path: Path, comparison: Comparison, by: By) -> None:
    """Draw each metric of ``comparison`` over steps, tokens or hours. Raises ExtraMissing without
    matplotlib."""
    with extra("quickstart"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    metrics = comparison.metrics
    figure = Figure(figsize=(8, 1 + 3.4 * len(metrics)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0]
    for axes, metric in zip(panels, metrics, strict=True):
        bands = comparison.bands(metric, by)
        for at, (setting, band) in enumerate(zip(comparison.settings, bands, strict=True)):
            colour = COLOURS[at % len(COLOURS)]
            dash = DASHES[at // len(COLOURS) % len(DASHES)]
            marker = "o" if len(band.x) == 1 else ""
            name = setting_name(comparison, setting)
            axes.plot(band.x, band.y, dash, color=colour, marker=marker, linewidth=1.6, label=name)
            if band.half is not None:
                half = np.nan_to_num(band.half)
                edges = band.y - half, band.y + half
                axes.fill_between(band.x, *edges, color=colour, alpha=0.18, linewidth=0)
        axes.set_ylabel(metric)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel(AXES[by])
    if 1 < len(comparison.settings) <= MOST_NAMED:
        panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def setting_name(comparison: Comparison, setting: Setting) -> str:
    """Return the values of ``setting`` that differ from others, by the last parts of their keys."""
    if not comparison.keys:
        return comparison.runs[setting.runs[0]].name
    values = (f"{key.rpartition('.')[2]} {value}" for key, value in setting.keys.items())
    return ", ".join(values)[:80]
