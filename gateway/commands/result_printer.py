"""Prints the results of commands: JSON for programs, plain tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any


def print_json(value: Any) -> None:
    """Print one JSON document on one line of standard output."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, default=str) + "\n")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]], *, title: str | None = None) -> None:
    """Print a table as wide as the terminal; cells are text, never markup."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    # Piped output has no terminal to fold to; a wide line is easier on grep than a broken one.
    Console(width=None if sys.stdout.isatty() else 200).print(table)
