"""Holds ``deploy/requirements.lock`` to the constraints file and to what the project says it needs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)")


def pins(text: str) -> dict[str, str]:
    found = (match for line in text.splitlines() if (match := _PIN.match(line)))
    return {canonicalize_name(match[1]): match[2] for match in found}


LOCK = (ROOT / "deploy/requirements.lock").read_text()


def test_versions_are_those_of_the_constraints() -> None:
    constrained = pins((ROOT / "constraints.txt").read_text())
    assert {name: constrained[name] for name in pins(LOCK) if name in constrained}.items() <= pins(LOCK).items()


def test_all_that_a_server_needs_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {canonicalize_name(Requirement(line).name) for line in project["dependencies"]} <= pins(LOCK).keys()


def test_each_package_has_its_hashes() -> None:
    blocks = re.split(r"\n(?=[A-Za-z0-9])", LOCK)
    assert [block.split()[0] for block in blocks if _PIN.match(block) and "--hash=sha256:" not in block] == []
