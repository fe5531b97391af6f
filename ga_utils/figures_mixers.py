"""How does a head's matrix look? Drawn from its values alone: signed, zero white, limits symmetric.

`matrix_figure` can also draw the same matrix the wrong way, scaled from its least to its greatest entry, so that a page
can show what goes wrong: zero then has a colour, another one in every picture.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from IPython.display import HTML
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .records import Record

#: blue below zero, orange above (Okabe and Ito, darkened at the ends); an odd number of steps puts white on zero itself
SIGNED = LinearSegmentedColormap.from_list(
    "signed", ["#063a63", "#0072B2", "#9cc9e3", "#ffffff", "#f3bd94", "#D55E00", "#6e2f00"], N=257
)
#: any sequential map makes the mistake; this is the most common one
MINMAX = "viridis"
INK = "#666666"
_CELL = 9.0  # points a token in a matrix
_LABELLED = 48  # tokens; a longer text's axes show positions instead
_NAMES = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}


def visible(token: str, longest: int = 10) -> str:
    """A token's text with its whitespace visible, cut to `longest` characters; ``∅`` for an empty one."""
    shown = "".join(_NAMES.get(c, c if c.isprintable() else f"\\x{ord(c):02x}") for c in token) or "∅"
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def symmetric_limit(values: np.ndarray) -> float:
    """The limit a of the colour scale from -a to a: the greatest absolute value, or 1 if all are 0."""
    return float(np.abs(values).max()) or 1.0


def minmax_zero(values: np.ndarray) -> float:
    """Where zero falls, from 0 to 1, when `values` are scaled from least to greatest."""
    low, high = float(values.min()), float(values.max())
    return -low / (high - low) if high > low else 0.0


def matrix_figure(m: np.ndarray, tokens: Sequence[str], title: str, minmax: bool = False) -> Figure:
    """A matrix ``[t, s]``: rows are the tokens that read, columns those that are read.

    minmax: scale from least to greatest entry instead (wrong for signed values; to show the mistake).
    """
    n = len(tokens)
    labels = [visible(t) for t in tokens] if n <= _LABELLED else None
    margin = 6.0 * max(map(len, labels)) + 10 if labels else 34  # points, in a monospace font of 8 points
    side = _CELL * n if labels else 300.0
    side = max(side, 130.0)
    width, height = margin + side + 12, 24 + side + margin + 46
    fig = Figure(figsize=(width / 72, height / 72))
    ax = fig.add_axes((margin / width, (46 + margin) / height, side / width, side / height))
    limit = symmetric_limit(m)
    norm = Normalize(float(m.min()), float(m.max())) if minmax else Normalize(-limit, limit)
    shown = ax.imshow(m, cmap=MINMAX if minmax else SIGNED, norm=norm, interpolation="none", aspect="auto")
    ax.set_title(title, fontsize=10, color=INK, pad=6)
    if labels:
        ax.set_xticks(range(n), labels, rotation=90, family="monospace", fontsize=8)
        ax.set_yticks(range(n), labels, family="monospace", fontsize=8)
    ax.tick_params(length=0, pad=2, colors=INK)
    for spine in ax.spines.values():
        spine.set(visible=True, color=INK, linewidth=0.8)
    bar = fig.add_axes((margin / width, 26 / height, side / width, 8 / height))
    fig.colorbar(shown, cax=bar, orientation="horizontal")
    if minmax:
        zero = minmax_zero(m)
        bar.set_xticks([m.min(), m.max()], ["least: 0", "greatest: 1"])
        bar.axvline(0.0, color="#ffffff", lw=3)
        bar.axvline(0.0, color="#000000", lw=1.2)
        if 0.02 < zero < 0.98:
            bar.annotate(
                f"zero lands at {zero:.2f}", (0.0, 1), xytext=(0, 2), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="center" if 0.25 < zero < 0.75 else "left" if zero < 0.5 else "right",
                fontsize=8, color=INK,
            )  # fmt: skip
    else:
        bar.set_xticks([-limit, 0, limit], [number(-limit), "0", number(limit)])
    for tick, place in zip(bar.get_xticklabels(), _ends(len(bar.get_xticks())), strict=True):
        tick.set(ha=place, fontsize=8, color=INK)
    bar.tick_params(length=2, pad=1, colors=INK)
    return fig


def prompt_figure(
    row: np.ndarray, tokens: Sequence[str], boxed: Sequence[tuple[int, int]] = (), widest: int = 380
) -> Figure:
    """A row of a matrix over the text itself: each token on its colour, with its weight where that is 1% or more.

    row ``[s]``: one weight for each of `tokens`. boxed: spans of tokens to outline. widest: points before a line
    breaks.
    """
    row = np.asarray(row, dtype=float)
    boxes, width, height = _lay_out([visible(t) for t in tokens], tokens, widest)
    height += 34  # the colour bar
    fig = Figure(figsize=(width / 72, height / 72))
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.axis("off")
    limit = symmetric_limit(row)
    norm = Normalize(-limit, limit)
    total = np.abs(row).sum() or 1.0
    for (x, y, w, label), weight in zip(boxes, row, strict=True):
        colour = SIGNED(norm(weight))
        ax.add_patch(Rectangle((x, y), w - 2, 17, facecolor=colour, edgecolor="#bbbbbb", linewidth=0.6))
        dark = np.dot(colour[:3], (0.299, 0.587, 0.114)) < 0.55
        ink = "#ffffff" if dark else "#222222"
        ax.text(x + w / 2 - 1, y + 8.5, label, ha="center", va="center", color=ink, family="monospace", fontsize=9)
        if abs(weight) >= 0.01 * total:
            ax.text(x + w / 2 - 1, y + 24.5, number(weight), ha="center", va="center", color=INK, fontsize=7)
    for start, end in boxed:
        for line in sorted({boxes[i][1] for i in range(start, end)}):
            here = [boxes[i] for i in range(start, end) if boxes[i][1] == line]
            left, right = here[0][0], here[-1][0] + here[-1][2] - 2
            ax.add_patch(
                Rectangle((left - 1.5, line - 1.5), right - left + 3, 20, fill=False, edgecolor=INK, linewidth=2)
            )
    bar = fig.add_axes((4 / width, 18 / height, min(150, width - 8) / width, 7 / height))
    fig.colorbar(ScalarMappable(norm, SIGNED), cax=bar, orientation="horizontal")
    bar.set_xticks([-limit, 0, limit], [number(-limit), "0", number(limit)])
    for tick, place in zip(bar.get_xticklabels(), _ends(3), strict=True):
        tick.set(ha=place, fontsize=8, color=INK)
    bar.tick_params(length=2, pad=1, colors=INK)
    return fig


def beside(*figures: Figure, texts: Sequence[str] = ()) -> HTML:
    """Figures side by side where the page is wide enough, else one below the other.

    texts: for screen readers; the titles of figures without one.

    A figure wider than the page scrolls in its own box: shrunk to a phone, its labels could not be read. The class
    keeps dark pages from dimming the picture, which would turn its white to grey.
    """
    texts = [*texts, *(" ".join(ax.get_title() for ax in f.axes).strip() for f in figures[len(texts) :])]
    images = []
    box = "overflow-x:auto;max-width:100%"
    for figure, text in zip(figures, texts, strict=True):
        buffer = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "ga", "svg.fonttype": "none"}):  # same bytes, text as text
            figure.savefig(buffer, format="svg", metadata={"Date": None})
        data = base64.b64encode(buffer.getvalue()).decode()
        images.append(
            f'<div style="{box}"><img class="dark-light" src="data:image/svg+xml;base64,{data}" '
            f'alt="{html.escape(text, quote=True)}" style="max-width:none"></div>'
        )
    return HTML(f'<div style="display:flex;flex-wrap:wrap;gap:1rem;align-items:flex-start">{"".join(images)}</div>')


def minmax_caption(m: np.ndarray, what: str) -> str:
    """What the two drawings of `m` show, from the numbers in it."""
    zero, limit = minmax_zero(m), symmetric_limit(m)
    lower = np.tril_indices(len(m))
    above = len(m) * (len(m) - 1) // 2
    return (
        f"{what}, drawn twice. {100 * (m[lower] < 0).mean():.0f}% of its entries on and below the diagonal are "
        f"negative, with {100 * _negative(m):.0f}% of the absolute weight. Wrong: scaled from the least entry "
        f"({number(m.min())}) to the greatest ({number(m.max())}), which puts zero at {zero:.2f} of the scale, so the "
        f"{above} entries above the diagonal, all exactly 0, take that colour, and the strongest negative weight is "
        f"drawn as the weakest of all. Right: zero is white, blue negative, orange positive, limits ±{number(limit)}."
    )


def variants_caption(pictures: Mapping[str, Record]) -> str:
    """How the readings of one head differ, from the numbers in them (names as on the page)."""
    full, bare, weighed = (pictures[n].arrays["m"] for n in ("scan, with D", "scan, without D", "effective, without D"))
    skip, others = float(np.abs(np.diagonal(full - bare)).mean()), symmetric_limit(bare)
    limits = f"Each picture has its own limits; without D both signs show, {100 * _negative(bare):.0f}% of the weight "
    limits += "being negative. In the effective reading one token adds a vector of length "
    limits += f"{number(symmetric_limit(weighed))} or less to the block's output."
    if skip == 0:
        return f"This head has no skip term D, so the first two are the same. {limits}"
    hides = ", so that D hides all else" if skip > 5 * others else ""
    return (
        f"With D every token takes {number(skip)} of its own value past the state; the largest weight that went "
        f"through the state is {number(others)}{hides}. {limits}"
    )


def pattern_caption(m: np.ndarray, tokens: Sequence[str], what: str) -> str:
    """What a picture of an attention pattern shows, from the numbers in it."""
    first = float(m[1:, 0].mean()) if len(m) > 1 else 1.0
    return (
        f"{what}: no entry is negative, so only the orange arm is in use; zero is white all the same. The rows after "
        f"the first give {100 * first:.0f}% of their weight to the first token ({visible(tokens[0])}) on average."
    )


def _negative(m: np.ndarray) -> float:
    return float(-m[m < 0].sum() / (np.abs(m).sum() or 1.0))


def number(x: float) -> str:
    """Two digits, with a real minus sign: 0.85, −0.013, 12."""
    text = f"{x:.2f}" if 0.095 <= abs(x) < 9.95 else f"{x:.2g}" if abs(x) < 0.095 else f"{x:.0f}"
    return text.replace("-", "−")


def _lay_out(labels: list[str], tokens: Sequence[str], widest: float):
    """(x, y, width, label) of each token in points, with lines broken at newlines and `widest`; width and height."""
    boxes, x, y, right = [], 4.0, 4.0, 160.0
    for label, token in zip(labels, tokens, strict=True):
        w = max(5.5 * len(label) + 8, 29.0)
        if x + w > widest and x > 4:
            x, y = 4.0, y + 34
        boxes.append((x, y, w, label))
        x += w
        right = max(right, x)
        if "\n" in token:
            x, y = 4.0, y + 34
    return boxes, right + 4, max(b[1] for b in boxes) + 32


def _ends(n: int) -> list[str]:
    """Tick labels that stay inside the bar: the first to its right, the last to its left."""
    return ["left", *["center"] * (n - 2), "right"]
