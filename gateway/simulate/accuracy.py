"""Holds how often each tier of the built-in ladder is right, by family and grade: the truth of simulated traffic.

``accuracy.json`` is written from what :mod:`backends.builtin.evaluate` measured::

    python -m backends.builtin.evaluate --tasks 6500 --seed 5 --uniform --families --json measured.json
    python -m gateway.simulate.accuracy measured.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

PATH = Path(__file__).parent / "accuracy.json"
_GRADES = (1, 2, 3, 4, 5)
# A cell of some hundred tasks that were all right does not show that the next one will be.
_PSEUDO = 1.0


@dataclass(frozen=True, slots=True)
class Accuracy:
    """``right[tier - 1][family][grade - 1]`` is a probability."""

    right: tuple[Mapping[str, tuple[float, ...]], ...]

    @classmethod
    def load(cls, path: Path = PATH) -> Self:
        """Read what :func:`main` wrote."""
        tiers = json.loads(path.read_text())["tiers"]
        return cls(tuple({family: tuple(cells) for family, cells in tier.items()} for tier in tiers))

    @property
    def num_tiers(self) -> int:
        return len(self.right)

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(sorted(self.right[0]))

    def of(self, family: str, grade: int) -> tuple[float, ...]:
        """P(right) of each tier, the cheapest first."""
        return tuple(tier[family][grade - 1] for tier in self.right)


def from_measured(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the file's content, from reports of one run or of several that share tasks and seed.

    Raises
    ------
    ValueError
        The reports are of different tasks.
    """
    described = [{name: report[name] for name in ("tasks", "seed", "mix")} for report in reports]
    if any(each != described[0] for each in described):
        raise ValueError("The reports are of different tasks; measure every tier on the same ones.")
    cells = [run["accuracy"] for report in reports for run in report["runs"].values()]
    return {"measured": described[0], "tiers": [_smoothed(each) for each in cells]}


def _smoothed(cells: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    families = sorted({name[:-2] for name in cells if name[-1].isdecimal() and not name.startswith("grade")})
    found = {}
    for family in families:
        rows = [cells[f"{family} {grade}"] for grade in _GRADES]
        found[family] = [round((share * n + _PSEUDO / 2) / (n + _PSEUDO), 4) for share, n in rows]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gateway.simulate.accuracy", description=__doc__)
    parser.add_argument("reports", type=Path, nargs="+", help="files of backends.builtin.evaluate, cheapest tier first")
    parser.add_argument("--out", type=Path, default=PATH)
    arguments = parser.parse_args()
    content = from_measured([json.loads(path.read_text()) for path in arguments.reports])
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
