"""Records what servers of a tree answer to some 300 requests, and compares two recordings.

::

    python -m tests.replay record before.jsonl --tree ../other-checkout
    python -m tests.replay record after.jsonl
    python -m tests.replay compare before.jsonl after.jsonl

It protects a change that must not be seen from outside: statuses, reason phrases, headers and their order, bodies and
the order of their members, events of streams, error texts, OpenAPI, names and labels of metrics. The servers are real:
the command line of the tree with a configuration file, spoken to over sockets.

It does not protect what only time shows (waits, timeouts as such, how pieces of a stream share a write), ids and
clocks, PostgreSQL and Redis, models of the engine (echoes and a scripted provider answer), what several servers agree
on, a database that fails, nor anything of the log lines and the command line. Numbers that rest on
floating-point sums are compared exactly, so compare recordings of one machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.replay.comparison import differences, read_records
from tests.replay.corpus import SCENARIOS
from tests.replay.recorder import record, write_records

HERE = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.replay", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="record what a tree answers")
    recording.add_argument("file", type=Path)
    recording.add_argument("--tree", type=Path, default=HERE, help="the checkout whose server answers; this one")
    comparing = commands.add_parser("compare", help="show each difference; exits 1 when there is one")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    for each in (recording, comparing):
        each.add_argument("--only", action="append", choices=[scenario.name for scenario in SCENARIOS])
    options = parser.parse_args(argv)
    chosen = [each for each in SCENARIOS if not options.only or each.name in options.only]
    if options.command == "compare":
        return _compare(options.before, options.after, {each.name for each in chosen})
    began = time.monotonic()
    records = record(options.tree.resolve(), chosen)
    write_records(options.file, records)
    print(f"{len(records)} exchanges in {time.monotonic() - began:.0f} s: {options.file}")
    return 0


def _compare(before: Path, after: Path, scenarios: set[str]) -> int:
    first, second = read_records(before, scenarios), read_records(after, scenarios)
    found = list(differences(first, second))
    print("\n".join(found))
    print(f"{len(found)} of {len(first)} exchanges differ")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
