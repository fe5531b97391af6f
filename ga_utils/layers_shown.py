"""What does the page on layers say of one model? Tables, sentences and verdicts, all from the measured answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from . import claims_layers
from .claims import Verdict
from .claims_layers import Answers
from .claims_rules import above_chance
from .heads import Head, parse_heads
from .records import Record
from .report import reported
from .stats import stderr

#: what is asked, in the order of every tuple of answers
TASKS = ("letter", "knowledge", "kv")
#: rows of Table 1 in which these heads alone are kept in their layers
KEPT = {
    "both": "only Gather and Aggregate heads kept in their layers",
    "gather": "only Gather heads kept",
    "aggregate": "only Aggregate heads kept",
}


@dataclass(frozen=True)
class LayersPage:
    """What was measured on one model; answers are arrays [n], one for each of `TASKS`.

    why: why the model, or its heads, cannot be judged, "" if they can. chances: guessing, one for each of `TASKS`.
    cuts: layers kept -> answers, None where letters cannot be asked. minimal: the minimal model's number of layers
    (all of them where letters are at chance). dropped: layer -> answers of the minimal model without it. gather,
    aggregate: the heads found in the intact model, strongest first, that are in the minimal model. rows: Table 1,
    label -> answers. single: masked head and role -> answers; controls: the same -> the random heads that stand
    beside it; random: the same -> letters [draws, n], each with one of them masked.
    """

    model: str
    title: str
    source: str
    revision: str | None
    n_layers: int
    why: str = ""
    chances: tuple[float, ...] = ()
    cuts: dict[int, Answers] | None = None
    minimal: int = 0
    dropped: dict[int, Answers] | None = None
    gather: tuple[Head, ...] = ()
    aggregate: tuple[Head, ...] = ()
    rows: dict[str, Answers] | None = None
    single: dict[str, Answers] | None = None
    controls: dict[str, tuple[Head, ...]] | None = None
    random: dict[str, np.ndarray] | None = None
    records: tuple[Record, ...] = ()

    @property
    def testable(self) -> bool:
        """Whether letters were asked and the intact model is above chance on them."""
        return bool(self.cuts) and above_chance(self.cuts[self.n_layers][0], self.chances[0])

    def sentence(self) -> str:
        """What the model can do, how many layers it needs for it, and which heads were found."""
        if not self.cuts:
            return f"Not testable: {self.why}"
        scores = [f"{t} {_percent(c)}%" for t, c in zip(TASKS, self.cuts[self.n_layers], strict=True)]
        said = f"Intact: {', '.join(scores)}. "
        if not self.testable:
            return f"{said}{self.why}"
        said += f"The minimal model has {self.minimal} of {self.n_layers} layers. "
        heads = [
            f"{role} head{'s' * (len(h) > 1)}: {', '.join(map(str, h))}" if h else f"no {role} head"
            for role, h in (("Gather", self.gather), ("Aggregate", self.aggregate))
        ]
        return f"{said}Found there, strongest first: {'; '.join(heads)}. {self.why}".strip()

    def curve_sentence(self) -> str:
        """What Figure 2 shows of this model at its step, in percent."""
        if not self.testable or self.minimal - 1 not in self.cuts:
            return f"`{self.model}`: no step, since letters are at chance or survive every cut."
        steps = [
            f"{task} {100 * a.mean():.0f}% to {100 * b.mean():.0f}%"
            for task, a, b in zip(TASKS, self.cuts[self.minimal], self.cuts[self.minimal - 1], strict=True)
        ]
        return f"`{self.model}`, from {self.minimal} layers to {self.minimal - 1}: {', '.join(steps)}."

    def curve(self) -> pd.DataFrame:
        """Figure 2: one row for each number of layers kept and task."""
        return self._frame(dict(sorted((self.cuts or {}).items())), "layers kept")

    def drops(self) -> pd.DataFrame:
        """Figure 3: one row for each layer taken out of the minimal model, and task."""
        return self._frame(self.dropped or {}, "layer taken out")

    def base(self) -> pd.DataFrame:
        """The minimal model's scores, one row a task, as `drops` shows them."""
        return self._frame({self.minimal: self.cuts[self.minimal]} if self.cuts else {}, "layers kept")

    def marked(self) -> dict[int, str]:
        """Figure 3's marks: layer -> the strongest Gather and Aggregate heads that it holds, with their roles."""
        marks: dict[int, list[str]] = {}
        for role, heads in (("Gather", self.gather), ("Aggregate", self.aggregate)):
            for head in heads[:1]:
                marks.setdefault(head.layer, []).append(f"{role} {head}")
        return {layer: ", ".join(names) for layer, names in marks.items()}

    def table(self) -> pd.DataFrame:
        """Table 1, in percent with standard errors."""
        return pd.DataFrame(
            [
                {"condition": label, **{t: _percent(c) for t, c in zip(TASKS, answers, strict=True)}}
                for label, answers in (self.rows or {}).items()
            ]
        )

    def beside(self) -> str:
        """Which random heads stood beside the masked ones, in a sentence."""
        said = []
        for name, drawn in (self.controls or {}).items():
            layer = parse_heads(name.split(" ")[0])[0].layer
            far = drawn and any(h.layer != layer for h in drawn)
            note = f" (layer {layer} holds no other live head)" if far else ""
            said.append(f"beside {name} {', '.join(map(str, drawn)) or 'none: no other head is alive'}{note}")
        return f"Random heads: {'; '.join(said)}." if said else ""

    def verdicts(self) -> list[Verdict]:
        """Claims C1 to C5 on this model."""
        if not self.cuts:
            return [Verdict(c, self.model, "not testable", self.why, {}) for c in claims_layers.RULES]
        base = self.cuts[self.minimal]
        layers = dict.fromkeys(h.layer for h in (*self.gather[:1], *self.aggregate[:1]))
        kept = {k: self.rows[v] for k, v in KEPT.items() if v in self.rows}
        return [
            claims_layers.one_layer(self.model, self.cuts, self.minimal, self.chances),
            claims_layers.little_knowledge(self.model, self.cuts, self.minimal, self.chances),
            claims_layers.two_layers(self.model, base, self.dropped, list(layers), self.chances),
            claims_layers.one_head(self.model, base, self.single, self.random, self.chances),
            claims_layers.heads_suffice(self.model, base, kept, self.chances),
        ]

    def _frame(self, found: dict[int, Answers], name: str) -> pd.DataFrame:
        rows = [
            (self.model, key, task, float(correct.mean()), stderr(correct), chance)
            for key, answers in found.items()
            for task, correct, chance in zip(TASKS, answers, self.chances, strict=True)
        ]
        return pd.DataFrame(rows, columns=["model", name, "task", "accuracy", "stderr", "chance"])


def paper_numbers() -> pd.DataFrame:
    """What the paper reports on Figure 2 and Table 1, with how surely each number is known; none is ours."""
    rows = [*reported("fig2"), *reported("table1")]
    names = {"item": "item", "condition": "condition", "metric": "score", "confidence": "confidence", "note": "note"}
    table = pd.DataFrame([{shown: getattr(r, name) for name, shown in names.items()} for r in rows])
    table.insert(
        3, "the paper's value", [f"{r.value:g}{'%' if r.unit.startswith('%') else f' {r.unit}'}" for r in rows]
    )
    return table


def _percent(correct: np.ndarray) -> str:
    return f"{100 * correct.mean():.1f} ± {100 * stderr(correct):.1f}"
