"""Describes the machine that a figure was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("starlette", "uvicorn", "httpx", "sqlalchemy", "aiosqlite", "asyncpg", "torch")


def card() -> dict[str, Any]:
    """Machine, versions and commit, as one flat JSON object."""
    return {
        "machine": platform.machine(),
        "cpu": _cpu(),
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "commit": _commit(),
        **{name: _version(name) for name in _PACKAGES},
    }


def print_card(title: str, facts: dict[str, Any]) -> None:
    """The heading of a bench: its title, then one fact a line."""
    print(title)
    for name, value in facts.items():
        print(f"  {name:<12} {value}")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
