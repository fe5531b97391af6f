"""What does the paper report? The numbers of ``book/reported.csv``, with their source and confidence."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from .errors import GAError
from .notebooks import find_project


@dataclass(frozen=True)
class Reported:
    """A reported number: `value` in `unit`, of one `metric`, `model`, `condition`, in figure or table `item`.

    `source` says where it was read, `confidence` (high, medium, low) how surely it is known, `note` what to
    mind.
    """

    item: str
    model: str
    condition: str
    metric: str
    value: float
    unit: str
    source: str
    confidence: str
    note: str


def reported(
    item: str | None = None,
    model: str | None = None,
    condition: str | None = None,
    metric: str | None = None,
    path: Path | None = None,
) -> list[Reported]:
    """Return the reported numbers that match all that is given, in the order of the file.

    `path` is the file to read, ``book/reported.csv`` of the project if None. Raises `GAError` if nothing
    matches: a number that is not in the file was not reported, and none may be made up.
    """
    wanted = {"item": item, "model": model, "condition": condition, "metric": metric}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    everything = _read(path or find_project() / "book" / "reported.csv")
    found = [r for r in everything if all(getattr(r, name) == value for name, value in wanted.items())]
    if not found:
        for name, value in wanted.items():
            known = list(dict.fromkeys(getattr(r, name) for r in everything))
            if value not in known:
                raise GAError(f"No number is reported for the {name} {value!r}; there are {_listed(known)}.")
        raise GAError(f"No number is reported for {_listed(f'{n} {v!r}' for n, v in wanted.items())} together.")
    return found


def reported_value(
    item: str,
    model: str | None = None,
    condition: str | None = None,
    metric: str | None = None,
    path: Path | None = None,
) -> Reported:
    """Return the one reported number that matches; `GAError` if there is none or more than one."""
    found = reported(item, model, condition, metric, path)
    if len(found) > 1:
        what = _listed(f"{r.model}, {r.condition}, {r.metric}" for r in found[:3])
        raise GAError(f"{len(found)} numbers are reported for {item!r} ({what}, ...): say which.")
    return found[0]


def _read(path: Path) -> list[Reported]:
    names = [field.name for field in fields(Reported)]
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, strict=True))
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise GAError(f"The reported numbers {path} cannot be read ({error}).") from error
    found = []
    for number, row in enumerate(rows, 2):
        if list(row) != names or None in row.values():
            raise GAError(f"Row {number} of {path} does not have the columns {', '.join(names)}.")
        try:
            value = float(row["value"])
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise GAError(f"Row {number} of {path} has the value {row['value']!r}, which is not a number.")
        found.append(Reported(**{**row, "value": value}))
    return found


def _listed(texts: Iterable[str]) -> str:
    return "; ".join(texts)
