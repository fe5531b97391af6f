"""How do scores hang on layers? Figure 2 (layers cut from the top) and Figure 3 (one layer taken out), from tables."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .figures import COLOURS, WIDTH, end_labels

#: task -> its colour's name in `COLOURS`, its marker, and its place beside the others of one layer
TASKS = {"letter": ("masked", "o", -1), "knowledge": ("intact", "s", 0), "kv": ("strongest", "^", 1)}
NAMES = {"letter": "letters", "knowledge": "knowledge", "kv": "key-value"}


def layers_kept(table: pd.DataFrame, minimal: Mapping[str, int]) -> Figure:
    """Figure 2: accuracy against the number of layers kept, one panel a model.

    table: columns model, layers kept, task, accuracy, stderr, chance. minimal: model -> layers of its minimal model,
    for those that have one.
    """
    fig, panels = _panels(table)
    for ax, model in panels:
        here = table[table.model == model]
        right = int(here["layers kept"].max())
        ends = []
        for task, rows in here.groupby("task", sort=False):
            colour, marker, side = TASKS[task]
            x = rows["layers kept"] + 0.004 * side * right
            ax.errorbar(
                x, rows.accuracy, rows.stderr, fmt=f"{marker}-", color=COLOURS[colour], lw=1.6, ms=4.5, capsize=2.5
            )
            ends.append((float(rows.accuracy.iloc[-1]), NAMES[task], colour))
        if model in minimal:
            ax.axvline(minimal[model], color=COLOURS["chance"], lw=1.2, ls="--", zorder=0)
            layers = f"minimal model: {minimal[model]} layer{'s' * (minimal[model] > 1)}"
            _above(ax, minimal[model], layers, "right" if minimal[model] > 0.6 * right else "left")
        _finish(ax, model, here, right, ends)
        ax.set_xlim(1 - 0.05 * right, 1.01 * right)
        ax.set_xticks(_ticks(1, right))
        ax.set_xlabel("layers kept, counted from the input")
    return fig


def layer_out(table: pd.DataFrame, base: pd.DataFrame, marked: Mapping[str, Mapping[int, str]]) -> Figure:
    """Figure 3: what is left when one layer is taken out of the minimal model, one panel a model.

    table: columns model, layer taken out, task, accuracy, stderr, chance. base: the minimal models' own scores, drawn
    as lines from which each point hangs. marked: model -> layer -> the heads with a role that it holds.
    """
    fig, panels = _panels(table)
    for ax, model in panels:
        here, intact = table[table.model == model], base[base.model == model].set_index("task").accuracy
        last = int(here["layer taken out"].max())
        ends = []
        for task, rows in here.groupby("task", sort=False):
            colour, marker, side = TASKS[task]
            x = rows["layer taken out"] + 0.2 * side
            ax.vlines(x, rows.accuracy, intact[task], color=COLOURS[colour], lw=1.2)
            ax.errorbar(x, rows.accuracy, rows.stderr, fmt=marker, color=COLOURS[colour], ms=5, capsize=2.5)
            ax.axhline(intact[task], color=COLOURS[colour], lw=0.9, alpha=0.7, zorder=0)
            ends.append((float(intact[task]), f"{NAMES[task]}, no layer out", colour))
        _mark(ax, marked.get(model, {}), last)
        _finish(ax, model, here, last + 0.5, ends)
        ax.set_xlim(-0.5, last + 0.5)
        ax.set_xticks(_ticks(0, last))
        ax.set_xlabel("layer taken out of the minimal model")
    return fig


def _panels(table: pd.DataFrame) -> tuple[Figure, list[tuple[Axes, str]]]:
    models = list(dict.fromkeys(table.model))
    fig = Figure(figsize=(WIDTH, 3.5 * len(models)), layout="constrained")
    axes = fig.subplots(len(models), 1, squeeze=False)[:, 0]
    return fig, list(zip(axes, models, strict=True))


def _finish(ax: Axes, model: str, here: pd.DataFrame, right: float, ends: list[tuple[float, str, str]]) -> None:
    """Lines of guessing, names at the right end, title and limits."""
    chances: dict[float, list[str]] = {}
    for task, chance in here.groupby("task", sort=False).chance.first().items():
        chances.setdefault(float(chance), []).append(NAMES[task])
    for chance, names in chances.items():
        ax.axhline(chance, color=COLOURS["chance"], lw=1.2, ls=":", zorder=0)
        told = "guessing" if len(chances) == 1 else f"guessing: {', '.join(names)}"
        ends.append((chance, told, "chance"))
    # in two parts: labels that are pushed down from the top would take those at the bottom with them
    for part in ([e for e in ends if e[0] > 0.5], [e for e in ends if e[0] <= 0.5]):
        if part:
            end_labels(ax, right, part)
    ax.set(ylim=(-0.02, 1.04), ylabel="accuracy")
    ax.set_title(model, loc="left", pad=20)


def _mark(ax: Axes, marked: Mapping[int, str], last: int) -> None:
    """Shade the layers that hold heads with a role, and name those above; two that lie close lean apart."""
    layers = sorted(marked)
    for i, layer in enumerate(layers):
        ax.axvspan(layer - 0.5, layer + 0.5, color=COLOURS["chance"], alpha=0.13, lw=0, zorder=0)
        near = len(layers) > 1 and layers[1] - layers[0] < 0.4 * (last + 1)
        side = ("right", "left")[i] if near else "center"
        x = layer + {"right": 0.5, "left": -0.5, "center": 0.0}[side]
        if side == "center" and layer < 0.15 * (last + 1):  # its name would run over the axis' left end
            x, side = layer - 0.5, "left"
        elif side == "right" and layer < 0.2 * (last + 1):
            x, side = layers[1] - 0.6, "right"
        _above(ax, x, marked[layer], side)


def _above(ax: Axes, x: float, text: str, side: str) -> None:
    apart = {"right": -4, "left": 4, "center": 0}[side]
    ax.annotate(
        text, (x, 1.0), xycoords=ax.get_xaxis_transform(), xytext=(apart, 3), textcoords="offset points", ha=side,
        va="bottom", fontsize=9, annotation_clip=False,
    )  # fmt: skip


def _ticks(first: int, last: int) -> list[int]:
    return list(np.arange(first, last + 1, max(1, (last - first + 1) // 16)))
