"""Puts small faults into the code, one at a time, and counts those that no test notices.

    python -m tests.mutants --count 200 --seed 1                  # the rooms of money and safety
    python -m tests.mutants --paths policies engine/blocks.py     # these
    python -m tests.mutants --json mutants.jsonl                  # one line per mutant besides

It needs the tests' services. Runs of one seed draw the same mutants, but for those of lines that were changed. One
that changes nothing anybody could see is listed with its reason in ``equivalent.toml`` and is not drawn.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutations import Mutation, find_mutations
from tests.mutants.rooms import DEFAULT_PATHS, mutated_files, sets_of_tests
from tests.mutants.trial import BaselineFailed, Trials, Verdict, copied_tree

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A change of a line that shows nowhere, and why."""

    path: str
    before: str
    after: str
    reason: str


def read_equivalents(file: Path = EQUIVALENT) -> list[Equivalent]:
    return [Equivalent(**entry) for entry in tomllib.loads(file.read_text()).get("mutant", [])]


def draw(root: Path, paths: tuple[str, ...], count: int, seed: int) -> list[Mutation]:
    """Draw mutants evenly from all of some files, without the equivalent ones, in order of file and line.

    Each has a place of its own in the draw, by a hash: a change elsewhere draws no others.
    """
    known = {(one.path, one.before, one.after) for one in read_equivalents()}
    found: list[tuple[bytes, Mutation]] = []
    for path in mutated_files(root, paths):
        source = (root / path).read_text()
        seen: Counter[tuple[str, str, str]] = Counter()
        for one in find_mutations(path, source):
            change = (path, *one.lines(source))
            seen[change] += 1
            if change not in known:
                found.append((hashlib.sha256(f"{seed}\0{change}\0{seen[change]}".encode()).digest(), one))
    drawn = [one for _, one in sorted(found, key=lambda each: each[0])[:count]]
    return sorted(drawn, key=lambda one: (one.path, one.start))


def report(verdict: Verdict, place: str, json_file: Path | None) -> None:
    """Print one verdict; a survivor with its line before and after."""
    mutation = verdict.mutation
    before, after = mutation.lines((ROOT / mutation.path).read_text())
    print(f"{place} {mutation.path}:{mutation.line} {mutation.kind}: {verdict.killed_by or 'SURVIVED'}", flush=True)
    if not verdict.killed_by:
        print(f"  - {before}\n  + {after}", flush=True)
    if json_file is not None:
        row = {"path": mutation.path, "line": mutation.line, "kind": mutation.kind, "before": before, "after": after}
        row |= {"killed_by": verdict.killed_by, "seconds": round(verdict.seconds, 1)}
        with json_file.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--paths", nargs="+", default=list(DEFAULT_PATHS), metavar="PATH")
    parser.add_argument("--depth", type=int, default=3, help="sets of tests to ask: 1 the mirror, 4 all that import it")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    mutations = draw(ROOT, tuple(options.paths), options.count, options.seed)
    num_killed = 0
    with copied_tree(ROOT) as copy:
        trials = Trials(copy)
        for number, mutation in enumerate(mutations, 1):
            try:
                verdict = trials.judge(mutation, sets_of_tests(ROOT, mutation.path)[: options.depth])
            except BaselineFailed as problem:
                print(problem, file=sys.stderr)
                return 2
            num_killed += bool(verdict.killed_by)
            report(verdict, f"{number}/{len(mutations)}", options.json)
    share = num_killed / max(1, len(mutations))
    print(f"{num_killed} of {len(mutations)} killed ({share:.1%}), {len(mutations) - num_killed} survived")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
