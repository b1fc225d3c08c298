"""Writes the configuration reference from the configuration classes themselves.

``python -m gateway.config.reference docs/configuration.md`` renews the lists between the page's
markers; a test fails when that would change anything.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, is_dataclass
from decimal import Decimal
from inspect import getdoc
from pathlib import Path
from typing import Any

from backends.config import MODEL_KINDS, DeviceConfig
from gateway.config.sections import EmbeddingConfig
from gateway.config.settings import SECTIONS
from gateway.config.table_reader import declared_fields, join
from gateway.config.value_reader import expectation
from policies.policy import Policy
from policies.types import Tier

DECLARED: Mapping[str, type[Any]] = {
    **SECTIONS,
    "policy": Policy,
    "tiers": Tier,
    "devices": DeviceConfig,
    "embeddings": EmbeddingConfig,
    **{f"models-{kind}": cls for kind, cls in MODEL_KINDS.items()},
}

# Fields that are not written: a policy's name is its table's and its version a digest, a tier's number is its place.
_GIVEN = {Policy: ("name", "version"), Tier: ("index",)}

_MARKED = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def renew(page: str) -> str:
    """Return the page with every marked list written anew.

    Raises
    ------
    KeyError
        The page marks a section that does not exist.
    """
    return _MARKED.sub(lambda match: match[1] + "".join(keys(match[2])) + match[3], page)


def missing_sections(page: str) -> list[str]:
    """Return the sections the page does not have."""
    return sorted(DECLARED.keys() - {match[2] for match in _MARKED.finditer(page)})


def keys(section: str) -> Iterator[str]:
    """Yield one line of Markdown a key: default, type where the default does not show it, limits, meaning."""
    cls = DECLARED[section]
    for path, field, annotation, meaning in _fields(cls):
        if path not in _GIVEN.get(cls, ()):
            yield f"- `{path}` ({_facts(field, annotation)}): {meaning[:1].upper()}{meaning[1:].rstrip('.')}.\n"


def described(cls: type[Any]) -> dict[str, str]:
    """Return meanings from the Parameters section of a NumPy docstring; ``a, b : text`` describes both."""
    section = re.search(r"Parameters\n-+\n(.*?)(?:\n\n|\Z)", getdoc(cls) or "", re.DOTALL)
    entries = re.split(r"\n(?=\S)", section[1]) if section else []
    found: dict[str, str] = {}
    for entry in entries:
        names, _, text = entry.partition(" : ")
        text = re.sub(r"\s+", " ", text.replace("``", "`")).strip()
        found |= {name.strip(): text for name in names.split(",")}
    return found


def _fields(cls: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any, str]]:
    meanings = described(cls)
    for name, (field, annotation) in declared_fields(cls).items():
        if isinstance(annotation, type) and is_dataclass(annotation):
            yield from _fields(annotation, join(prefix, name))
        else:
            yield join(prefix, name), field, annotation, field.metadata.get("help") or meanings.get(name, "")


def _facts(field: Field[Any], annotation: Any) -> str:
    """Return default, type and limits; no type where the default shows it."""
    default, words = _default(field), expectation(annotation).replace("'", "`").removeprefix("a ")
    low, high = field.metadata.get("at_least"), field.metadata.get("at_most")
    limits = "" if low is None else f"≥ {low}" if high is None else f"{low}–{high}"
    if words.startswith("one of "):
        others = [each for each in words.removeprefix("one of ").split(", ") if each != default]
        return f"{default}; or {', '.join(others)}"
    is_shown = default not in ("", "required") and "one of" not in words and annotation is not Decimal
    return ", ".join(each for each in (default, "" if is_shown else words.replace("finite ", ""), limits) if each)


def _default(field: Field[Any]) -> str:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if value is MISSING:
        return "required"
    if value in (None, (), {}, ""):
        return ""
    plain = list(value) if isinstance(value, tuple) else str(value).lower() if isinstance(value, bool) else value
    return f"`{plain}`"


if __name__ == "__main__":
    for written in sys.argv[1:]:
        path = Path(written)
        path.write_text(renew(path.read_text(encoding="utf-8")), encoding="utf-8")
