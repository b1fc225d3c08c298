"""Writes the table of operations on the administration's page from their declarations.

``python -m gateway.admin.operation_table docs/admin.md`` renews it; a test fails when that would change anything.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gateway.admin.api import PREFIX, admin_operations
from gateway.admin.operation import Operation
from gateway.config.sections import AdminConfig

_BEGIN, _END = "<!-- operations -->\n", "<!-- end -->"


def table(operations: Sequence[Operation]) -> str:
    """Return every operation in Markdown."""
    lines = ["| operation | does |", "|---|---|"]
    lines += [
        f"| `{each.method} {PREFIX}{each.path}` | {each.summary.replace('|', chr(92) + '|')} |" for each in operations
    ]
    return "\n".join(lines) + "\n"


def renew(page: str, operations: Sequence[Operation]) -> str:
    """Return the page with the table between its markers written anew.

    Raises
    ------
    ValueError
        The markers are missing.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"The page must have the lines {_BEGIN.strip()} and {_END}.")
    return before + begin + table(operations) + end + after


if __name__ == "__main__":
    for written in sys.argv[1:]:
        target = Path(written)
        target.write_text(renew(target.read_text(encoding="utf-8"), admin_operations(AdminConfig())), encoding="utf-8")
