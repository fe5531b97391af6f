"""The scoreboard lists what pages concluded, with today's code, and calls everything else not run."""

import re

import pytest

from ga_utils import scoreboard
from ga_utils.claims import Verdict
from ga_utils.errors import GAError
from ga_utils.notebooks import find_project
from ga_utils.records import Store
from ga_utils.stats import Interval


def verdict(claim="C10", model="m", word="reproduced", value=0.3):
    return Verdict(claim, model, word, f"Because of {value}.", {"share": Interval(value, value - 0.1, value + 0.1)})


def record(store, name):
    return store.compute({"kind": "test", "name": name}, lambda: {"x": 1})


def test_claims_without_a_verdict_are_not_run(tmp_path):
    found = scoreboard.collect(Store(tmp_path))
    assert list(found.claim) == [f"C{i}" for i in range(1, 16)] and set(found.verdict) == {"not run"}


def test_a_verdict_is_listed_under_its_claim_and_model(tmp_path):
    store = Store(tmp_path)
    scoreboard.keep(store, "page", [verdict(), verdict(model="n", word="not")], [record(store, "a")])
    found = scoreboard.collect(store)
    here = found[found.claim == "C10"].set_index("model")
    assert here.verdict.to_dict() == {"m": "reproduced", "n": "not"} and here.because["m"] == "Because of 0.3."
    row = scoreboard.summary(found).set_index("claim").loc["C10"]
    assert row["verdicts here"] == "reproduced: m; not: n"


def test_the_page_that_ran_last_is_believed(tmp_path):
    """Also when it ran with settings that had been tried before: its verdict is found, not made."""
    store = Store(tmp_path)
    one, other = [record(store, "a")], [record(store, "b")]
    for word, records in (("not", one), ("partly", other), ("not", one)):
        scoreboard.keep(store, "page", [verdict(word=word)], records)
    found = scoreboard.collect(store)
    assert list(found[found.claim == "C10"].verdict) == ["not"]


def test_verdicts_of_other_code_do_not_count(tmp_path, monkeypatch):
    store = Store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(scoreboard, "folder_hash", lambda folder: "yesterday")
        scoreboard.keep(store, "page", [verdict()], [record(store, "a")])
        assert "reproduced" in set(scoreboard.collect(store).verdict)
    assert set(scoreboard.collect(store).verdict) == {"not run"}


def test_unknown_claims_are_refused(tmp_path):
    with pytest.raises(GAError, match="There is no claim 'C99'"):
        scoreboard.keep(Store(tmp_path), "page", [verdict("C99")], [])


def test_every_item_names_a_notebook_that_exists_or_none():
    notebooks = {p.stem for p in (find_project() / "notebooks").glob("*.ipynb")}
    assert {page for _, page in scoreboard.ITEMS if page} <= notebooks


def test_the_papers_numbers_are_quoted_from_the_file():
    for claim in scoreboard.CLAIMS:
        text = scoreboard.numbers(claim)
        assert bool(text) == bool(claim.item) and (
            not text or re.search(r"\d .*\((high|medium|low) confidence\)", text)
        )
