"""``suffice evaluate``: what routing between two models would buy on graded prompts, beside the plain alternatives."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from classifier.evaluate_pairs import Estimated, PairTable, cross_estimate, estimate, measure, read_pairs
from gateway.commands.evaluate_floor import floor_report
from gateway.commands.failure import USAGE_STATUS, CommandError
from gateway.commands.output import print_json, print_table


def evaluate(
    train: Path,
    test: Path,
    *,
    weak: str,
    strong: str,
    benchmark: str | None,
    transfer: bool,
    floor: float,
    confidence: float,
    seed: int,
    num_resamples: int,
    as_json: bool,
) -> None:
    """Fit on one folder, judge on the other, print the findings.

    Raises
    ------
    CommandError
        Options that contradict each other or are out of range.
    """
    if not 0.0 < floor <= 1.0 or not 0.5 <= confidence < 1.0 or num_resamples < 1:
        message = "--floor must be above 0 and at most 1, --confidence 0.5 to below 1, --resamples at least 1."
        raise CommandError(message, status=USAGE_STATUS)
    if transfer and benchmark is None:
        raise CommandError("--transfer needs --benchmark: the one to be left out.", status=USAGE_STATUS)
    if weak == strong:
        raise CommandError("--weak and --strong name the same model.", status=USAGE_STATUS)
    started = time.perf_counter()
    judged = read_pairs(test, weak, strong, benchmark)
    protocol, found = _estimate(train, test, judged, weak, strong, benchmark, transfer, seed)
    result = {
        "command": "evaluate",
        "weak": weak,
        "strong": strong,
        "benchmarks": sorted(set(judged.benchmarks)),
        "protocol": protocol,
        "seed": seed,
        **measure(judged, found, seed=seed, num_resamples=num_resamples),
        "certificate": _certificate(judged, found, floor, confidence, seed, num_resamples),
    }
    result["duration_s"] = round(time.perf_counter() - started, 1)
    if not as_json:
        _print(result)
    print_json(result)


def _estimate(
    train: Path,
    test: Path,
    judged: PairTable,
    weak: str,
    strong: str,
    benchmark: str | None,
    transfer: bool,
    seed: int,
) -> tuple[str, Estimated]:
    if transfer:
        known = read_pairs(train, weak, strong)
        others = np.array([i for i, name in enumerate(known.benchmarks) if name != benchmark], dtype=np.int64)
        return "leave one benchmark out", estimate(known.take(others), judged, seed=seed)
    if train.resolve() == test.resolve():
        return "folds of the data", cross_estimate(judged, seed=seed)
    return "train folder to test folder", estimate(_known(train, weak, strong, benchmark), judged, seed=seed)


def _known(train: Path, weak: str, strong: str, benchmark: str | None) -> PairTable:
    """The benchmark's own training rows, or all where there are none: a new benchmark is judged by what is known."""
    table = read_pairs(train, weak, strong)
    own = np.array([i for i, name in enumerate(table.benchmarks) if name == benchmark], dtype=np.int64)
    return table.take(own) if len(own) else table


def _certificate(
    judged: PairTable, found: Estimated, floor: float, confidence: float, seed: int, num_resamples: int
) -> dict[str, Any]:
    order = np.where(found.is_foreign, np.inf, found.gains)
    return floor_report(
        order,
        judged.rows.weak,
        judged.rows.strong,
        floor=floor,
        confidence=confidence,
        seed=seed,
        num_resamples=num_resamples,
    )


def _print(result: dict[str, Any]) -> None:
    rows = [
        (
            name,
            "–" if each["apgr"] is None else f"{each['apgr']:.3f}",
            *(f"{each[key]:.1%}" for key in ("cpt50", "cpt80", "strong_share_95", "strong_share_99")),
        )
        for name, each in result["rankings"].items()
    ]
    title = f"{result['num_prompts']:,} prompts of {', '.join(result['benchmarks'])}; {result['protocol']}"
    print_table(("order", "APGR", "CPT50", "CPT80", "cost 95 %", "cost 99 %"), rows, title=title)
    floor = result["certificate"]
    share = "insufficient evidence" if floor["strong_share"] is None else f"{floor['strong_share']:.1%} strong calls"
    print(f"floor {floor['floor']:.0%} with {floor['confidence']:.0%} confidence: {share}")
    print(f"honoured in {floor['resamples']['share_honoured']:.1%} of {floor['resamples']['count']} samples\n")
