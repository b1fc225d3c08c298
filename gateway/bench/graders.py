"""Measures each grader: how well it tells good answers from bad, how often it errs, what a verdict costs.

``python -m gateway.bench.graders --tasks 600 --data DIR --out gateway/bench/results/graders.json``

On the built-in ladder every task of the judging half is answered by every tier, and every lower answer is graded
against the top one's; the truth is the tasks' own checker. On recorded responses of other models, the text graders and
the portable combination are judged by the recorded scores. Combinations were fitted on the other half of the tasks; the
recorded benchmarks named in :data:`gateway.verify.graded_corpus.TRAINABLE` they have seen, which is said beside them.

Costs are device seconds and dollars of the passes a verdict needs, at background priority; they include what else the
machine did only as far as it slowed a step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classifier.metrics import bootstrap_interval, brier, calibration_error, roc_auc
from gateway.bench.machine_card import card, print_card
from gateway.outcomes.task_split import HOLDOUT_SPLIT
from gateway.verify.graded_corpus import TRAINABLE, recorded_pairs, run_builtin_ladder
from gateway.verify.graded_pairs import GradedPair, read_graded, write_graded
from gateway.verify.grader_combination import GraderCombination, Grades
from gateway.verify.graders.embedding import THRESHOLD

Floats = NDArray[np.float64]
Score = Callable[[Grades], float | None]

# A pass that makes the second answer, beside the graders' own.
_GENERATE = "generate"
_PROGRESS_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class GraderContender:
    """Something that scores pairs: a grader alone, or a combination.

    Parameters
    ----------
    score : of a pair's grades; None where it has no opinion
    threshold : at and above which it says "good"
    passes : what has to be run for its verdict
    is_probability : whether the score is meant as one
    """

    name: str
    score: Score
    threshold: float
    passes: tuple[str, ...]
    is_probability: bool = False


def contenders(combination: GraderCombination) -> list[GraderContender]:
    """Return every grader alone, then every model of the combination."""

    def alone(name: str) -> Score:
        return lambda grades: grades[name].score if name in grades else None

    found = [
        GraderContender("final_answer", alone("final_answer"), 0.5, (_GENERATE,)),
        GraderContender("overlap", alone("overlap"), 0.5, (_GENERATE,)),
        GraderContender("embedding", alone("embedding"), THRESHOLD, (_GENERATE, "embedding")),
        GraderContender("likelihood", alone("likelihood"), float("nan"), ("likelihood",)),
        GraderContender("judge", alone("judge"), 0.5, (_GENERATE, "judge")),
    ]
    for model in combination.models:
        passes = ("likelihood",) if "likelihood" in model.requires else ()
        if "overlap" in model.requires:
            passes = (_GENERATE, *passes)

        def combined(grades: Grades, model: Any = model) -> float | None:
            return model.probability(grades) if set(grades).issuperset(model.requires) else None

        found.append(GraderContender(f"combined: {model.name}", combined, 0.5, passes, is_probability=True))
    return found


def judge(contender: GraderContender, pairs: Sequence[GradedPair], *, seed: int) -> dict[str, Any] | None:
    """One row of the table; None where the contender has no opinion on any pair."""
    scored = [(contender.score(pair.grades), pair) for pair in pairs]
    known = [(score, pair) for score, pair in scored if score is not None]
    if len(known) < 2:
        return None
    scores = np.array([score for score, _ in known])
    good = np.array([float(pair.is_good) for _, pair in known])
    groups = np.unique([pair.group for _, pair in known], return_inverse=True)[1].astype(np.int64)
    auc = bootstrap_interval(lambda rows: roc_auc(scores[rows], good[rows]), groups, seed=seed)
    row: dict[str, Any] = {
        "name": contender.name,
        "coverage": round(len(known) / len(pairs), 4),
        "auc": _number(roc_auc(scores, good)),
        "auc_low": _number(auc.low),
        "auc_high": _number(auc.high),
    }
    if not np.isnan(contender.threshold):
        flagged = scores < contender.threshold
        row |= {
            "threshold": contender.threshold,
            "sensitivity": _share(flagged[good < 0.5]),
            "specificity": _share(~flagged[good > 0.5]),
        }
    if contender.is_probability:
        row |= {"brier": _number(brier(scores, good)), "calibration_error": _number(calibration_error(scores, good))}
    return row | _costs(contender, [pair for _, pair in known])


def _costs(contender: GraderContender, pairs: Sequence[GradedPair]) -> dict[str, Any]:
    """Return mean cost of a verdict, where the passes were run here."""
    if not pairs or not pairs[0].compute_s:
        return {}
    compute = [sum(pair.compute_s.get(name, 0.0) for name in contender.passes) for pair in pairs]
    cost = [sum(pair.cost_usd.get(name, 0.0) for name in contender.passes) for pair in pairs]
    return {"compute_ms": round(1e3 * float(np.mean(compute)), 3), "cost_usd": float(f"{np.mean(cost):.3g}")}


def summarise(pairs: Sequence[GradedPair], combination: GraderCombination, *, seed: int) -> dict[str, Any]:
    """Return every source's table, and the scoring pass beside generate-and-compare."""
    sources: dict[str, Any] = {}
    for source in sorted({pair.source for pair in pairs}):
        own = [pair for pair in pairs if pair.source == source]
        rows = [judge(contender, own, seed=seed) for contender in contenders(combination)]
        sources[source] = {
            "num_pairs": len(own),
            "share_good": _share(np.array([pair.is_good for pair in own])),
            "seen_in_fitting": "other half of the tasks" if source == "ladder" else source in TRAINABLE,
            "graders": [row for row in rows if row is not None],
        }
    found: dict[str, Any] = {"combination": combination.version, "sources": sources}
    if "ladder" in sources:
        found["reading_beside_writing"] = _reading(sources["ladder"]["graders"])
    return found


def _reading(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare the verdict of one reading pass with that of writing a second answer."""
    by_name = {row["name"]: row for row in rows}
    read, compare = by_name.get("combined: read"), by_name.get("combined: compare")
    if read is None or compare is None or not read.get("compute_ms"):
        return {}
    return {
        "read_compute_ms": read["compute_ms"],
        "compare_compute_ms": compare["compute_ms"],
        "times_cheaper": round(compare["compute_ms"] / read["compute_ms"], 2),
        "read_auc": read["auc"],
        "compare_auc": compare["auc"],
    }


def _share(values: NDArray[np.bool_]) -> float | None:
    return round(float(values.mean()), 4) if len(values) else None


def _number(value: float) -> float | None:
    return None if np.isnan(value) else round(float(value), 4)


def print_table(found: Mapping[str, Any]) -> None:
    """The tables in Markdown, as the documentation shows them."""
    for source, table in found["sources"].items():
        print(f"\n{source}: {table['num_pairs']} pairs, {table['share_good']:.1%} good enough")
        print("| grader | AUC [95 %] | faults found | sound passed | calibration error | device ms | USD a verdict |")
        print("|---|---|---|---|---|---|---|")
        for row in table["graders"]:
            print("| " + " | ".join(_cells(row)) + " |")


def _cells(row: Mapping[str, Any]) -> list[str]:
    def share(name: str) -> str:
        return "" if row.get(name) is None else f"{row[name]:.3f}"

    interval = f"{share('auc')} [{share('auc_low')}, {share('auc_high')}]"
    compute = f"{row['compute_ms']:.1f}" if "compute_ms" in row else ""
    cost = f"{row['cost_usd']:.2g}" if "cost_usd" in row else ""
    shares = [share(name) for name in ("sensitivity", "specificity", "calibration_error")]
    return [row["name"], interval, *shares, compute, cost]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="suffice bench graders", description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=600, help="tasks for the built-in ladder; 0 leaves it out")
    parser.add_argument("--seed", type=int, default=1, help="of tasks and resamples")
    parser.add_argument("--data", type=Path, metavar="DIR", help="recorded responses in parquet files")
    parser.add_argument("--graded", type=Path, metavar="FILE", help="pairs of an earlier run instead of a new one")
    parser.add_argument("--write-graded", type=Path, metavar="FILE", help="keep the ladder's graded pairs")
    parser.add_argument("--combination", default="builtin", help="builtin, or a file")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON there")
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    given = parser.parse_args(arguments)
    combination = GraderCombination.load(given.combination)
    began = time.perf_counter()
    pairs = read_graded(given.graded) if given.graded else []
    if given.tasks and not given.graded:
        pairs = asyncio.run(run_builtin_ladder(HOLDOUT_SPLIT, given.tasks, given.seed, progress=_show_progress()))
        if given.write_graded:
            write_graded(given.write_graded, pairs)
    if given.data:
        pairs += recorded_pairs(given.data)
    if not pairs:
        print("suffice bench graders: nothing to judge; give --tasks or --data.", file=sys.stderr)
        return 2
    facts = {**card(), "seed": given.seed, "tasks": given.tasks, "duration_s": round(time.perf_counter() - began, 1)}
    found = {"bench": "graders", "card": facts, **summarise(pairs, combination, seed=given.seed)}
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    if not given.json:
        print_card("Graders bench", facts)
        print_table(found)
    print(json.dumps(found))
    return 0


def _show_progress() -> Callable[[int, int], None]:
    shown_s = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s > _PROGRESS_EVERY_S:
            shown_s = time.monotonic()
            print(f"{done} of {total} tasks", file=sys.stderr)

    return show


if __name__ == "__main__":
    raise SystemExit(main())
