"""How do the results on the embedded models look? Small figures that stand side by side, from measured values alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .figures import COLOURS
from .figures_mixers import INK, SIGNED, visible
from .tiny.panel_heads import Look

WIDTH = 3.45  # inches: two of these stand side by side in the book's text column, one fits a phone
#: kinds of lesson; Okabe and Ito's colours, with a marker each
KINDS = {
    "cloze": ("#0072B2", "o"), "kv": ("#D55E00", "s"), "easy letters": ("#7F7F7F", "v"), "letter": ("#009E73", "^"),
    "copy-letter": ("#CC79A7", "D"), "letters": ("#009E73", "^"), "long-keys": ("#56B4E9", "x"),
    "repeat": ("#E69F00", "+"),
}  # fmt: skip
SEED_MARKS = "osD^v"


def name_grid(starts: Sequence[str], middle: Sequence[str], ends: Sequence[str], cells: Mapping[tuple, str]) -> Figure:
    """The names of one category: which entity has which start and end. cells: (start, end) -> entity."""
    fig = Figure(figsize=(WIDTH, 2.3), layout="constrained")
    ax = fig.add_subplot()
    for i, a in enumerate(starts):
        for j, b in enumerate(ends):
            taken = (a, b) in cells
            face = "#9cc9e3" if taken else "none"
            ax.add_patch(Rectangle((j, i), 0.94, 0.9, facecolor=face, edgecolor=INK, lw=0.6, ls="-" if taken else ":"))
            if taken:
                ax.text(j + 0.47, i + 0.45, cells[a, b], ha="center", va="center", fontsize=10, color="#222222")
    ax.set(xlim=(0, len(ends)), ylim=(len(starts), 0))
    ax.set_xticks(np.arange(len(ends)) + 0.47, [f"… {e}" for e in ends], family="monospace")
    ax.set_yticks(np.arange(len(starts)) + 0.45, [f"{s} …" for s in starts], family="monospace")
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    ax.set(xlabel="the name's end", ylabel="the name's start")
    ax.set_title(f"between them always: {' '.join(middle)}", y=-0.16, fontsize=10, color=INK)
    _bare(ax)
    return fig


def scores(frame: pd.DataFrame, family: str, tasks: Sequence[str]) -> Figure:
    """Scores of one family, a mark for each seed, with standard errors; bars in grey: guessing.

    A text in the place of a seed's number is that mark's name.
    """
    here = frame[frame.family == family]
    seeds = sorted(set(here.seed))
    fig = Figure(figsize=(WIDTH, 0.36 * len(tasks) + 1.15), layout="constrained")
    ax = fig.add_subplot()
    for k, seed in enumerate(seeds):
        rows = here[here.seed == seed].set_index("task").loc[list(tasks)]
        y = np.arange(len(tasks)) + 0.24 * (k - (len(seeds) - 1) / 2)
        colour = (COLOURS["intact"], COLOURS["masked"], "#009E73", COLOURS["strongest"], "#7F7F7F")[k % 5]
        mark = SEED_MARKS[k % len(SEED_MARKS)]
        ax.errorbar(
            rows.accuracy,
            y,
            xerr=rows.stderr,
            fmt=mark,
            ms=4,
            lw=1.2,
            color=colour,
            label=seed if isinstance(seed, str) else f"seed {seed}",
        )
    chance = here.groupby("task").chance.first().loc[list(tasks)]
    for i, c in enumerate(chance):
        ax.plot([c, c], [i - 0.42, i + 0.42], color=COLOURS["chance"], lw=1.6, label="guessing" if i == 0 else None)
    ax.set_yticks(range(len(tasks)), tasks)
    ax.set(xlim=(-0.03, 1.03), ylim=(len(tasks) - 0.5, -0.5), xlabel="accuracy", title=family)
    _legend_below(fig, ax, min(len(seeds) + 1, 4))
    return fig


def learning(frame: pd.DataFrame, model: str) -> Figure:
    """Learning curves of one model; stages are told apart by thin lines, and named above."""
    here = frame[frame.model == model]
    fig = Figure(figsize=(WIDTH, 2.75), layout="constrained")
    ax = fig.add_subplot()
    for kind, rows in here.groupby("kind", sort=False):
        colour, mark = KINDS.get(kind, ("#000000", "."))
        for i, (_, part) in enumerate(rows.groupby("stage", sort=False)):
            ax.plot(part.step, part.accuracy, mark + "-", color=colour, lw=1.3, ms=3.5, label=kind if i == 0 else None)
    ends = here.groupby("stage", sort=False).step.max()
    for end in ends[:-1]:
        ax.axvline(end, color=INK, lw=0.8, ls=":")
    starts = [0, *ends[:-1]]
    for number, (start, end) in enumerate(zip(starts, ends, strict=True), 1):
        ax.text((start + end) / 2, 1.06, str(number), ha="center", va="bottom", fontsize=8, color=INK)
    ax.set(ylim=(-0.03, 1.05), xlim=(0, 1.04 * float(ends.max())), xlabel="step", ylabel="answers right")
    ax.set_title(model, pad=18)
    _legend_below(fig, ax, 3)
    return fig


def head_maps(effects: Mapping[str, pd.DataFrame], found: Mapping[str, Sequence[str]], title: str) -> Figure:
    """What masking each head alone costs, one map a role: ringed if found, crossed if pruned, hatched if facts need it.

    effects: role -> columns head, layer, number, loss, and serves_facts and pruned, which are true or false.
    """
    fig = Figure(figsize=(WIDTH, 3.1), layout="constrained")
    axes = fig.subplots(1, len(effects), squeeze=False)[0]
    for ax, (role, table) in zip(axes, effects.items(), strict=True):
        grid = table.pivot(index="layer", columns="number", values="loss")
        top = float(np.abs(grid.to_numpy()).max()) or 1.0
        image = ax.imshow(grid, cmap=SIGNED, vmin=-top, vmax=top, aspect="auto", interpolation="none")
        for row in table.itertuples():
            at = (list(grid.columns).index(row.number), list(grid.index).index(row.layer))
            if row.serves_facts:
                box = Rectangle((at[0] - 0.5, at[1] - 0.5), 1, 1, fill=False, hatch="////", ec="#888888", lw=0)
                ax.add_patch(box)
            if row.pruned:
                ax.plot(*at, "x", color="#999999", mew=1.2, ms=6)
            if row.head in found[role]:
                ax.plot(*at, "o", mfc="none", mec="#000000", mew=1.6, ms=13)
        ax.set_xticks(range(len(grid.columns)), grid.columns)
        ax.set_yticks(range(len(grid.index)), grid.index)
        ax.set(xlabel="head", ylabel="layer" if ax is axes[0] else "", title=role)
        bar = fig.colorbar(image, ax=ax, orientation="horizontal", pad=0.03, shrink=0.95)
        bar.set_label("nats lost", fontsize=9, color=INK)
        bar.set_ticks([-top, 0, top], labels=[f"−{top:.2g}", "0", f"{top:.2g}"])
        bar.ax.tick_params(labelsize=8, colors=INK)
    fig.suptitle(title, fontsize=11, color=INK)
    return fig


def masks(frame: pd.DataFrame, tasks: Sequence[str], title: str) -> Figure:
    """Scores of one model with its found heads masked, beside random ones; one panel a role."""
    roles = list(dict.fromkeys(frame.role))
    fig = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    axes = fig.subplots(1, len(roles), squeeze=False, sharey=True)[0]
    for ax, role in zip(axes, roles, strict=True):
        here = frame[frame.role == role]
        for i, name in enumerate(tasks):
            one = here[here.task == name]
            ax.plot(
                [i - 0.4, i + 0.4],
                [one.chance.iloc[0]] * 2,
                color=COLOURS["chance"],
                lw=1.6,
                label=_once("guessing", i),
            )
            for condition, shift, mark in (("intact", -0.22, "o"), ("random", 0.0, "x"), ("found", 0.22, "s")):
                rows = one[one.condition == condition]
                colour = COLOURS["masked" if condition == "found" else condition]
                called = {"found": "found heads off", "random": "random heads off"}.get(condition, condition)
                ax.errorbar(
                    [i + shift] * len(rows), rows.accuracy, rows.stderr, fmt=mark, ms=4, lw=1.2, color=colour,
                    label=_once(called, i),
                )  # fmt: skip
        ax.set_xticks(range(len(tasks)), tasks, rotation=35, ha="right", rotation_mode="anchor")
        ax.set(
            ylim=(-0.03, 1.05), xlim=(-0.5, len(tasks) - 0.5), title=role, ylabel="accuracy" if ax is axes[0] else ""
        )
    fig.suptitle(title, fontsize=11, color=INK)
    _legend_below(fig, axes[0], 2)
    return fig


def swaps(frame: pd.DataFrame, aggregate: Sequence[int], title: str) -> Figure:
    """One student's scores with each layer swapped, under the error of that layer's mixer.

    frame: as `panel_students.swaps` gives it. aggregate: layers of the teacher's Aggregate heads, shaded.
    """
    tasks = [t for t in dict.fromkeys(frame.task) if (frame[frame.task == t].part == "mixer").any()]
    layers = sorted(x for x in set(frame.layer) if x >= 0)
    fig = Figure(figsize=(WIDTH, 1.35 + 1.35 * len(tasks)), layout="constrained")
    axes = fig.subplots(1 + len(tasks), 1, sharex=True, height_ratios=[0.8, *[1] * len(tasks)])
    errors = frame[frame.layer >= 0].groupby("layer").error.first()
    axes[0].bar(errors.index, errors, color=COLOURS["random"], width=0.5)
    axes[0].set(ylabel="mixer's error", title=title)
    for ax, name in zip(axes[1:], tasks, strict=True):
        here = frame[frame.task == name]
        for part, colour in (("teacher", COLOURS["intact"]), ("student", COLOURS["masked"])):
            ax.axhline(here[here.part == part].accuracy.iloc[0], color=colour, lw=1.3, label=part)
        ax.axhline(here.chance.iloc[0], color=COLOURS["chance"], lw=1.3, ls=":", label="guessing")
        for part, mark, shift in (("block", "o", -0.12), ("mixer", "D", 0.12)):
            rows = here[here.part == part].sort_values("layer")
            ax.errorbar(
                rows.layer + shift, rows.accuracy, rows.stderr, fmt=mark, ms=4.5, lw=1.2, color="#009E73",
                mfc="#009E73" if part == "block" else "#ffffff",
                label="whole layer swapped" if part == "block" else "mixer alone swapped",
            )  # fmt: skip
        ax.set(ylim=(-0.03, 1.06), ylabel=name)
    for ax in axes:
        for layer in aggregate:
            ax.axvspan(layer - 0.45, layer + 0.45, color="#E69F00", alpha=0.18, lw=0)
    axes[-1].set_xticks(layers)
    axes[-1].set(xlabel="layer", xlim=(layers[0] - 0.6, layers[-1] + 0.6))
    _legend_below(fig, axes[-1], 2)
    return fig


def look_caption(seen: Look) -> str:
    """What the pictures of `look` show, from the numbers in them."""
    parts = []
    for role, head, at, row, ((a, b),) in seen.rows:
        weight = np.abs(row)
        share = 100 * weight[a:b].sum() / max(weight.sum(), 1e-12)
        top = int(weight.argmax())
        where = "the last token" if role == "Aggregate" else f"token {at}, {visible(seen.tokens[at])}"
        parts.append(
            f"{role} head {head} at {where}: {share:.0f}% of its weight lies in the right option, most "
            f"({100 * weight[top] / max(weight.sum(), 1e-12):.0f}%) on {visible(seen.tokens[top])}, token {top}"
        )
    return f"{seen.member.lm.name}. " + "; ".join(parts) + "."


def _once(label: str, i: int) -> str | None:
    return label if i == 0 else None


def _legend_below(fig: Figure, ax: Axes, columns: int) -> None:
    handles, names = ax.get_legend_handles_labels()
    fig.legend(
        handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5, labelcolor=INK,
        handletextpad=0.3, columnspacing=1.1,
    )  # fmt: skip


def _bare(ax: Axes) -> None:
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
