"""The configuration reference, written from the configuration classes themselves.

``python -m gateway.config.reference docs/configuration.md`` renews the tables between the page's
markers; a test fails when that would change anything.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from inspect import getdoc
from pathlib import Path
from typing import Any, get_type_hints

from backends.config import MODEL_KINDS, DeviceConfig
from gateway.config.sections import (
    AdminConfig,
    AuthConfig,
    ControlConfig,
    LearningConfig,
    LogConfig,
    MetricsConfig,
    MonitorConfig,
    RedisConfig,
    RouterConfig,
    ServerConfig,
    VerificationConfig,
)
from gateway.config.store_section import StoreConfig
from gateway.config.value_reader import expectation
from policies.policy import Policy
from policies.types import Tier

_TABLES: dict[str, tuple[type[Any], frozenset[str]]] = {
    "server": (ServerConfig, frozenset()),
    "auth": (AuthConfig, frozenset()),
    "database": (StoreConfig, frozenset()),
    "redis": (RedisConfig, frozenset()),
    "log": (LogConfig, frozenset()),
    "metrics": (MetricsConfig, frozenset()),
    "router": (RouterConfig, frozenset()),
    "admin": (AdminConfig, frozenset()),
    "verification": (VerificationConfig, frozenset()),
    "control": (ControlConfig, frozenset()),
    "monitor": (MonitorConfig, frozenset()),
    "learning": (LearningConfig, frozenset()),
    "policy": (Policy, frozenset({"name", "version"})),
    "tiers": (Tier, frozenset({"index"})),
    "devices": (DeviceConfig, frozenset()),
} | {f"models-{kind}": (cls, frozenset()) for kind, cls in MODEL_KINDS.items()}

_MARKED = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def renew(page: str) -> str:
    """The page with every marked table written anew.

    Raises
    ------
    KeyError
        The page marks a table that does not exist.
    """
    return _MARKED.sub(lambda match: match[1] + table(match[2]) + match[3], page)


def missing_tables(page: str) -> list[str]:
    """Tables the page does not have."""
    present = {match[2] for match in _MARKED.finditer(page)}
    return sorted(set(_TABLES) - present)


def table(name: str) -> str:
    """One table in Markdown: key, type, default, meaning."""
    cls, hidden = _TABLES[name]
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{path}` | {kind} | {default} | {meaning} |"
        for path, kind, default, meaning in _rows(cls)
        if path not in hidden
    ]
    return "\n".join(lines) + "\n"


def _rows(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    hints, meanings = get_type_hints(cls), described(cls)
    for each in fields(cls):
        annotation = hints[each.name]
        if hasattr(annotation, "__dataclass_fields__"):
            yield from _rows(annotation, f"{prefix}{each.name}.")
        else:
            meaning = each.metadata.get("help") or meanings.get(each.name, "")
            meaning = meaning[:1].upper() + meaning[1:].rstrip(".") + "."
            yield f"{prefix}{each.name}", _kind(each, annotation), _default(each), meaning.replace("|", "\\|")


def described(cls: type[Any]) -> dict[str, str]:
    """Meanings from the Parameters section of a NumPy docstring; ``a, b : text`` describes both."""
    section = re.search(r"Parameters\n-+\n(.*?)(?:\n\n|\Z)", getdoc(cls) or "", re.DOTALL)
    entries = re.split(r"\n(?=\S)", section[1]) if section else []
    found: dict[str, str] = {}
    for entry in entries:
        names, _, text = entry.partition(" : ")
        text = re.sub(r"\s+", " ", text.replace("``", "`")).strip()
        found |= {name.strip(): text for name in names.split(",")}
    return found


def _kind(each: Field[Any], annotation: Any) -> str:
    low, high = each.metadata.get("at_least"), each.metadata.get("at_most")
    bounds = ""
    if low is not None and high is not None:
        bounds = f", {low} to {high}"
    elif low is not None:
        bounds = f", at least {low}"
    words = expectation(annotation).replace("one of ", "").replace("'", "`")
    return words.removeprefix("a ").removeprefix("finite ") + bounds


def _default(each: Field[Any]) -> str:
    value = each.default_factory() if each.default_factory is not MISSING else each.default
    if value is MISSING:
        return "required"
    if value in (None, (), {}, ""):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else list(value) if isinstance(value, tuple) else value}`"


if __name__ == "__main__":
    for written in sys.argv[1:]:
        path = Path(written)
        path.write_text(renew(path.read_text(encoding="utf-8")), encoding="utf-8")
