"""Pairs of answers whose truth is known, with what every grader said: what combinations are fitted and judged on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from gateway.verify.answer_pair import Grade


@dataclass(frozen=True, slots=True)
class GradedPair:
    """One pair.

    Parameters
    ----------
    source : where it comes from: ``ladder`` or a benchmark's name
    group : pairs of one prompt, or of prompts nearly alike, share it and never sit on both sides of a split
    cheap, top : who answered
    is_good : the truth: the cheap answer was worth at least as much as the top one
    grades : grader's name -> grade, only those that had an opinion
    cost_usd, compute_s : pass's name -> what it cost; a grader's name, or ``generate`` for the second answer
    """

    source: str
    group: str
    cheap: str
    top: str
    is_good: bool
    grades: Mapping[str, Grade]
    cost_usd: Mapping[str, float] = field(default_factory=dict)
    compute_s: Mapping[str, float] = field(default_factory=dict)


def write_graded(path: Path, pairs: Iterable[GradedPair]) -> None:
    """One JSON object a line."""
    with path.open("wb") as file:
        for pair in pairs:
            file.write(orjson.dumps(pair) + b"\n")


def read_graded(path: Path) -> list[GradedPair]:
    """Return what :func:`write_graded` wrote."""
    pairs = []
    for line in path.read_bytes().splitlines():
        fields = orjson.loads(line)
        grades = {name: Grade(each["score"], each["details"]) for name, each in fields.pop("grades").items()}
        pairs.append(GradedPair(grades=grades, **fields))
    return pairs
