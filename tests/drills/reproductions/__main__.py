"""Performs each finding's reproduction against the server of a checkout, and says whether it is still open.

::

    python -m tests.drills.reproductions                                # this checkout
    python -m tests.drills.reproductions --tree ../other --only H1 M3   # another one, two findings

The findings are those of the reviews of security (H, M, L) and of faults (S) at 25faeda, which other suites name too:
``python -m tests.house.review_table``. All is done from outside, so that any commit can be asked; the server is that of
the folder, run by this Python. The status is 1 where a finding is open, 2 where a probe did not come to its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gateway.commands.result_printer import print_table
from tests.drills.kit import ROOT
from tests.drills.reproductions import access, flooding, log, operation, protocol, upstreams
from tests.drills.reproductions.stage import REPRODUCTIONS, Cluster, Found, Reproduction, Stage

MODULES = (access, flooding, log, operation, protocol, upstreams)
_PATIENCE_S = 420.0


async def reproduce(each: Reproduction, tree: Path, folder: Path, cluster: Cluster) -> Found | None:
    """Perform one reproduction; None, with its reason on standard error, where it did not come to its end."""
    place = folder / each.finding
    place.mkdir()
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await each.act(Stage(tree, place, cluster))
    except Exception as error:
        print(f"{each.finding}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return None


async def drill(tree: Path, findings: Sequence[str]) -> dict[str, Found | None]:
    """Perform reproductions one after another."""
    found, cluster = dict[str, Found | None](), Cluster()
    with tempfile.TemporaryDirectory(prefix="suffice-drill-") as folder:
        try:
            for name in findings:
                found[name] = await reproduce(REPRODUCTIONS[name], tree, Path(folder), cluster)
                print(_line(name, found[name]), file=sys.stderr, flush=True)
        finally:
            await cluster.remove()
    return found


def verdict(found: Found | None) -> str:
    return "unknown" if found is None else "open" if found.is_open else "closed"


def _line(name: str, found: Found | None) -> str:
    return f"{name}  {verdict(found)}  {'' if found is None else found.seen}"


def order(name: str) -> tuple[int, int]:
    """H before M before L before S, each by its number."""
    return "HMLS".index(name[0]), int(re.sub(r"\D", "", name))


def commit(tree: Path) -> str:
    done = subprocess.run(["git", "-C", tree, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() or "no commit"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.drills.reproductions", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout; by default this one")
    parser.add_argument("--only", nargs="+", choices=sorted(REPRODUCTIONS, key=order), default=None)
    parser.add_argument("--list", action="store_true", help="say what is done, and do nothing")
    given = parser.parse_args()
    names = sorted(given.only or REPRODUCTIONS, key=order)
    if given.list:
        print_table(("finding", "what is done"), [(name, REPRODUCTIONS[name].deed) for name in names])
        return 0
    tree = given.tree.resolve()
    found = asyncio.run(drill(tree, names))
    print_table(
        ("finding", "what was done", "what was seen", "verdict"),
        [(name, REPRODUCTIONS[name].deed, each.seen if each else "", verdict(each)) for name, each in found.items()],
    )
    verdicts = {name: verdict(each) for name, each in found.items()}
    print(json.dumps({"drill": "reproductions", "commit": commit(tree), "verdicts": verdicts}))
    return 2 if "unknown" in verdicts.values() else 1 if "open" in verdicts.values() else 0


if __name__ == "__main__":
    sys.exit(main())
