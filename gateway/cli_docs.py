"""The command reference, written from the commands' own help.

``python -m gateway.cli_docs docs/cli.md`` renews the text between the page's markers; a test fails when that would
change anything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from gateway.cli import app

_WIDTH = 100
_BEGIN, _END = "<!-- help -->\n", "<!-- end -->"


def renew(page: str) -> str:
    """The page with the help between its markers written anew.

    Raises
    ------
    ValueError
        The markers are missing.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"The page must have the lines {_BEGIN.strip()} and {_END}.")
    return before + begin + "\n".join(_sections()) + end + after


def _sections() -> Iterator[str]:
    root = typer.main.get_command(app)
    for path, command in _walk(root, "suffice"):
        context = command.context_class(command, info_name=path, terminal_width=_WIDTH, max_content_width=_WIDTH)
        yield f"### `{path}`\n\n```text\n{command.get_help(context)}\n```\n"


def _walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    # Typer carries a click of its own, so the commands are known by their shape and not by click's classes.
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from _walk(each, f"{path} {name}")


if __name__ == "__main__":
    for written in sys.argv[1:]:
        target = Path(written)
        target.write_text(renew(target.read_text(encoding="utf-8")), encoding="utf-8")
