"""How do results look? One function for each figure, from measured values alone: nothing here runs a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

#: colour-blind safe (Okabe and Ito), dark enough on white and light enough on black
COLOURS = {"intact": "#0072B2", "masked": "#D55E00", "strongest": "#CC79A7", "random": "#7F7F7F", "chance": "#7F7F7F"}
WIDTH = 7.6  # inches: the text column of the book


def style() -> None:
    """The book's style: vector output, transparent ground, ink that reads on light and dark pages."""
    import matplotlib_inline.backend_inline as inline

    inline.set_matplotlib_formats("svg")
    ink = "#666666"
    sns.set_theme(context="notebook", style="ticks")
    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none",  # text stays text: searchable, and small
            "svg.hashsalt": "ga",  # the same figure has the same bytes
            "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
            "text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": ink, "xtick.color": ink, "ytick.color": ink,
            "axes.titlesize": 11, "axes.labelsize": 10, "xtick.labelsize": 9, "ytick.labelsize": 9,
            "axes.spines.top": False, "axes.spines.right": False, "font.family": "sans-serif",
        }
    )  # fmt: skip


def kv_curves(table: pd.DataFrame, labels: Mapping[str, str]) -> Figure:
    """Figure 4: accuracy of key-value retrieval against the number of pairs, one panel for each model.

    table: columns model, pairs, series ("intact", "masked", "strongest" or "random"), accuracy, stderr, chance; the
    random draws are one row each. labels: what each series is called at its line's end, by model and series joined with
    "/", or by series.
    """
    models = list(dict.fromkeys(table.model))
    fig = Figure(figsize=(WIDTH, 3.7 * len(models)), layout="constrained")
    axes = fig.subplots(len(models), 1, squeeze=False, sharex=True)[:, 0]
    for ax, model in zip(axes, models, strict=True):
        here = table[table.model == model]
        ends = []
        for series in ("intact", "random", "strongest", "masked"):
            rows = here[here.series == series]
            if len(rows):
                mean = _curve(ax, rows, series)
                ends.append((float(mean.iloc[-1]), labels.get(f"{model}/{series}", labels.get(series, series)), series))
        chance = here.groupby("pairs").chance.first()
        ax.plot(chance.index, chance, ":", color=COLOURS["chance"], lw=1.2)
        ends.append((float(chance.iloc[-1]), "guessing", "chance"))
        end_labels(ax, float(chance.index.max()), ends)
        ax.set(ylim=(-0.02, 1.02), ylabel="accuracy (candidates only)", title=model if len(models) > 1 else "")
        ax.set_xticks(sorted(set(here.pairs)))
    axes[-1].set_xlabel("key-value pairs in the prompt")
    return fig


def _curve(ax: Axes, rows: pd.DataFrame, series: str) -> pd.Series:
    """Draw one series with its standard errors (over draws and examples for the random heads); return its means."""
    colour = COLOURS[series]
    mean = rows.groupby("pairs").accuracy.mean()
    if series == "random":
        for _, draw in rows.groupby("draw"):
            ax.plot(draw.pairs, draw.accuracy, "-", color=colour, lw=0.7, alpha=0.45)
        ax.plot(mean.index, mean, "o-", color=colour, lw=1.6, ms=4)
    else:
        error = rows.groupby("pairs").stderr.first()
        ax.errorbar(mean.index, mean, error, fmt="o-", color=colour, lw=1.8, ms=4.5, capsize=2.5)
    return mean


def end_labels(ax: Axes, x: float, ends: Sequence[tuple[float, str, str]]) -> None:
    """Name each line at its right end, pushed apart so that no two labels overlap."""
    gap = 0.075
    ends = sorted(ends)
    heights = np.array([e[0] for e in ends])
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    excess = max(0.0, float(heights[-1]) - 1.0)
    heights -= excess
    for i in range(len(heights) - 2, -1, -1):
        heights[i] = min(heights[i], heights[i + 1] - gap)
    for height, (_, label, series) in zip(heights, ends, strict=True):
        ax.annotate(
            label, (x, height), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9,
            color=COLOURS[series], annotation_clip=False,
        )  # fmt: skip
