"""Prints what the administration answers: a listing as a table, an object as its members, one a line."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.commands.result_printer import print_table

# Wide or deep members that a table has no room for; --json has them.
_LEFT_OUT = frozenset(
    {"object", "body", "card", "history", "scores", "metadata", "before", "after", "features", "load"}
)
_PIPED_WIDTH = 100
# What is looked for first, where not all has room.
_FIRST = ("id", "name", "version", "final_tier", "tier", "reason", "cost_usd", "verdict", "status", "kind", "subject")
# As wide as a line can bear; the same words with more room in them.
_HEADINGS = {"final_tier": "tier", "cost_usd": "cost $", "created_at": "created (UTC)"}
# Blanks around a column.
_GAP = 3


def show(value: Any) -> None:
    """Print an answer."""
    data = value.get("data") if isinstance(value, Mapping) else None
    if not isinstance(data, list):
        print_table(("", ""), _lines(value))
        return
    _show_listing(data)
    rest = {name: each for name, each in value.items() if name not in ("data", "object", "next", "group_by")}
    if rest:
        print_table(("", ""), _lines(rest))
    if value.get("next"):
        print(f"more with --cursor {value['next']}")


def _show_listing(data: Sequence[Mapping[str, Any]]) -> None:
    if not data:
        print("none")
        return
    names = [
        name
        for name in data[0]
        if name not in _LEFT_OUT and not any(isinstance(each.get(name), dict | list) for each in data)
    ]
    # A column in which nothing is said is not worth its width.
    names = _fitting([name for name in names if any(each.get(name) not in (None, "") for each in data)], data)
    headings = [_HEADINGS.get(name, name) for name in names]
    print_table(headings, [[_member(name, each) for name in names] for each in data])
    for each in data:
        for name, inner in each.items():
            if name == "tiers" and isinstance(inner, list):
                title = f"{names[0]} {_cell(each.get(names[0]))}"
                rows = [list(map(_cell, row.values())) for row in inner]
                print_table(list(inner[0]) if inner else [], rows, title=title)


def _fitting(names: Sequence[str], data: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns that fit beside each other: an id that is broken over two lines cannot be copied."""
    left = (shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPED_WIDTH) + _GAP
    found: list[str] = []
    for name in sorted(names, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST)):
        width = max(len(_HEADINGS.get(name, name)), *(len(_member(name, each)) for each in data)) + _GAP
        if width <= left or not found:
            found.append(name)
            left -= width
    return found


def _member(name: str, entry: Mapping[str, Any]) -> str:
    cell = _cell(entry.get(name))
    # To the second; --json has the rest.
    return cell[:19].replace("T", " ") if name.endswith("_at") else cell


def _lines(value: Any, where: str = "") -> list[tuple[str, str]]:
    if not isinstance(value, Mapping):
        return [(where, _cell(value))]
    found: list[tuple[str, str]] = []
    for name, each in value.items():
        if name == "object":
            continue
        path = f"{where}.{name}" if where else str(name)
        if isinstance(each, Mapping) and each:
            found += _lines(each, path)
        elif isinstance(each, list) and each and all(isinstance(item, Mapping) for item in each):
            for place, item in enumerate(each):
                found += _lines(item, f"{path}[{place}]")
        else:
            found.append((path, _cell(each)))
    return found


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
