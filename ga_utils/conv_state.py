"""Does an SSM gather by its short convolution or by its state? Scores with either off, in the heads' layers and in all.

A short convolution reaches a few tokens back, so part of a segment could be summed up without any state
(`mixer_parts`). What the score does when the state is not carried tells whether that is enough.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from .claims_rules import above_chance, lost
from .codehash import code_hash
from .errors import ModelError
from .heads import Head
from .language_model import LanguageModel
from .mixer_parts import without_conv, without_state
from .records import Record, Store
from .scoring import score
from .stats import stderr
from .tasks import Task

#: name -> what switches that part off
PARTS: dict[str, Callable] = {"convolution off": without_conv, "state not carried": without_state}


@dataclass(frozen=True)
class PartsTable:
    """What was measured on one model: condition -> task -> answers [n]; why: why there is nothing, "" if there is.

    chances: by task. layers: role -> the layer of its strongest head, for those in an SSM.
    """

    model: str
    title: str
    why: str
    chances: dict[str, float]
    layers: dict[str, int]
    rows: dict[str, dict[str, np.ndarray]]
    records: tuple[Record, ...]

    def table(self) -> pd.DataFrame:
        """Accuracy in percent ± standard error, one row a condition."""
        return pd.DataFrame(
            [
                {"condition": label, **{t: f"{100 * c.mean():.1f} ± {100 * stderr(c):.1f}" for t, c in cells.items()}}
                for label, cells in self.rows.items()
            ]
        )

    def sentence(self) -> str:
        """What the Gather head's layer loses by each part, as a share of the score above chance with its interval."""
        if self.why:
            return self.why
        if "Gather" not in self.layers:
            return "No Gather head in an SSM layer is known, so no layer stands out."
        layer, said = self.layers["Gather"], []
        for task in ("letter", "kv"):
            intact = self.rows["intact"].get(task)
            if intact is None or not above_chance(intact, self.chances[task]):
                continue
            parts = []
            for part in PARTS:
                loss = lost(self.rows[_label(part, f"the Gather head's layer ({layer})")][task], intact,
                            self.chances[task])  # fmt: skip
                parts.append(f"{100 * loss.value:.0f}% [{100 * loss.low:.0f}, {100 * loss.high:.0f}] with its {part}")
            said.append(f"{'letters' if task == 'letter' else 'key-value questions'} lose {' and '.join(parts)}")
        if not said:
            return "No retrieval task is above chance, so nothing can be told."
        return f"In the Gather head's layer ({layer}), {'; '.join(said)} (of the score above chance)."


def _label(part: str, where: str) -> str:
    return f"{part}, {where}"


def measure(store: Store, lm: LanguageModel, tasks: Mapping[str, Task], heads: Mapping[str, Head]) -> PartsTable:
    """Scores of `lm` on `tasks` with convolutions or states off; heads: role -> the strongest head with it."""
    chances = {kind: t.chance for kind, t in tasks.items()}
    kinds = {s.kind for s in lm.sites}
    if kinds == {"attention"}:
        why = f"{lm.name} has attention alone: there is no convolution and no state to switch off."
        return PartsTable(lm.name, lm.title, why, chances, {}, {}, ())
    layers = {role: h.layer for role, h in heads.items() if lm.site(h).kind != "attention"}
    places: dict[str, list[int] | None] = {"all layers": None}
    places |= {f"the {role} head's layer ({n})": [n] for role, n in layers.items()}
    rows: dict[str, dict[str, np.ndarray]] = {}
    records: list[Record] = []
    try:
        work = [("intact", "", None)]
        work += [(part, place, layer) for part in PARTS for place, layer in places.items()]
        for part, place, which in work:
            label = _label(part, place) if place else part
            for kind, task in tasks.items():
                record = _score(store, lm, task, part, which)
                records.append(record)
                rows.setdefault(label, {})[kind] = record.arrays["correct"]
    except ModelError as error:
        return PartsTable(lm.name, lm.title, str(error), chances, layers, {}, tuple(records))
    return PartsTable(lm.name, lm.title, "", chances, layers, rows, tuple(records))


def _score(store: Store, lm: LanguageModel, task: Task, part: str, layers: list[int] | None) -> Record:
    key = {"kind": "score", "model": lm.describe(), "task": task.key(), "code": code_hash("scoring", "mixer_parts")}
    key["condition"] = {"heads": [], "part": None if part == "intact" else part, "layers": layers}

    def run():
        with PARTS[part](lm, layers) if part in PARTS else contextlib.nullcontext():
            result = score(lm, task)
        return result.to_values(), result.arrays()

    return store.compute(key, run, {"model": lm.name, "source": lm.source, "revision": lm.revision})
