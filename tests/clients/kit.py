"""Runs clients that nobody here wrote, and keeps what they were seen to do as the table of ``docs/clients.md``.

``python -m tests.clients.kit docs/clients.md`` writes the table anew from ``matrix.json``. The tests compare with that
file what they see; with ``SUFFICE_RECORD_CLIENTS=1``, in one process, they write it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.harness import Gateway

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MATRIX = HERE / "matrix.json"
ENDPOINTS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
REQUIRED = bool(os.environ.get("CI") or os.environ.get("SUFFICE_REQUIRE_SERVICES"))
_RECORDS = bool(os.environ.get("SUFFICE_RECORD_CLIENTS"))
_TABLE = re.compile(r"(<!-- table: clients -->\n).*?(<!-- end -->)", re.DOTALL)


async def command(*words: str, cwd: Path = HERE, environ: Mapping[str, str] | None = None) -> str:
    """Run a program; its standard output, or a failure that shows its standard error."""
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=cwd,
        env=None if environ is None else dict(environ),
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 300)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, f"{out.decode()[-2000:]}\n{err.decode()[-4000:]}"
    return out.decode()


def need(program: str, present: bool, *, required: bool = REQUIRED) -> None:
    """Skip without the program; where everything is required, fail."""
    if not present:
        (pytest.fail if required else pytest.skip)(f"{program} is not installed")


async def check_report(gateway: Gateway, client: str, printed: str) -> None:
    """Check what a client says it saw against what it should have seen, the server's log and the kept table."""
    report: dict[str, Any] = json.loads(printed.splitlines()[-1])
    done: dict[str, list[str]] = {}
    for what, found in report["seen"].items():
        endpoint, _, feature = what.partition(" ")
        assert found["said"] == found["wanted"], what
        if "written" in found:
            assert found["said"] == f"Wrote {found['written']}.", what
        done.setdefault(endpoint, []).append(feature)
    await check_log(gateway, done)
    check_matrix(client, report["version"], done)


async def check_log(gateway: Gateway, done: Mapping[str, list[str]]) -> None:
    """Check that every request of a client was answered, at the endpoints it was to use, streamed where it says so."""
    rows = await gateway.rows()
    refused = [row for row in rows if row.error_code is not None]
    assert [(row.endpoint, row.error_code) for row in refused] == []
    assert {row.endpoint for row in rows} == set(done)
    for endpoint, features in done.items():
        there = [row for row in rows if row.endpoint == endpoint]
        loops = [feature for feature in features if feature.endswith(("tools", "runner"))]
        assert sum(row.finish_reason == "tool_calls" for row in there) >= 2 * len(loops)
        if any(feature.startswith("stream") for feature in features):
            assert any(row.stream for row in there)
    gateway.assert_idle()


def check_matrix(client: str, version: str, done: Mapping[str, list[str]]) -> None:
    """Compare with the kept table, or keep."""
    kept: dict[str, Any] = json.loads(MATRIX.read_text())
    seen = {"version": version, "endpoints": {endpoint: sorted(done[endpoint]) for endpoint in sorted(done)}}
    if _RECORDS:
        MATRIX.write_text(json.dumps(dict(sorted((kept | {client: seen}).items())), indent=2) + "\n")
    else:
        assert kept.get(client) == seen, (
            "run these tests with SUFFICE_RECORD_CLIENTS=1, then python -m tests.clients.kit"
        )


def table(matrix: Mapping[str, Any]) -> str:
    """Return the table as the page shows it."""
    lines = [
        "| client | " + " | ".join(f"`{each}`" for each in ENDPOINTS) + " |\n",
        "|---" * (1 + len(ENDPOINTS)) + "|\n",
    ]
    for client, seen in matrix.items():
        cells = [", ".join(seen["endpoints"].get(endpoint, ())) for endpoint in ENDPOINTS]
        lines.append(f"| {client} {seen['version']} | {' | '.join(cells)} |\n")
    return "".join(lines)


def renew(page: str) -> str:
    """Return the page with the table as it is kept."""
    shown = table(json.loads(MATRIX.read_text()))
    return _TABLE.sub(lambda match: f"{match[1]}{shown}{match[2]}", page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renew(path.read_text(encoding="utf-8")), encoding="utf-8")
