"""What do all commands of `ga` share? Tables of plain text, and an orderly end when they are stopped."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import typer


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """End with status 130 and a sentence when the command is interrupted inside the block."""
    try:
        yield
    except KeyboardInterrupt:
        print(
            "ga: stopped; finished records are kept, and the same command goes on from there.",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows of texts in columns, the first row being the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
