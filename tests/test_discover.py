"""`discover` finds the heads of a model in which they are known, none where there are none, and says what it did.

Known: in tiny-llama every Gather and every Aggregate head but one was pruned in training, so one of each is the only
path; its training record names them.
"""

import copy

import pytest
import torch
from typer.testing import CliRunner

from ga_utils import cli, discover, roles
from ga_utils.attribution import attribute
from ga_utils.discover import DiscoverSettings
from ga_utils.errors import GAError
from ga_utils.models import load, wrap
from ga_utils.records import Store
from ga_utils.task_choice import Asked
from ga_utils.tiny import shipping

LETTERS = DiscoverSettings(Asked("letter"), 16, (1, 2))


@pytest.fixture(scope="module")
def lm():
    return load("tiny-llama", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def planted():
    pruning = shipping.record("tiny-llama")["pruning"][0]
    return pruning["kept"], pruning["gather"]["kept"]


def test_the_only_path_is_found_first(lm, store, planted):
    found = discover.discover(store, lm, LETTERS, progress=False)
    aggregate, gather = planted
    assert found.roles.heads("aggregate")[0] == aggregate and found.roles.heads("gather")[0] == gather
    table = found.roles.table
    assert set(table["head"][:2]) == {aggregate, gather} and table.exact.all()
    assert found.chance == 0.25 and found.intact.mean() > 0.9 and len(found.records) >= 8


def test_what_was_measured_is_found_again(lm, store, monkeypatch):
    discover.discover(store, lm, LETTERS, progress=False)
    monkeypatch.setattr(lm.model, "forward", lambda *a, **k: pytest.fail("the model ran again"))
    discover.discover(store, lm, LETTERS, progress=False)


def test_estimates_lead_to_the_same_heads(lm, store, planted):
    """With too many heads to mask each alone, the strongest estimates are measured, and only those get a role."""
    few = DiscoverSettings(Asked("letter"), 16, (1, 2), exact_aggregate=4, exact_gather=4, top=6, layerwise=True)
    table = discover.discover(store, lm, few, progress=False).roles.table.set_index("head")
    aggregate, gather = planted
    assert "Aggregate" in table.role[aggregate] and "Gather" in table.role[gather]
    assert table.exact.sum() < len(table)
    exact = discover.discover(store, lm, LETTERS, progress=False).roles.table.set_index("head")
    for column in ("aggregate loss", "gather loss"):
        assert table[column][gather] == pytest.approx(exact[column][gather], abs=1e-4)
    assert table["aggregate loss"][aggregate] == pytest.approx(exact["aggregate loss"][aggregate], abs=1e-4)


def test_an_effect_and_an_estimate_are_never_subtracted(lm, store):
    """What a mask costs elsewhere is a difference of two effects, or of two estimates, of the same head."""
    some = DiscoverSettings(Asked("letter"), 16, (1,), exact_gather=4, top=3)
    table = discover.discover(store, lm, some, progress=False).roles.table.set_index("head")
    task = Asked("letter").task(lm, 16, 1)
    everywhere, answer = (attribute(lm, task, positions=p).effect.mean(1) for p in ("all", "answer"))
    estimates = dict(zip(map(str, lm.head_list()), everywhere - answer, strict=True))
    assert table.exact.sum() == 3
    for head in table.index[~table.exact]:
        assert table["gather loss"][head] == pytest.approx(estimates[head], abs=1e-4)


def test_a_model_without_retrieval_yields_no_heads(lm, tmp_path):
    model = copy.deepcopy(lm.model)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.normal_(0, p.shape[1] ** -0.5)
    blank = wrap(model, lm.tokenizer, name="blank")
    with pytest.raises(roles.AtChance, match="blank gets .* no head can be found"):
        discover.discover(Store(tmp_path), blank, LETTERS, progress=False)


@pytest.mark.parametrize(
    "settings, message",
    [
        (DiscoverSettings(Asked("letter"), 5), "n_examples=5 is too few"),
        (DiscoverSettings(Asked("letter"), 16, ()), "seeds=.* one or more"),
        (DiscoverSettings(Asked("letter"), 16, (1, 1)), "seeds=.* different"),
        (DiscoverSettings(Asked("letter"), 16, (1,), top=0), "top=0 must be 1 or more"),
        (DiscoverSettings(Asked("spelling"), 16), "task='spelling' is unknown: use one of kv, letter"),
        (DiscoverSettings(Asked("kv", 17), 16), "n_pairs=17 must lie between 1 and 16"),
    ],
)
def test_bad_settings_are_refused_before_any_forward(lm, tmp_path, monkeypatch, settings, message):
    monkeypatch.setattr(lm.model, "forward", lambda *a, **k: pytest.fail("the model ran"))
    with pytest.raises(GAError, match=message):
        discover.discover(Store(tmp_path), lm, settings, progress=False)


def test_each_language_has_its_own_questions():
    import zoo

    with pytest.raises(GAError, match="asked of the embedded tiny models alone"):
        Asked("copy-letter").task(zoo.lm("llama"), 10, 0)
    with pytest.raises(GAError, match="is in English, which tiny-llama does not speak"):
        Asked("world-letter").task(load("tiny-llama"), 10, 0)


def test_results_are_not_reported_on_the_seeds_that_found_the_heads():
    with pytest.raises(GAError, match=r"seed=2 is among the seeds \[1, 2, 3\]"):
        discover.check_seed(2)
    discover.check_seed(0)


def test_the_command_prints_the_heads(store, planted):
    options = "--task letter --examples 16 --seeds 2 --top 5".split()
    done = CliRunner().invoke(cli.app, ["heads", "tiny-llama", *options, "--store", str(store.root)])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    rows = [line for line in lines if line.startswith("L")]
    assert len(rows) == 5 and {row.split()[0] for row in rows[:2]} == set(planted)
    assert any("guessing 25%" in line for line in lines) and "The rule. A head matters" in done.output


def test_the_command_refuses_what_cannot_be_had(monkeypatch, tmp_path):
    done = CliRunner().invoke(cli.app, ["heads", "tiny-llama", "--seeds", "0", "--store", str(tmp_path)])
    assert done.exit_code != 0 and "must be 1 or more" in str(done.exception)
