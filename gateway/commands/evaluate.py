"""Runs ``suffice evaluate``: what routing would buy on graded prompts, beside the plain alternatives."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from classifier.graded_report import PriceSweep, report_ladder, report_pair
from classifier.graded_table import GradedTable, Prices, read_graded
from classifier.metrics import without_nan
from classifier.router_estimates import RouterEstimates, cross_estimate, estimate, learning_curve
from gateway.commands.evaluate_floor import NUM_STEPS, QualityGrid, floor_report, guard_report
from gateway.commands.result_printer import print_json, print_table
from gateway.failure_report import USAGE_STATUS, CommandError


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationCall:
    """Holds what ``suffice evaluate`` was called with.

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
    call = EvaluationCall(
        train=train,
        test=test,
        models=_models(weak, strong, ladder),
        is_ladder=bool(ladder),
        benchmarks=tuple(benchmark),
        transfer=transfer,
        floor=floor,
        confidence=confidence,
        seed=seed,
        num_resamples=num_resamples,
        prices=dict(_price(each) for each in price),
        curve=_sizes(curve),
    )
    if call.curve and (call.is_ladder or transfer or train.resolve() != test.resolve()):
        raise _usage("--curve is drawn for a pair, on the folds of one folder.")
    started = time.perf_counter()
    result = run_evaluation(call)
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
        if model and 0 <= price_in < math.inf and 0 <= price_out < math.inf:
            return model, (price_in, price_out)
    except ValueError:
        pass  # said below
    raise _usage(f"--price is {written!r}; expected MODEL=IN,OUT in USD per million tokens.")


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


# ---- fit, ask, judge


def run_evaluation(call: EvaluationCall) -> dict[str, Any]:
    """Fit, ask and judge; return the findings for JSON.

    Raises
    ------
    TrainingError
        A folder cannot be read, or what it holds cannot carry a fit.
    """
    judged = read_graded(call.test, call.models, call.benchmarks, call.prices)
    if call.is_ladder:
        judged.require_costs(call.models)
    protocol, found = _estimates(call, judged)
    part = _of_ladder(call, judged, found) if call.is_ladder else _of_pair(call, judged, found)
    certificate = floor_report(
        part.grid,
        part.costs.__getitem__,
        floor=call.floor,
        confidence=call.confidence,
        seed=call.seed,
        num_resamples=call.num_resamples,
    )
    if not call.is_ladder:
        certificate["strong_share"] = certificate["cost"]
    result: dict[str, Any] = {
        "command": "evaluate",
        **part.names,
        "benchmarks": sorted(set(judged.benchmarks)),
        "protocol": protocol,
        "seed": call.seed,
        **part.report,
        "guard": guard_report(found.is_foreign, float(found.familiar_share.mean()), call.confidence),
        "certificate": certificate,
    }
    if call.curve:
        result["learning_curve"] = learning_curve(judged, call.curve, seed=call.seed)
    cleaned: dict[str, Any] = without_nan(result)
    return cleaned


def _estimates(call: EvaluationCall, judged: GradedTable) -> tuple[str, RouterEstimates]:
    """Return the protocol by its name, and what routers that had not seen the rows say of them."""
    if not call.transfer and call.train.resolve() == call.test.resolve():
        return "folds of the data", cross_estimate(judged, seed=call.seed)
    known = read_graded(call.train, call.models, (), call.prices)
    is_own = np.isin(known.benchmarks, call.benchmarks)
    if call.transfer:
        return "leave one benchmark out", estimate(known.take(~is_own), judged, seed=call.seed)
    # Where the folder has none of these benchmarks, all that it has is better than nothing.
    rows = known.take(is_own) if is_own.any() else known
    return "train folder to test folder", estimate(rows, judged, seed=call.seed)


@dataclass(frozen=True, slots=True)
class JudgedPart:
    """Holds what is said differently of a pair and of a ladder.

    Attributes
    ----------
    names : how the models are named in the result
    report : the figures
    grid, costs : the settings that are certified, and what each costs: a share of strong calls, or dollars a request
    """

    names: dict[str, Any]
    report: dict[str, Any]
    grid: QualityGrid
    costs: Sequence[float]


def _of_pair(call: EvaluationCall, judged: GradedTable, found: RouterEstimates) -> JudgedPart:
    report = report_pair(judged, found, seed=call.seed, num_resamples=call.num_resamples)
    order = np.where(found.is_foreign, np.inf, found.gains(0))
    grid = QualityGrid.of_order(order, judged.scores, found.p_right)
    shares = [1.0 - step / NUM_STEPS for step in range(NUM_STEPS + 1)]
    return JudgedPart(dict(zip(("weak", "strong"), call.models, strict=True)), report, grid, shares)


def _of_ladder(call: EvaluationCall, judged: GradedTable, found: RouterEstimates) -> JudgedPart:
    report = report_ladder(judged, found, call.models, seed=call.seed, num_resamples=call.num_resamples)
    costs, rows = judged.costs_usd, np.arange(len(judged))
    sweep = PriceSweep.of(found.p_right, costs.mean(axis=0)).guarded(found.is_foreign, len(call.models) - 1)
    grid = QualityGrid(sweep.chosen, judged.scores, found.p_right)
    spent = [float(costs[rows, chosen].mean()) for chosen in sweep.chosen]
    prices = {model: list(price) for model, price in call.prices.items()}
    return JudgedPart({"ladder": list(call.models)}, {"prices": prices, **report}, grid, spent)


# ---- tables for people


def _print(result: dict[str, Any]) -> None:
    title = f"{result['num_prompts']:,} prompts of {', '.join(result['benchmarks'])}; {result['protocol']}"
    if "ladder" in result:
        _print_ladder(result, title)
    else:
        _print_pair(result, title)
    guard, floor = result["guard"], result["certificate"]
    print(f"{guard['share_foreign']:.1%} of the prompts look foreign; without checks: {guard['without_checks']}")
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
