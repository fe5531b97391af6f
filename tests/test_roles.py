"""Roles are given by the stated rule: effect beyond a random head's and the right pattern, on pooled seeds."""

import numpy as np
import pytest

from ga_utils import roles
from ga_utils.errors import TaskError
from ga_utils.heads import Head

N, HEADS = 40, tuple(Head(layer, i) for layer in range(5) for i in range(4))


def evidence(seed=1, aggregate=None, gather=None, right=(), own=(), exact=None):
    """Evidence in which every head costs noise alone, but for those given: {number of head: nats}."""
    rng = np.random.default_rng(seed)
    found = {}
    for role, costs in (("aggregate", aggregate or {}), ("gather", gather or {})):
        loss = rng.normal(0.0, 0.01, (len(HEADS), N))
        for head, nats in costs.items():
            loss[head] += nats
        found[role] = loss
    rate, mass = np.full(len(HEADS), 0.1), np.full(len(HEADS), 0.1)
    rate[list(right)], mass[list(own)] = 0.9, 0.9
    exact = np.ones(len(HEADS), bool) if exact is None else exact
    return roles.Evidence(
        seed, HEADS, found["aggregate"], found["gather"], exact, exact, rate, 0.1, np.full(len(HEADS), 0.3), mass
    )


def role_of(found, head):
    return found.table.set_index("head").role[str(HEADS[head])]


def test_effect_and_pattern_together_make_the_role():
    one = evidence(aggregate={7: 0.5, 9: 0.5}, gather={2: 0.4, 3: 0.4}, right=[7, 8], own=[2, 1])
    found = roles.verdicts("m", [one])
    assert role_of(found, 7) == "Aggregate" and role_of(found, 2) == "Gather"
    assert role_of(found, 9) == role_of(found, 3) == "matters otherwise"  # effect without the pattern
    assert role_of(found, 8) == role_of(found, 1) == ""  # pattern without effect
    assert found.heads("aggregate") == ["L1H3"] and found.heads("gather") == ["L0H2"]
    assert set(found.table["head"][:2]) == {"L1H3", "L2H1"}  # strongest first


def test_a_head_can_hold_both_roles():
    found = roles.verdicts("m", [evidence(aggregate={7: 0.5}, gather={7: 0.5}, right=[7], own=[7])])
    assert role_of(found, 7) == "Gather and Aggregate"
    assert found.heads("aggregate") == found.heads("gather") == ["L1H3"]


def test_what_every_head_costs_makes_none_special():
    """A loss that all heads share is a random head's loss too."""
    same = {h: 0.5 for h in range(len(HEADS))}
    found = roles.verdicts("m", [evidence(aggregate=same, right=range(len(HEADS)))])
    assert (found.table.role == "").all()
    with pytest.raises(TaskError, match="no head of m is an Aggregate head"):
        found.heads("aggregate")


def test_noise_alone_names_no_head_in_twenty_draws():
    named = sum(
        (roles.verdicts("m", [evidence(s, right=range(20), own=range(20))]).table.role != "").any() for s in range(20)
    )
    assert named <= 3  # two tests at 5% each: 20 draws give two on average, more than five once in a hundred


def test_estimates_get_no_role():
    exact = np.ones(len(HEADS), bool)
    exact[7] = False
    found = roles.verdicts("m", [evidence(aggregate={7: 0.5}, right=[7], exact=exact)])
    assert role_of(found, 7) == ""


def test_seeds_are_pooled_and_counted():
    """One head costs on two seeds of three: its role rests on all questions, the count says on how many seeds."""
    seeds = [evidence(s, aggregate={7: 0.5} if s < 3 else {}, right=[7]) for s in (1, 2, 3)]
    found = roles.verdicts("m", seeds)
    row = found.table.set_index("head").loc["L1H3"]
    assert row.role == "Aggregate" and row.seeds == "2 of 3"
    assert row["aggregate loss"] == pytest.approx(np.concatenate([e.aggregate[7] for e in seeds]).mean())
    assert set(found.tables) == {1, 2, 3}
    assert found.stability["aggregate: top 5 in common"] >= 1 / 15  # seeds 1 and 2 share that head at least


def test_a_model_at_chance_is_refused_in_a_sentence():
    correct = np.arange(40) % 4 == 0
    with pytest.raises(roles.AtChance, match=r"m gets 25% of 40 questions of kv right, guessing 25%"):
        roles.check_testable(correct, 0.25, "m", "kv")
    roles.check_testable(np.arange(40) % 2 == 0, 0.25, "m", "kv")
    with pytest.raises(TaskError, match="10 or more"):
        roles.check_testable(np.ones(5, bool), 0.25, "m", "kv")


def test_unknown_roles_are_refused():
    found = roles.verdicts("m", [evidence()])
    with pytest.raises(TaskError, match="use 'aggregate' or 'gather'"):
        found.heads("retrieval")
