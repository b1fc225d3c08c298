"""Prints how the house stands: what lies in the lobby, who imports whom in circles, how much there is to read.

::

    python -m tests.house                   # a table
    python -m tests.house --verbose         # and the names behind the figures
    python -m tests.house --json            # one line, for a table of before and after
    python -m tests.house --tree ../other   # of another checkout
    python -m tests.house.request_path      # files and moves of one chat request

Definitions stand with each measure in :mod:`tests.house.measures`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.house.measures import ROOMS, House

HERE = Path(__file__).parents[2]


def figures(house: House) -> dict[str, float]:
    """Return every measure by its name."""
    return {
        "modules directly in gateway": len(house.lobby()),
        "groups of gateway in import circles": sum(map(len, house.circles())),
        "the same without the command line": sum(map(len, house.circles(without=("commands",)))),
        "class names in more than one file": len(house.shared_class_names()),
        "lines outside engine": house.num_lines_outside_engine(),
        "words of the docs": house.num_words(),
        "tests : code, backends": round(house.tests_to_code("backends"), 2),
        "tests : code, classifier": round(house.tests_to_code("classifier"), 2),
        "comments per 100 lines of code": round(house.comments_per_100(*ROOMS), 1),
    }


def details(house: House) -> list[str]:
    """Return the names behind the figures."""
    lines = ["", f"directly in gateway: {', '.join(house.lobby())}", ""]
    lines += [f"a circle of {len(circle)}: {', '.join(circle)}" for circle in house.circles()]
    lines += ["", *(f"{name}: {', '.join(paths)}" for name, paths in house.shared_class_names().items())]
    lines += ["", *(f"comments per 100 lines of {room}: {house.comments_per_100(room):.1f}" for room in ROOMS)]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__.partition("\n")[0])
    parser.add_argument("--tree", type=Path, default=HERE, help="the checkout to measure; this one")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--verbose", action="store_true", help="the names behind the figures")
    options = parser.parse_args(argv)
    house = House(options.tree.resolve())
    found = figures(house)
    if options.json:
        print(json.dumps(found))
        return 0
    width = max(map(len, found))
    print("\n".join(f"{name:<{width}}  {value:>8,}" for name, value in found.items()))
    if options.verbose:
        print("\n".join(details(house)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
