"""How do scores hang on what heads may read? One line a condition, one mark a task, from tables alone."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from .figures import COLOURS, WIDTH
from .figures_layers import NAMES, TASKS


def conditions(table: pd.DataFrame) -> Figure:
    """Accuracy under each condition, one panel a model; dotted: guessing, in the task's colour.

    table: columns model, condition, task, accuracy, stderr, chance, conditions in the order of the lines.
    """
    models = list(dict.fromkeys(table.model))
    lines = {m: list(dict.fromkeys(table[table.model == m].condition)) for m in models}
    heights = [0.27 * len(lines[m]) + 1.0 for m in models]
    fig = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    axes = fig.subplots(len(models), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, model in zip(axes, models, strict=True):
        here, at = table[table.model == model], {c: i for i, c in enumerate(lines[model])}
        for task, rows in here.groupby("task", sort=False):
            colour, marker, side = TASKS[task]
            y = rows.condition.map(at) + 0.2 * side
            ax.errorbar(
                rows.accuracy,
                y,
                xerr=rows.stderr,
                fmt=marker,
                color=COLOURS[colour],
                ms=5,
                capsize=2,
                label=NAMES[task],
            )
            ax.axvline(rows.chance.iloc[0], color=COLOURS[colour], lw=1.0, ls=":", zorder=0)
        ax.set_yticks(range(len(at)), list(at))
        for i in range(len(at) - 1):
            ax.axhline(i + 0.5, color=COLOURS["chance"], lw=0.4, alpha=0.5, zorder=0)
        ax.set(xlim=(-0.03, 1.04), ylim=(len(at) - 0.5, -0.5))
        ax.set_title(model, loc="left")
        ax.tick_params(axis="y", length=0)
        ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False, fontsize=9, handletextpad=0.2)
    axes[-1].set_xlabel("accuracy (dotted: guessing)")
    return fig
