"""`ga heads`: find the Gather and Aggregate heads of a model, and print them."""

from __future__ import annotations

from typing import Annotated

import typer

from .console import interruptible, print_table

COLUMNS = {
    "head": "HEAD",
    "role": "ROLE",
    "seeds": "SEEDS",
    "aggregate loss": "AGGREGATE",
    "aggregate se": "S.E.",
    "right": "RIGHT",
    "gather loss": "GATHER",
    "gather se": "S.E.",
    "gather mass": "OWN",
    "exact": "EXACT",
}


def heads(
    model: Annotated[str, typer.Argument(help="A name from `ga models`, a Hugging Face id, or a folder.")],
    task: Annotated[
        str, typer.Option(help="kv; on the embedded tiny models also letter or copy-letter, in their own language.")
    ] = "kv",
    pairs: Annotated[int, typer.Option(help="Key-value pairs in a prompt (task kv).")] = 10,
    examples: Annotated[int, typer.Option(help="Questions for each seed.")] = 32,
    seeds: Annotated[int, typer.Option(help="Sets of questions; a role has to hold on most of them.")] = 3,
    top: Annotated[int, typer.Option(help="Heads to print.")] = 20,
    exact_gather: Annotated[
        int, typer.Option(help="Measure the Gather role of every head exactly in models of up to so many heads.")
    ] = 128,
    layerwise: Annotated[
        bool,
        typer.Option("--layerwise", help="Estimate with a pass for each layer: better where heads are few, slower."),
    ] = False,
    store: Annotated[
        str | None,
        typer.Option(metavar="DIR", envvar="GA_STORE", help="Where records are kept.", show_default="results"),
    ] = None,
) -> None:
    """Find the Gather and Aggregate heads of MODEL.

    Masks every head alone, looks where each one looks, and gives a verdict by a stated rule, on several sets of
    questions. AGGREGATE and GATHER are the nats of the right answer's log-probability that a head's mask costs at the
    answer's positions, and everywhere else; RIGHT is how often a head's last row weighs the right segment most, OWN how
    much a segment's end takes from its own segment. All of it is recorded: a second call answers from the records, and
    so do notebooks that are given heads=discover.
    """
    from .discover import DiscoverSettings, discover
    from .errors import GAError
    from .models import load
    from .records import Store
    from .registry import resolve_models
    from .roles import RULE
    from .task_choice import Asked

    if seeds < 1 or top < 1:
        raise GAError(f"--seeds {seeds} and --top {top} must be 1 or more.")
    asked = Asked(task, pairs)
    settings = DiscoverSettings(asked, examples, range(1, seeds + 1), exact_gather=exact_gather, layerwise=layerwise)
    kept = Store(store)
    kept.check_writable()
    for name in resolve_models(model):
        lm = load(name)
        with interruptible():
            found = discover(kept, lm, settings)
        table = found.roles.table.head(top)
        print(f"\n{lm.title}: {asked.said()}, {examples} questions for each of {seeds} seeds")
        print(f"intact {found.accuracy} right, guessing {100 * found.chance:.0f}%")
        rows = [tuple(COLUMNS.values())]
        rows += [tuple(_cell(row[c]) for c in COLUMNS) for _, row in table.iterrows()]
        print_table(rows)
        for what, value in found.roles.stability.items():
            print(f"{what}: {value:.2f}")
        print(f"{len(found.records)} records in {kept.root}")
    print(f"\nThe rule. {RULE.replace('*', '')}")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return {True: "yes", False: "estimate"}.get(value, str(value)) if isinstance(value, bool) else str(value)
