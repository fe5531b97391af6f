"""`ga tiny`: train the embedded models anew, and show what they can do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="The embedded models: train them anew, or show their scores.", no_args_is_help=True)


@app.command()
def train(
    name: Annotated[str, typer.Argument(help="tiny-llama, tiny-llamba-unaligned, tiny-llamba, tiny-zamba2, ...")],
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the lessons.")] = 0,
    out: Annotated[Path, typer.Option(help="Where models and checkpoints go.")] = Path("results/tiny"),
    n_test: Annotated[int, typer.Option(help="Fresh examples a task for the final scores.")] = 1000,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Train one model, and first what it is made from. A training that was stopped goes on where it was."""
    from ga_utils.tiny.recipes import train as make

    body = make(name, seed, out, not quiet, n_test)
    typer.echo(f"{out / f'{name}-seed{seed}'}: {body['parameters']:,} parameters, {body['cpu_seconds']} CPU seconds")
    _show(body)


@app.command()
def scores(
    name: Annotated[str, typer.Argument(help="A shipped model; all of them by default.")] = "",
) -> None:
    """The shipped models' scores on fresh examples, with standard errors, from their training records."""
    from ga_utils.tiny.shipping import record, shipped

    for one in [name] if name else shipped():
        body = record(one)
        typer.echo(f"\n{one} (seed {body['seed']}, {body['parameters']:,} parameters)")
        if looks := body.get("pruning"):
            pruned = ", ".join(head for look in looks for head in look["pruned"])
            gather = looks[0]["gather"]["kept"] or "no one head"
            typer.echo(f"  Aggregate: {looks[0]['kept']}; Gather: {gather}; pruned beside them: {pruned or 'none'}")
        _show(body)


def _show(body: dict) -> None:
    for task, s in body["scores"].items():
        typer.echo(
            f"  {task:<24} {s['accuracy']:.3f} ± {s['stderr']:.3f}   exact {s['exact']:.3f}   "
            f"chance {s['chance']:.3f}   "
            f"n {s['n']}"
        )
