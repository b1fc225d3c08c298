"""Says what differs between two recordings."""

from __future__ import annotations

import difflib
import json
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

Exchanges = dict[tuple[str, str], dict[str, Any]]


def read_records(path: Path, scenarios: Container[str]) -> Exchanges:
    """Return what a recording has of some scenarios, by scenario and name."""
    records = map(json.loads, path.read_text().split("\n")[:-1])
    return {(each["scenario"], each["name"]): each for each in records if each["scenario"] in scenarios}


def differences(before: Exchanges, after: Exchanges) -> Iterator[str]:
    """Yield a text for each exchange that is not the same on both sides."""
    for key in [*before, *(key for key in after if key not in before)]:
        name = " / ".join(key)
        if key not in after:
            yield f"{name}: only in the first recording"
        elif key not in before:
            yield f"{name}: only in the second recording"
        elif before[key] != after[key] or _lines(before[key]) != _lines(after[key]):
            changed = difflib.unified_diff(_lines(before[key]), _lines(after[key]), lineterm="", n=1)
            yield "\n".join([name, *(f"    {line}" for line in list(changed)[2:])])


def _lines(record: dict[str, Any]) -> list[str]:
    """Return a record as text, a member a line; the order of members counts."""
    return json.dumps(record, indent=1, ensure_ascii=False).splitlines()
