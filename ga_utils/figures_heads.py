"""How do the heads of a whole model look? The map of effects over layers and heads, and the curves of removed heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .figures import COLOURS, WIDTH, end_labels

#: columns of a map at most: channels beyond are put together by their largest effect
MOST_COLUMNS = 64
#: a bar of the colour scale ends at this quantile of |effect|, or one head would leave all others white
QUANTILE = 0.995


def effect_map(table: pd.DataFrame, column: str, label: str, marked: Sequence[str] = ()) -> Figure:
    """Layer x head map of one column of a head table (`layer`, `index`, `head`, `column`); white is 0.

    One mixer kind a panel where the model has several. Heads named in `marked` are ringed.
    """
    kinds = list(dict.fromkeys(table.kind)) if "kind" in table else [""]
    rows = [table[table.kind == k].layer.nunique() if k else table.layer.nunique() for k in kinds]
    heights = [0.16 * n + 0.75 for n in rows]
    fig = Figure(figsize=(WIDTH, sum(heights) + 0.3), layout="constrained")
    axes = fig.subplots(len(kinds), 1, squeeze=False, height_ratios=heights)[:, 0]
    top = float(np.quantile(table[column].abs(), QUANTILE)) or 1e-9
    for ax, kind in zip(axes, kinds, strict=True):
        _map(ax, table[table.kind == kind] if kind else table, column, label, top, marked)
        if len(kinds) > 1:
            ax.set_title(kind)
    return fig


def _map(ax: Axes, table: pd.DataFrame, column: str, label: str, top: float, marked: Sequence[str]) -> None:
    step = -(-(int(table["index"].max()) + 1) // MOST_COLUMNS)
    table = table.assign(cell=table["index"] // step)
    strongest = table.loc[table.groupby(["layer", "cell"])[column].apply(lambda c: c.abs().idxmax())]
    grid = strongest.pivot(index="layer", columns="cell", values=column)
    sns.heatmap(
        grid, ax=ax, cmap="RdBu_r", center=0, vmin=-top, vmax=top, linewidths=0 if grid.shape[1] > 40 else 0.4,
        cbar_kws={"label": label, "extend": "both", "shrink": 0.9}, xticklabels=max(1, grid.shape[1] // 12),
        yticklabels=max(1, len(grid) // 12),
    )  # fmt: skip
    for row in table[table["head"].isin(marked)].itertuples():
        at = (list(grid.columns).index(row.cell) + 0.5, list(grid.index).index(row.layer) + 0.5)
        ax.plot(*at, "o", mfc="none", mec="#000000", mew=1.4, ms=8)
    ax.set(xlabel="head" if step == 1 else f"channel / {step}", ylabel="layer")
    ax.tick_params(rotation=0)


def concentration(table: pd.DataFrame, labels: dict[str, str]) -> Figure:
    """Accuracy against the share of heads removed, or kept alone in their layers; one panel a model.

    table: `Curve.table()` of one or more models. labels: what a series is called.
    """
    models = list(dict.fromkeys(table.model))
    fig = Figure(figsize=(WIDTH, 3.4 * len(models)), layout="constrained")
    axes = fig.subplots(len(models), 1, squeeze=False)[:, 0]
    colours = {"removed": "masked", "random": "random", "kept": "strongest", "random kept": "chance"}
    for ax, model in zip(axes, models, strict=True):
        here = table[table.model == model]
        intact = here[here.series == "intact"].iloc[0]
        ends = []
        for series, colour in colours.items():
            rows = here[here.series == series].groupby("heads").agg({"accuracy": "mean", "stderr": "mean"})
            if rows.empty:
                continue
            style = "o--" if "kept" in series else "o-"
            ax.errorbar(
                rows.index, rows.accuracy, rows.stderr, fmt=style, color=COLOURS[colour], lw=1.6, ms=4, capsize=2
            )
            ends.append((float(rows.accuracy.iloc[-1]), labels.get(series, series), colour, int(rows.index[-1])))
        ax.axhline(intact.accuracy, color=COLOURS["intact"], lw=1.2)
        ax.axhline(intact.chance, color=COLOURS["chance"], lw=1.2, ls=":")
        right = max(e[3] for e in ends)
        named = [(a, label, colour) for a, label, colour, _ in ends]
        named += [(float(intact.accuracy), "intact", "intact"), (float(intact.chance), "guessing", "chance")]
        ax.set_xscale("log", base=2)
        ticks = sorted(set(here[here.heads > 0].heads))
        ax.set_xticks(ticks, [str(t) for t in ticks])
        ax.minorticks_off()
        end_labels(ax, right, named)
        ax.set(ylim=(-0.02, 1.04), ylabel="accuracy", title=model)
    axes[-1].set_xlabel("number of heads")
    return fig
