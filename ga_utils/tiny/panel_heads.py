"""Which heads of the embedded models gather and aggregate, what is lost without them, and where do they look?

Heads are found on letter questions of one seed and measured on questions of another, of four kinds: letters, letters
with the name written out, key-value pairs, and plain knowledge, which needs no retrieval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from tqdm import tqdm

from ga_utils import head_rows
from ga_utils.codehash import code_hash
from ga_utils.discovery import effects, select_heads
from ga_utils.errors import GAError, TaskError
from ga_utils.heads import Head, parse_heads
from ga_utils.language_model import LanguageModel
from ga_utils.measure import Condition, leave_controls, random_draws, score_under, sweep_under
from ga_utils.patterns import measure_patterns
from ga_utils.records import Record, Store
from ga_utils.stats import bootstrap, stderr
from ga_utils.sweep import Sweep
from ga_utils.tasks.base import Task
from ga_utils.tasks.tokens import segment_tokens
from ga_utils.tiny.panel import Member, pruned, task

ROLES = ("Aggregate", "Gather")
RETRIEVAL = ("letter", "copy-letter", "kv-8")
ASKED = (*RETRIEVAL, "knowledge")
#: a head may cost facts at most this share of what it costs letters: others serve every token, not retrieval
FACTS_SHARE = 0.1
#: questions on which that is measured
FACTS = 16
#: of the score above chance: what masking the found heads must take away, and what must stay of knowledge
LOST, KEPT = 0.5, 0.9
RULE = (
    "each head alone is masked on letter questions that no result is reported on. *Aggregate*: at the position that "
    "gives the answer. *Gather*: everywhere, less what the mask at the answer's position costs. Of either kind those "
    "heads are found that cost log-probability of the right letter beyond doubt (one-sided, 5%, divided by the number "
    "of heads) and at least a third of what the strongest costs. Heads whose mask costs facts more than "
    f"{FACTS_SHARE:.0%} of what it costs letters are left out before: they serve every token, not retrieval"
)


PATTERN_CAPTION = (
    "mass: for Aggregate heads, what the last token takes from the ends of all options (their last syllables or "
    "newlines, whichever is more); for Gather heads, what an option's end takes from the rest of its own line. Other "
    "heads: the mean of all others. Means over the letter questions that results are reported on."
)


@dataclass(frozen=True)
class HeadSettings:
    """How many questions are asked, from which seeds, and how many draws of random heads stand beside."""

    n_examples: int
    seed: int
    select_examples: int
    select_seed: int
    n_random: int


@dataclass(frozen=True)
class Found:
    """What the sweeps found in one model.

    effects: role -> one row a head in the model's order (head, layer, index, loss, se, z, significant, and facts: the
    nats that the head costs facts when it is masked everywhere). heads: role -> the heads found, strongest first, as
    many as leave random ones to compare with. left_out: role -> how many more were found. why: role -> why none was
    found, "" if some were.
    """

    member: Member
    effects: dict[str, pd.DataFrame]
    heads: dict[str, tuple[Head, ...]]
    left_out: dict[str, int]
    why: dict[str, str]
    records: list[Record]


def find(store: Store, member: Member, settings: HeadSettings) -> Found:
    """Find the heads of one model by `RULE`; what the store holds is not measured again."""
    lm, records = member.lm, []
    n, seed = settings.select_examples, settings.select_seed
    letters, facts = task("letter", n, seed), task("knowledge", min(n, FACTS), seed)
    answer = sweep_under(store, lm, letters, "answer", "answer", False, None, records)
    everywhere = sweep_under(store, lm, letters, "all", "answer", False, None, records)
    known = sweep_under(store, lm, facts, "all", "answer", False, None, records)
    on_facts = (known.intact_logprob[None] - known.logprob).mean(1)
    zeros = np.zeros_like(everywhere.intact_logprob)
    beyond = replace(everywhere, intact_logprob=zeros, logprob=everywhere.logprob - answer.logprob)
    tables, heads, left_out, why = {}, {}, {}, {}
    for role, sweep in (("Aggregate", answer), ("Gather", beyond)):
        table = _in_order(effects(sweep))
        table["facts"] = on_facts
        tables[role] = table
        try:
            found = select_heads(_only(sweep, on_facts <= FACTS_SHARE * table.loss.to_numpy()))
            heads[role], why[role] = leave_controls(lm, found), ""
            left_out[role] = len(found) - len(heads[role])
        except TaskError as error:
            heads[role], left_out[role], why[role] = (), 0, str(error)
    return Found(member, tables, heads, left_out, why, records)


def _only(sweep: Sweep, may: np.ndarray) -> Sweep:
    """The sweep with what other heads cost set to nothing: they cannot be found, but count as tested."""
    if not may.any():
        raise TaskError("Every head that costs letters costs facts as well.")
    return replace(sweep, logprob=np.where(may[:, None], sweep.logprob, sweep.intact_logprob[None]))


def _in_order(table: pd.DataFrame) -> pd.DataFrame:
    return table.drop(columns="points").sort_values(["layer", "index"], ignore_index=True)


def positions_for(role: str, name: str) -> str:
    """Where heads of a role are masked in a task: Aggregate heads where the answer is given, Gather heads everywhere.

    On knowledge both are masked everywhere, the harshest mask: what stays then was not theirs.
    """
    return "answer" if role == "Aggregate" and name != "knowledge" else "all"


def masked(
    store: Store, found: Found, settings: HeadSettings, progress: bool = True
) -> tuple[pd.DataFrame, list[Record]]:
    """Scores of one model with the found heads masked, beside as many random ones of their layers.

    Columns model, seed, role, task, condition ("intact", "found", "random"), draw, heads, accuracy, stderr, chance,
    correct (the array over questions).
    """
    lm, rows, records = found.member.lm, [], []
    work = []
    for role in ROLES:
        heads = found.heads[role]
        if heads:
            drawn = controls(found.member, heads, settings.n_random, settings.seed)
            conditions = [("intact", 0, ()), ("found", 0, heads), *(("random", i, d) for i, d in enumerate(drawn))]
            work += [(role, name, *c) for name in ASKED for c in conditions]
    for role, name, condition, draw, heads in tqdm(work, desc=f"{lm.name}: masks", disable=not progress):
        where = Condition(f"{role} {condition}", tuple(heads), positions_for(role, name))
        record = score_under(store, lm, task(name, settings.n_examples, settings.seed), where)
        records.append(record)
        correct = record.arrays["correct"]
        rows.append(
            {
                "model": lm.name, "seed": found.member.seed, "role": role, "task": name, "condition": condition,
                "draw": draw, "heads": ", ".join(map(str, heads)), "accuracy": float(correct.mean()),
                "stderr": stderr(correct), "chance": record.values["chance"], "correct": correct,
            }
        )  # fmt: skip
    return pd.DataFrame(rows), records


def controls(member: Member, heads: Sequence[Head], n: int, seed: int) -> list[tuple[Head, ...]]:
    """Up to n draws of as many random heads as `heads`, of the same layers.

    Heads that were pruned in training are no control, since they add nothing. Where a layer has pruned heads, live ones
    are drawn from the layers of `heads` and, if those hold too few for n draws, from the layers next to them.
    """
    lm, dead = member.lm, set(parse_heads(pruned(member)))
    layers = {h.layer for h in heads}
    if not any(h.layer in layers for h in dead):
        return random_draws(lm, tuple(heads), n, seed)
    rng = np.random.default_rng([seed, 20_250_418])
    for reach in range(lm.n_layers):
        near = {layer + step for layer in layers for step in range(-reach, reach + 1)}
        pool = [h for h in lm.head_list() if h.layer in near and h not in dead and h not in heads]
        if math.comb(len(pool), len(heads)) >= n:
            break
    if len(pool) < len(heads):
        raise GAError(f"{lm.name} has too few live heads beside {', '.join(map(str, heads))} to draw random ones from.")
    draws: dict[tuple[Head, ...], None] = {}
    while len(draws) < min(n, math.comb(len(pool), len(heads))):
        draws[tuple(pool[i] for i in sorted(rng.choice(len(pool), len(heads), replace=False)))] = None
    return list(draws)


@dataclass(frozen=True)
class Look:
    """Where the heads of one model look on one question.

    rows: (role, head, the token that looks, its row [s], the spans of tokens to box); tokens: the question's tokens.
    """

    member: Member
    tokens: list[str]
    rows: list[tuple[str, Head, int, np.ndarray, list[tuple[int, int]]]]
    records: list[Record]


def look(store: Store, found: Found, settings: HeadSettings) -> Look:
    """The strongest Aggregate head's last row, and the strongest Gather head's row at the token that it reads most.

    That token is looked for in the right option; without an Aggregate head it is the end of the option's name or line.
    """
    lm, member = found.member.lm, found.member
    example = task("letter", 1, settings.seed).examples[0]
    segments = segment_tokens(lm.tokenizer, example, "none")
    right, name = segments[example.answer]
    rows, records, tokens, read = [], [], [], None
    for role in ROLES:
        if not found.heads[role]:
            continue
        head = found.heads[role][0]
        record = head_rows.matrix_record(store, lm, example.prompt, head, with_d=False)
        records.append(record)
        tokens, m = record.values["tokens"], record.arrays["m"]
        if role == "Aggregate":
            at = len(tokens) - 1
            inside = np.abs(m[at, right[0] : right[1]])
            read = right[0] + int(inside.argmax())
        else:
            ends = (name[1] - 1, right[1] - 1)
            at = read if read is not None else max(ends, key=lambda t, m=m: np.abs(m[t, right[0] : t]).sum())
        rows.append((role, head, at, m[at], [right]))
    return Look(member, tokens, rows, records)


def patterns(store: Store, lm: LanguageModel, asked: Task) -> Record:
    """Where all heads look in every question of a task, as a record: the arrays of `Patterns`, ``[h, n]`` each."""
    key = {"kind": "patterns", "model": lm.describe(), "task": asked.key(), "code": code_hash("patterns")}

    def run():
        return {"heads": len(lm.head_list())}, measure_patterns(lm, asked).arrays()

    return store.compute(key, run, {"model": lm.name, "source": lm.source, "revision": lm.revision})


def pattern_table(store: Store, found: Found, settings: HeadSettings) -> tuple[pd.DataFrame, list[Record]]:
    """How the found heads look over letter questions, beside the mean of all other heads: one row a head."""
    lm = found.member.lm
    record = patterns(store, lm, task("letter", settings.n_examples, settings.seed))
    heads, right = lm.head_list(), record.arrays["right"].mean(1, dtype=float)
    rows = []
    for role, column in (("Aggregate", "aggregate"), ("Gather", "gather")):
        values = np.maximum(record.arrays[f"{column}_end"], record.arrays[f"{column}_value"]).mean(1, dtype=float)
        others = [v for h, v in zip(heads, values, strict=True) if h not in found.heads[role]]
        for head in found.heads[role]:
            i = heads.index(head)
            rows.append(
                {
                    "model": lm.name, "role": role, "head": str(head), "mass": values[i],
                    "other heads": float(np.mean(others)),
                    "points at the right option": f"{right[i]:.2f}" if role == "Aggregate" else "",
                }
            )  # fmt: skip
    return pd.DataFrame(rows), [record]


def for_maps(found: Found) -> tuple[dict[str, pd.DataFrame], dict[str, list[str]], str]:
    """What `figures_tiny.head_maps` takes: the effects of each role, the found heads' names, the model's name."""
    tables = {}
    for role, table in found.effects.items():
        bad = table.significant & (table.facts > FACTS_SHARE * table.loss)
        off = table["head"].isin(pruned(found.member))
        tables[role] = table.assign(serves_facts=bad, pruned=off).rename(columns={"index": "number"})
    return tables, {role: [str(h) for h in heads] for role, heads in found.heads.items()}, found.member.lm.name


def shares_table(frame: pd.DataFrame) -> pd.DataFrame:
    """`shares` as the page shows it, in percent."""

    def percent(x: float) -> str:
        return f"{round(100 * x)}".replace("-", "−")

    rows = []
    for r in frame.to_dict("records"):
        rows.append(
            {
                "model": r["model"], "heads off": r["role"], "task": r["task"], "intact accuracy": percent(r["intact"]),
                "left": percent(r["left"]), "left, random heads off": percent(r["left random"]),
                "difference": f"{percent(r['gap'])} [{percent(r['low'])},\u00a0{percent(r['high'])}]",
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def heads_line(found: Found) -> str:
    """Which heads were found, as a sentence."""
    parts = []
    for role in ROLES:
        if found.heads[role]:
            more = f" (and {found.left_out[role]} more, of which too few would be left to compare with)"
            parts.append(f"{role}: {', '.join(map(str, found.heads[role]))}{more if found.left_out[role] else ''}")
        else:
            parts.append(f"{role}: none ({found.why[role].rstrip('.')})")
    return f"**`{found.member.lm.name}`.** " + "; ".join(parts) + "."


def shares(frame: pd.DataFrame, names: Sequence[str] = ASKED) -> pd.DataFrame:
    """For each model, role and task: the share of the score above chance that is left, and the paired comparison.

    Columns left and left random (means over examples and draws), gap (found minus random, as a share of the intact
    score above chance) and its 95% interval low, high.
    """
    rows = []
    for (model, role, name), here in frame[frame.task.isin(names)].groupby(["model", "role", "task"], sort=False):
        by = {c: np.stack(list(here[here.condition == c].correct)).astype(float) for c in ("intact", "found", "random")}
        chance = float(here.chance.iloc[0])
        room = max(float(by["intact"].mean()) - chance, 1e-9)
        left = {c: (float(by[c].mean()) - chance) / room for c in ("found", "random")}
        gap = bootstrap(
            lambda g, room=room: float(g[1].mean() - g[0].mean()) / room,
            np.stack([by["random"].mean(0), by["found"][0]]),
        )
        rows.append(
            {
                "model": model, "seed": int(here.seed.iloc[0]), "role": role, "task": name, "chance": chance,
                "intact": float(by["intact"].mean()), "left": left["found"], "left random": left["random"],
                "gap": gap.value, "low": gap.low, "high": gap.high,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)
