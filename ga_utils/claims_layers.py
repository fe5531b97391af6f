"""Do letters hang on single layers and single heads? Claims C1 to C5 (Figures 2 and 3, Table 1), by stated rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .claims import Verdict
from .claims_rules import Check, above_chance, judge, lost, share
from .stats import bootstrap

C1 = "Letter accuracy hangs on one layer: cutting layers from the top leaves it flat until one layer goes (Figure 2)."
C1_RULE = (
    "At least one layer can be cut, and at every cut down to the minimal model letters keep at least 0.9 of the intact "
    "model's score above chance. The next cut loses at least half of what the minimal model has, while knowledge loses "
    "under a fifth in that step."
)
C2 = "Little knowledge suffices for the letter task: in the paper about 30% of the original score (Figure 2, abstract)."
C2_RULE = (
    "In the minimal model the letter share is at least 0.9, and the knowledge share, reported with its interval beside "
    "the paper's 0.3, is at most 0.6."
)
C3 = "Two layers matter together, and only for the letter (Figure 3)."
C3_RULE = (
    "From the minimal model one layer is taken out at a time. The layers of the strongest Gather and the strongest "
    "Aggregate head, found on other questions, each cost over half of the letter share and under a fifth of knowledge; "
    "no other layer does."
)
C4 = "One Gather or one Aggregate head decides (Table 1)."
C4_RULE = (
    "In the minimal model, masking the strongest Gather head, or the strongest Aggregate head, costs over half of the "
    "letter share and under a fifth of knowledge; one random head beside each, of its layer and alive (it adds "
    "something; of the nearest layer where its own holds no other), costs under a tenth. The effect counts as being "
    "there at all only if each of the two costs more than the random heads beside it, beyond doubt. (This last "
    "sentence was added after the rule had first been run: without it, heads that cost no more than their neighbours "
    "were called *partly*.)"
)
C5 = "The Gather and Aggregate heads alone suffice in their layers (Table 1, section 4.3)."
C5_RULE = (
    "In the minimal model, with all other heads of their layers masked, both kinds together keep at least 0.8 of the "
    "letter share, each kind alone under 0.3."
)
#: verdicts' claims with their rules, as the page prints them
RULES = {"C1": (C1, C1_RULE), "C2": (C2, C2_RULE), "C3": (C3, C3_RULE), "C4": (C4, C4_RULE), "C5": (C5, C5_RULE)}

#: answers of one condition: letters [n], knowledge [m], and more that no rule looks at; chances in the same order
Answers = tuple[np.ndarray, ...]

_LETTERS = "Letters are at chance in {}."
_UNKNOWN = "Knowledge is at chance already in {}, so whether it is spared cannot be told."


def one_layer(model: str, cuts: Mapping[int, Answers], minimal: int, chances: Sequence[float]) -> Verdict:
    """Claim C1. cuts: layers kept -> the answers; the largest number is the intact model."""
    full = max(cuts)
    if not above_chance(cuts[full][0], chances[0]):
        return Verdict("C1", model, "not testable", _LETTERS.format("the intact model"), {})
    if minimal - 1 not in cuts:
        return Verdict("C1", model, "not", "Even the smallest cut keeps the letters.", {})
    flat = [
        Check(f"letter share, {k} layers", share(cuts[k][0], cuts[full][0], chances[0]), least=0.9)
        for k in sorted(cuts, reverse=True)
        if minimal <= k < full
    ]
    before, after = cuts[minimal], cuts[minimal - 1]
    drop = lost(after[0], before[0], chances[0])
    said = f"Letters hold down to {minimal} of {full} layers and lose {100 * drop.value:.0f}% with the next one."
    spared, wrong = _spared("in that step", after, before, chances, "the minimal model")
    checks = [*flat, Check("letters lost in that step", drop, least=0.5, there=drop.above), *spared]
    if not flat:
        said = f"The first layer that is cut costs {100 * drop.value:.0f}% of the letters."
        wrong = f"There is nothing flat: no layer can be cut. {wrong}".strip()
    return judge("C1", model, said, checks, wrong)


def little_knowledge(model: str, cuts: Mapping[int, Answers], minimal: int, chances: Sequence[float]) -> Verdict:
    """Claim C2."""
    full = max(cuts)
    for task, correct, chance in zip(("Letters are", "Knowledge is"), cuts[full], chances, strict=False):
        if not above_chance(correct, chance):
            return Verdict("C2", model, "not testable", f"{task} at chance in the intact model.", {})
    known = share(cuts[minimal][1], cuts[full][1], chances[1])
    letters = share(cuts[minimal][0], cuts[full][0], chances[0])
    said = (
        f"The minimal model has {minimal} of {full} layers and keeps {100 * known.value:.0f}% of the knowledge score "
        f"({known})."
    )
    checks = [
        Check("letter share", letters, least=0.9),
        Check("knowledge share (paper: about 0.3)", known, most=0.6, there=known.high < 1),
    ]
    return judge("C2", model, said, checks)


def two_layers(
    model: str, intact: Answers, dropped: Mapping[int, Answers], named: Sequence[int], chances: Sequence[float]
) -> Verdict:
    """Claim C3. dropped: layer -> the answers without it; named: layers of the Gather and Aggregate heads."""
    named = [layer for layer in named if layer in dropped]
    if not above_chance(intact[0], chances[0]):
        return Verdict("C3", model, "not testable", _LETTERS.format("the minimal model"), {})
    if len(named) < 2:
        which = f"lie in layer {named[0]} alone" if named else "are not there"
        why = f"The claim is about two layers, but heads with a role {which}."
        return Verdict("C3", model, "not testable", why, {})
    checks, alike = [], []
    unknown = not above_chance(intact[1], chances[1])
    for layer, answers in dropped.items():
        loss = lost(answers[0], intact[0], chances[0])
        spared, _ = _spared(f"without layer {layer}", answers, intact, chances, "")
        if layer in named:
            checks += [Check(f"letters lost without layer {layer}", loss, least=0.5, there=loss.above), *spared]
        elif loss.value > 0.5 and all(c.value.value < 0.2 for c in spared):
            alike.append(layer)
    wrong = [_UNKNOWN.format("the minimal model")] if unknown else []
    if alike:
        which = f"Layer{'s' * (len(alike) > 1)} {', '.join(map(str, alike))}"
        wrong.append(f"{which} also cost{'s' * (len(alike) == 1)} over half of the letters and spare"
                     f"{'s' * (len(alike) == 1)} knowledge.")  # fmt: skip
    return judge("C3", model, f"The heads' layers are {', '.join(map(str, named))}.", checks, " ".join(wrong))


def one_head(
    model: str,
    intact: Answers,
    masked: Mapping[str, Answers],
    random: Mapping[str, np.ndarray],
    chances: Sequence[float],
) -> Verdict:
    """Claim C4. masked: name of the head and its role -> the answers; random: the same -> letters [draws, n], each with
    one random head masked."""
    if not above_chance(intact[0], chances[0]):
        return Verdict("C4", model, "not testable", _LETTERS.format("the minimal model"), {})
    if not masked:
        return Verdict("C4", model, "not testable", "No head of the minimal model has a role.", {})
    if not all(len(random[name]) for name in masked):
        return Verdict("C4", model, "not testable", "There is no other live head to compare with.", {})
    checks, costs, wrong = [], [], [] if len(masked) == 2 else ["Only one of the two roles is held by a head."]
    for name, answers in masked.items():
        beside = random[name].astype(float).mean(0)
        loss, drawn = lost(answers[0], intact[0], chances[0]), lost(beside, intact[0], chances[0])
        more = bootstrap(lambda g: g[0].mean() - g[1].mean(), np.stack([beside, answers[0]]))
        spared, unknown = _spared(f"without {name}", answers, intact, chances, "the minimal model")
        checks += [Check(f"letters lost without {name}", loss, least=0.5, there=more.above), *spared]
        checks.append(Check(f"letters lost without a random head beside {name}", drawn, most=0.1))
        costs.append(f"masking {name} costs {100 * loss.value:.0f}%, a random head beside it {100 * drawn.value:.0f}%")
    if unknown:
        wrong.append(unknown)
    return judge("C4", model, f"Of the letters, {'; '.join(costs)}.", checks, " ".join(wrong))


def heads_suffice(model: str, intact: Answers, kept: Mapping[str, Answers], chances: Sequence[float]) -> Verdict:
    """Claim C5. kept: "both", "gather", "aggregate" -> the answers with only these kept in their layers."""
    if not above_chance(intact[0], chances[0]):
        return Verdict("C5", model, "not testable", _LETTERS.format("the minimal model"), {})
    if len(kept) < 3:
        return Verdict("C5", model, "not testable", "A role is held by no head of the minimal model.", {})
    both = share(kept["both"][0], intact[0], chances[0])
    checks = [Check("letter share, both kept", both, least=0.8, there=both.above)]
    for name in ("gather", "aggregate"):
        found = share(kept[name][0], intact[0], chances[0])
        checks.append(Check(f"letter share, only {name.capitalize()} kept", found, most=0.3))
    values = [f"{100 * c.value.value:.0f}%" for c in checks]
    said = "With both kinds kept alone in their layers letters keep {}, with Gather alone {}, with Aggregate alone {}."
    return judge("C5", model, said.format(*values), checks)


def _spared(
    where: str, changed: Answers, intact: Answers, chances: Sequence[float], called: str
) -> tuple[list[Check], str]:
    """The check that knowledge loses under a fifth; none, and why, where the model it starts from has none."""
    if not above_chance(intact[1], chances[1]):
        return [], _UNKNOWN.format(called)
    return [Check(f"knowledge lost {where}", lost(changed[1], intact[1], chances[1]), most=0.2)], ""
