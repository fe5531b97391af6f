"""What came of running a notebook? Read from what was written while it ran, which may be damaged."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import GAError

_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def without_colours(text: str) -> str:
    """Return `text` without the codes that colour it on a terminal."""
    return _ANSI.sub("", text)


def why_not_whole(path: Path) -> str | None:
    """Return one sentence if a cell has not run to its end, though the run itself reported no error; else None.

    A cell that calls ``sys.exit(0)`` ends a run so.
    """
    try:
        for number, cell in enumerate(_read(path)["cells"], 1):
            tags = cell["metadata"].get("tags", [])
            if cell["cell_type"] != "code" or not "".join(cell["source"]).strip() or "skip-execution" in tags:
                continue
            if cell["execution_count"] is None:
                return f"The run ended early: cell {number} and those after it were not run."
            if "raises-exception" not in tags and (errors := list(_errors(cell))):
                return f"The run ended early: cell {number} raised {errors[0][0]}."
    except _DAMAGED as error:
        return f"The executed notebook cannot be read ({error})."
    return None


def stamp(path: Path, made_from: dict[str, Any], name: str) -> None:
    """Note in the executed notebook what it was made from, and take the paths of this machine out of it."""
    content = _read(path)
    content["metadata"]["ga"] = made_from
    notes = content["metadata"].get("papermill", {})
    notes.update(input_path=f"notebooks/{name}.ipynb", output_path=f"{name}.ipynb")
    for cell in content["cells"]:  # the parameters that papermill wrote in fold away like other code
        tags = cell["metadata"].get("tags", [])
        if "injected-parameters" in tags and "hide-input" not in tags:
            cell["metadata"]["tags"] = [*tags, "hide-input"]
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def error_of(path: Path, log: str, kept: Path) -> str:
    """Return one sentence for what went wrong: the package's own errors say it themselves.

    Any other is named by its last line, or by that of the `log` if the notebook holds none, with the place
    where the rest is `kept`.
    """
    last = [line.strip() for line in log.splitlines() if line.strip()][-1:] or ["it ended without a word"]
    try:
        for cell in _read(path)["cells"]:
            for name, text in _errors(cell):
                if name in _own_errors():
                    return text
                last = [f"{name}: {text.strip().splitlines()[0]}" if text.strip() else name]
    except _DAMAGED:
        pass  # the log has said it
    return f"{last[0].rstrip('.')}. The full account is in {kept}."


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _errors(cell: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The name and the text of each error among the outputs of a cell."""
    for output in cell.get("outputs", []):
        if output["output_type"] == "error":
            yield output["ename"], without_colours(output["evalue"])


def _own_errors() -> set[str]:
    found, waiting = set(), [GAError]
    while waiting:
        kind = waiting.pop()
        found.add(kind.__name__)
        waiting += kind.__subclasses__()
    return found
