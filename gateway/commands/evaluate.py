"""``suffice evaluate``: what routing would buy on graded prompts, beside the plain alternatives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from classifier.evaluate_ladder import LadderEstimates, Swept, cross_estimate_ladder, estimate_ladder, measure_ladder
from classifier.evaluate_pairs import (
    Estimated,
    PairTable,
    cross_estimate,
    estimate,
    learning_curve,
    measure,
    read_pairs,
)
from classifier.graded import GradedTable, Prices, read_graded
from gateway.commands.evaluate_floor import NUM_STEPS, Routed, floor_report, guard_report
from gateway.commands.result_printer import print_json, print_table
from gateway.failure_report import USAGE_STATUS, CommandError


@dataclass(frozen=True, slots=True)
class Asked:
    """What ``suffice evaluate`` was called with.

    Parameters
    ----------
    train, test : folders; the same one twice means its own folds
    models : cheapest first, two or more
    is_ladder : ``--ladder`` was given, also with two models
    benchmarks : only these; all when empty
    transfer : fit on every benchmark but these
    prices : USD per million tokens in and out, for models the folder has no price of
    curve : numbers of labels to draw a learning curve at
    """

    train: Path
    test: Path
    models: tuple[str, ...]
    is_ladder: bool
    benchmarks: tuple[str, ...]
    transfer: bool
    floor: float
    confidence: float
    seed: int
    num_resamples: int
    prices: Prices
    curve: tuple[int, ...] = ()


def evaluate(
    train: Path,
    test: Path,
    *,
    weak: str | None,
    strong: str | None,
    ladder: Sequence[str],
    benchmark: Sequence[str],
    transfer: bool,
    floor: float,
    confidence: float,
    seed: int,
    num_resamples: int,
    price: Sequence[str],
    curve: str | None,
    as_json: bool,
) -> None:
    """Fit on one folder, judge on the other, print the findings.

    Raises
    ------
    CommandError
        Options that contradict each other or are out of range.
    """
    if not 0.0 < floor <= 1.0 or not 0.5 <= confidence < 1.0 or num_resamples < 1:
        raise _usage("--floor must be above 0 and at most 1, --confidence 0.5 to below 1, --resamples at least 1.")
    if transfer and not benchmark:
        raise _usage("--transfer needs --benchmark: the one to be left out.")
    asked = Asked(
        train,
        test,
        _models(weak, strong, ladder),
        bool(ladder),
        tuple(benchmark),
        transfer,
        floor,
        confidence,
        seed,
        num_resamples,
        dict(_price(each) for each in price),
        _sizes(curve),
    )
    if asked.curve and (asked.is_ladder or transfer or train.resolve() != test.resolve()):
        raise _usage("--curve is drawn for a pair, on the folds of one folder.")
    started = time.perf_counter()
    result = _of_ladder(asked) if asked.is_ladder else _of_pair(asked)
    result["duration_s"] = round(time.perf_counter() - started, 1)
    if not as_json:
        _print(result)
    print_json(result)


def _usage(message: str) -> CommandError:
    return CommandError(message, status=USAGE_STATUS)


def _models(weak: str | None, strong: str | None, ladder: Sequence[str]) -> tuple[str, ...]:
    if ladder and (weak is not None or strong is not None):
        raise _usage("give either --weak and --strong, or --ladder.")
    models = tuple(ladder) if ladder else tuple(each for each in (weak, strong) if each is not None)
    if len(models) < 2:
        raise _usage("give --weak and --strong, or --ladder with two models or more, cheapest first.")
    if len(set(models)) < len(models):
        raise _usage("the same model is named twice.")
    return models


def _price(written: str) -> tuple[str, tuple[float, float]]:
    model, _, prices = written.rpartition("=")
    try:
        price_in, price_out = (float(each) for each in prices.split(","))
    except ValueError:
        raise _usage(f"--price is {written!r}; expected MODEL=IN,OUT in USD per million tokens.") from None
    if not model or price_in < 0 or price_out < 0:
        raise _usage(f"--price is {written!r}; expected MODEL=IN,OUT in USD per million tokens.")
    return model, (price_in, price_out)


def _sizes(written: str | None) -> tuple[int, ...]:
    if written is None:
        return ()
    try:
        sizes = tuple(int(each) for each in written.split(","))
    except ValueError:
        raise _usage(f"--curve is {written!r}; expected numbers of labels, such as 100,300,1000.") from None
    if min(sizes) < 50:
        raise _usage("--curve starts at 50 labels; with fewer there is nothing to fit.")
    return sizes


# ---- a pair


def _of_pair(asked: Asked) -> dict[str, Any]:
    weak, strong = asked.models
    judged = _pick(read_pairs(asked.test, weak, strong), asked.benchmarks)
    protocol, found = _estimate_pair(asked, judged)
    graded = read_graded(asked.test, asked.models, asked.benchmarks, asked.prices)
    order = np.where(found.is_foreign, np.inf, found.gains)
    routed = Routed.of(order, judged.rows.weak, judged.rows.strong)
    certificate = floor_report(
        routed,
        lambda step: 1.0 - step / NUM_STEPS,
        floor=asked.floor,
        confidence=asked.confidence,
        seed=asked.seed,
        num_resamples=asked.num_resamples,
    )
    certificate["strong_share"] = certificate["cost"]
    result = {
        "command": "evaluate",
        "weak": weak,
        "strong": strong,
        "benchmarks": sorted(set(judged.benchmarks)),
        "protocol": protocol,
        "seed": asked.seed,
        **measure(judged, found, seed=asked.seed, num_resamples=asked.num_resamples, costs_usd=graded.costs_usd),
        "guard": guard_report(found.is_foreign, asked.confidence),
        "certificate": certificate,
    }
    if asked.curve:
        result["learning_curve"] = learning_curve(judged, asked.curve, seed=asked.seed)
    return result


def _pick(table: PairTable, benchmarks: Sequence[str]) -> PairTable:
    if not benchmarks:
        return table
    kept = np.array([i for i, name in enumerate(table.benchmarks) if name in benchmarks], dtype=np.int64)
    if not len(kept):
        raise CommandError(f"no prompt of {', '.join(benchmarks)} was answered by both models.")
    return table.take(kept)


def _estimate_pair(asked: Asked, judged: PairTable) -> tuple[str, Estimated]:
    weak, strong = asked.models
    if not asked.transfer and asked.train.resolve() == asked.test.resolve():
        return "folds of the data", cross_estimate(judged, seed=asked.seed)
    known = read_pairs(asked.train, weak, strong)
    rows, protocol = _training_rows(asked, known.benchmarks)
    return protocol, estimate(known.take(rows), judged, seed=asked.seed)


def _training_rows(asked: Asked, benchmarks: Sequence[str]) -> tuple[np.ndarray, str]:
    """The rows to fit on, and the protocol: every other benchmark; or the same ones where there are any, else all."""
    own = np.array([i for i, name in enumerate(benchmarks) if name in asked.benchmarks], dtype=np.int64)
    if asked.transfer:
        return np.setdiff1d(np.arange(len(benchmarks)), own), "leave one benchmark out"
    return own if len(own) else np.arange(len(benchmarks)), "train folder to test folder"


# ---- a ladder


def _of_ladder(asked: Asked) -> dict[str, Any]:
    judged = read_graded(asked.test, asked.models, asked.benchmarks, asked.prices)
    protocol, found = _estimate_ladder(asked, judged)
    measured = measure_ladder(judged, found, asked.models, seed=asked.seed, num_resamples=asked.num_resamples)
    costs = judged.costs_usd
    swept = Swept.of(found.scores, costs.mean(axis=0)).guarded(found.is_foreign, len(asked.models) - 1)
    rows = np.arange(len(judged))
    spent = [float(costs[rows, chosen].mean()) for chosen in swept.chosen]
    certificate = floor_report(
        Routed.of_ladder(swept.chosen, judged.rows.scores),
        spent.__getitem__,
        floor=asked.floor,
        confidence=asked.confidence,
        seed=asked.seed,
        num_resamples=asked.num_resamples,
    )
    return {
        "command": "evaluate",
        "ladder": list(asked.models),
        "benchmarks": sorted(set(judged.benchmarks)),
        "protocol": protocol,
        "seed": asked.seed,
        "prices": {model: list(price) for model, price in asked.prices.items()},
        **measured,
        "guard": guard_report(found.is_foreign, asked.confidence),
        "certificate": certificate,
    }


def _estimate_ladder(asked: Asked, judged: GradedTable) -> tuple[str, LadderEstimates]:
    if not asked.transfer and asked.train.resolve() == asked.test.resolve():
        return "folds of the data", cross_estimate_ladder(judged, seed=asked.seed)
    known = read_graded(asked.train, asked.models, (), asked.prices)
    rows, protocol = _training_rows(asked, known.benchmarks)
    return protocol, estimate_ladder(known.take(rows), judged, seed=asked.seed)


# ---- tables for people


def _print(result: dict[str, Any]) -> None:
    title = f"{result['num_prompts']:,} prompts of {', '.join(result['benchmarks'])}; {result['protocol']}"
    if "ladder" in result:
        _print_ladder(result, title)
    else:
        _print_pair(result, title)
    guard, floor = result["guard"], result["certificate"]
    print(f"{guard['share_foreign']:.0%} of the prompts look foreign; without checks: {guard['without_checks']}")
    cost = "insufficient evidence" if floor["cost"] is None else _cost_words(result, floor["cost"])
    print(f"floor {floor['floor']:.0%} with {floor['confidence']:.0%} confidence: {cost}")
    print(f"honoured in {floor['resamples']['share_honoured']:.1%} of {floor['resamples']['count']} samples\n")


def _print_pair(result: dict[str, Any], title: str) -> None:
    rows = [
        (
            name,
            "–" if each["apgr"] is None else f"{each['apgr']:.3f}",
            *(f"{each[key]:.1%}" for key in ("cpt50", "cpt80", "strong_share_95", "strong_share_99")),
        )
        for name, each in result["rankings"].items()
    ]
    print_table(("order", "APGR", "CPT50", "CPT80", "cost 95 %", "cost 99 %"), rows, title=title)
    for point in result.get("learning_curve", ()):
        print(f"{point['num_labels']:6,} labels: APGR {point['apgr']:.3f}")


def _print_ladder(result: dict[str, Any], title: str) -> None:
    levels = ("95%", "97%", "99%")
    rows = [
        (name, *(_dollars(each[f"cost_usd_{level}"], each[f"cost_share_{level}"]) for level in levels))
        for name, each in result["rankings"].items()
    ]
    headings = ("chosen by", *(f"USD a request at {level} of the top's quality" for level in levels))
    print_table(headings, rows, title=title)


def _dollars(cost: float | None, share: float | None) -> str:
    return "–" if cost is None or share is None else f"{cost:.6f} ({share:.0%})"


def _cost_words(result: dict[str, Any], cost: float) -> str:
    return f"{cost:.6f} USD a request" if "ladder" in result else f"{cost:.1%} strong calls"
