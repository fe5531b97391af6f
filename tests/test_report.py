"""Are reported numbers read exactly, and is none made up?"""

from pathlib import Path

import pytest

from ga_utils.errors import GAError
from ga_utils.report import reported, reported_value

FILE = Path(__file__).parent.parent / "book" / "reported.csv"
HEADER = "item,model,condition,metric,value,unit,source,confidence,note\n"


def test_the_papers_numbers():
    minimal = reported("table1", condition="minimal model (layers 0-17)", path=FILE)
    assert [(r.model, r.metric, r.value, r.unit) for r in minimal] == [
        ("meta-llama/Llama-3.1-8B-Instruct", "mmlu", 66.32, "% accuracy")
    ]
    assert reported_value("hybrid_delegation", condition="intact", path=FILE).value == 64.3
    masked = reported_value("hybrid_delegation", condition="aggregate attention masked", metric="mmlu", path=FILE)
    assert (masked.value, masked.confidence) == (34.9, "high") and "three different masks" in masked.note


def test_every_row_of_the_file_can_be_shown():
    rows = reported(path=FILE)
    assert len(rows) == len(FILE.read_text(encoding="utf-8").splitlines()) - 1
    assert {r.confidence for r in rows} <= {"high", "medium", "low"} and all(r.source for r in rows)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"item": "fig9"}, "for the item 'fig9'; there are table1; fig2"),
        ({"item": "table1", "metric": "knowledge"}, "item 'table1'; metric 'knowledge' together"),
        ({"model": "gpt2"}, "for the model 'gpt2'"),
    ],
)
def test_what_was_not_reported_is_an_error(given, words):
    with pytest.raises(GAError) as error:
        reported(**given, path=FILE)
    assert words in str(error.value)


def test_one_number_is_one():
    with pytest.raises(GAError, match="3 numbers are reported for 'table1'"):
        reported_value("table1", path=FILE)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("a,b,c,d,about 25,%,s,high,\n", "Row 2 .* 'about 25', which is not a number"),
        ("a,b,c,d,nan,%,s,high,\n", "not a number"),
        ("a,b,c,d,25,%\n", "Row 2 .* does not have the columns item, model"),
        ("a,b,c,d,25,%,s,high,note, with a comma\n", "does not have the columns"),
    ],
)
def test_a_broken_file_is_an_error(tmp_path, row, words):
    path = tmp_path / "reported.csv"
    path.write_text(HEADER + row)
    with pytest.raises(GAError, match=words):
        reported("a", path=path)
    with pytest.raises(GAError, match="cannot be read"):
        reported("a", path=tmp_path / "none.csv")


def test_the_file_is_found_from_inside_the_project(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "book").mkdir()
    (tmp_path / "_config.yml").write_text("title: x\n")
    (tmp_path / "book" / "reported.csv").write_text(HEADER + "a,b,c,d,25,%,s,high,\n")
    monkeypatch.chdir(tmp_path / "notebooks")
    assert reported_value("a").value == 25.0
