"""Writes the command reference from the commands' own help.

``python -m gateway.cli_docs docs/cli.md`` renews the text between the page's markers; a test fails when that would
change anything.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from gateway.cli import app

_BEGIN, _END = "<!-- help -->\n", "<!-- end -->"

_Record = tuple[str, str]
"""A parameter as it is written, and its help; of an option without a value, ``("--json", "Print JSON …")``."""


def renew(page: str) -> str:
    """Return the page with the help between its markers written anew.

    Raises
    ------
    ValueError
        The markers are missing.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"The page must have the lines {_BEGIN.strip()} and {_END}.")
    return before + begin + "".join(_sections(typer.main.get_command(app), "suffice")) + end + after


def _sections(group: Any, path: str) -> Iterator[str]:
    """Yield a group's section: the options its commands share, then one entry a command; then the groups in it."""
    # Typer carries a click of its own, so the commands are known by their shape and not by click's classes.
    commands = {name: each for name, each in group.commands.items() if not hasattr(each, "commands")}
    records = {name: _records(each) for name, each in commands.items()}
    shared = _shared(records)
    everywhere = [each for each in shared if all(each in of for of in records.values())]
    yield f"### `{path}`\n\n{_one_line(group.help)}\n"
    yield from _list("Options:", _records(group))
    yield from _list("Every command takes:", everywhere)
    yield from _list("Several commands take:", [each for each in shared if each not in everywhere])
    yield "\nCommands:\n\n"
    for name, command in commands.items():
        yield from _entry(name, _one_line(command.help), records[name], shared, everywhere)
    yield "\n"
    for name, each in group.commands.items():
        if name not in commands:
            yield from _sections(each, f"{path} {name}")


def _list(heading: str, records: Collection[_Record]) -> Iterator[str]:
    if records:
        yield f"\n{heading}\n\n" + "".join(f"- `{written}`: {text}\n" for written, text in records)


def _entry(
    name: str,
    help_text: str,
    records: Collection[_Record],
    shared: Collection[_Record],
    everywhere: Collection[_Record],
) -> Iterator[str]:
    words = [name]
    for written, text in records:
        if not written.startswith("-"):
            words.append(written.split()[0])
        elif (written, text) in shared and (written, text) not in everywhere:
            words.append(f"[{_flag(written)}]")
    yield f"- `{' '.join(words)}`: {help_text}\n"
    for written, text in records:
        # An argument of which only its being needed is known stands in the line above.
        if (written, text) not in shared and text != "[required]":
            yield f"  - `{written}`: {text}\n"


def _records(command: Any) -> list[_Record]:
    context = command.context_class(command, info_name=command.name)
    found = [each.get_help_record(context) for each in command.params]
    return [(written, _one_line(text)) for written, text in found]


def _shared(records: Mapping[str, Collection[_Record]]) -> list[_Record]:
    """Return the options that several commands have in the same words; of one name only the most frequent."""
    counts = Counter(record for each in records.values() for record in each if record[0].startswith("-"))
    shared: dict[str, _Record] = {}
    for record, count in counts.most_common():
        if count > 1:
            shared.setdefault(_flag(record[0]), record)
    return list(shared.values())


def _flag(written: str) -> str:
    """Return an option's long name, without its value."""
    return next(each for each in written.replace(",", "").split() if each.startswith("--"))


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    for written in sys.argv[1:]:
        target = Path(written)
        target.write_text(renew(target.read_text(encoding="utf-8")), encoding="utf-8")
