"""Checks by simulation that the statistics keep what they state. ``suffice bench statistics``.

Every claim is a frequency over many simulated histories, each printed beside what was stated. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gateway.bench.machine_card import card, print_card
from gateway.learn.candidate_evaluation import within_floor
from gateway.learn.drift_caution import CHAINS, confidence_per_chain
from policies.certificate import CheckedSample, FloorStatus, certify
from policies.drift_test import DriftDesign, DriftState, observe
from policies.judge_correction import GoldCounts
from policies.offpolicy import LoggedRows, doubly_robust, inverse_propensity, self_normalised
from policies.promotion import PromotionRule, PromotionVerdict, judge_promotion
from policies.turn_outcome import turn_outcome

YEAR_SAMPLES = 5200
"""A hundred checked answers a week."""
JUDGE = GoldCounts(450, 500, 50, 500)
COSTS_USD = np.array([0.0001, 0.0005, 0.003])
_STRENGTHS = np.array([0.4, 0.6, 1.0])


def drift(rng: np.random.Generator, runs: int) -> dict[str, Any]:
    """False alarms over a year at 10 %, looked at after every answer, and answers until 20 % is found."""
    design = DriftDesign(0.1, (0.2,))
    calm = [_alarm(design, rng.random(YEAR_SAMPLES) < 0.1) for _ in range(runs)]
    delays = {}
    for before in (0, 300, 1000, 2500):
        found = [_delay(design, rng, before) for _ in range(runs)]
        counted = [each for each in found if each is not None]
        delays[str(before)] = float(np.median(counted))
    return {
        "stated_false_alarms": design.false_alarm,
        "false_alarms_in_a_year": float(np.mean([each is not None for each in calm])),
        "looks_in_a_year": YEAR_SAMPLES,
        "median_answers_to_find_a_doubling_after": delays,
    }


def _alarm(design: DriftDesign, losses: np.ndarray) -> int | None:
    return observe(design, DriftState.start(design), losses.tolist()).alarmed_at


def _delay(design: DriftDesign, rng: np.random.Generator, before: int) -> float | None:
    """Answers from the rise to the alarm; None for an alarm before it, infinite for none in time."""
    alarm = _alarm(design, np.concatenate([rng.random(before) < 0.1, rng.random(1200) < 0.2]))
    if alarm is None:
        return float("inf")
    return float(alarm - before) if alarm > before else None


def certificate(rng: np.random.Generator, runs: int) -> dict[str, Any]:
    """Count how often a floor just missed is certified, with a perfect judge and one right nine times in ten."""
    found = {}
    for name, judge in (("perfect_judge", None), ("judge_right_9_of_10", JUDGE)):
        for case, rate in (("floor_just_missed", 0.101), ("floor_held_well", 0.04)):
            held = [_is_held(rng, rate, judge) for _ in range(runs)]
            found[f"{name}, {case}"] = float(np.mean(held))
    return {"stated_false_certificates": 0.05, "floor": 0.9, "share_certified": found}


def _is_held(rng: np.random.Generator, rate: float, judge: GoldCounts | None) -> bool:
    """Return a floor of 0.9 over 20,000 requests, the doubtful half checked twice as often as the other."""
    inclusion = np.repeat([0.1, 0.05], 10_000)
    faults = (rng.random(20_000) < rate).astype(np.float64)
    gold = None
    if judge is not None:
        faults = np.where(rng.random(20_000) < 0.9, faults, 1.0 - faults)
        hits, alarms = rng.binomial(500, 0.9), rng.binomial(500, 0.1)  # what a gold set of 500 + 500 shows of it
        gold = GoldCounts(int(hits), 500, int(alarms), 500)
    drawn = rng.random(20_000) < inclusion
    sample = CheckedSample(faults[drawn], inclusion[drawn], 20_000, 0.05)
    return certify(sample, 0.9, 0.95, gold).status is FloorStatus.HELD


def offpolicy(rng: np.random.Generator, runs: int) -> dict[str, Any]:
    """Coverage of 95 % intervals for a policy that agrees with the log on part of the rows."""
    covered: dict[str, list[bool]] = {}
    truth = _mean_of_target(_probabilities(rng, 2_000_000))
    for _ in range(runs):
        p = _probabilities(rng, 3000)
        logged = _log(rng, p, _serving(p))
        for estimator in (inverse_propensity, self_normalised, doubly_robust):
            found = estimator(logged, _target(p)).estimate
            covered.setdefault(estimator.__name__, []).append(found.low <= truth <= found.high)
    return {"stated_coverage": 0.95, "rows": 3000, "coverage": {k: float(np.mean(v)) for k, v in covered.items()}}


def turns(rng: np.random.Generator, runs: int) -> dict[str, Any]:
    """Certificates and off-policy intervals over turns whose steps go wrong together; beside it, requests counted."""
    held: dict[str, list[bool]] = {}
    for _ in range(runs):
        for case, rate in (("floor_just_missed", 0.101), ("floor_held_well", 0.04)):
            for unit, sample in zip(("turns", "requests"), _turn_samples(rng, rate), strict=True):
                is_held = certify(sample, 0.9, 0.95).status is FloorStatus.HELD
                held.setdefault(f"{unit}, {case}", []).append(is_held)
    covered: dict[str, list[bool]] = {}
    truth = _mean_of_target(_probabilities(rng, 2_000_000))
    for _ in range(runs):
        p = _probabilities(rng, 3000)
        by_turn, turn_of_step = _log_of_turns(rng, p)
        by_request = LoggedRows(
            by_turn.chosen[turn_of_step],
            by_turn.propensity[turn_of_step],
            by_turn.outcome[turn_of_step],
            None if by_turn.predicted is None else by_turn.predicted[turn_of_step],
        )
        target = _target(p)
        for unit, logged, wanted in (("turns", by_turn, target), ("requests", by_request, target[turn_of_step])):
            for estimator in (inverse_propensity, self_normalised, doubly_robust):
                found = estimator(logged, wanted).estimate
                covered.setdefault(f"{unit}, {estimator.__name__}", []).append(found.low <= truth <= found.high)
    return {
        "stated_false_certificates": 0.05,
        "floor": 0.9,
        "share_certified": {name: float(np.mean(each)) for name, each in held.items()},
        "stated_coverage": 0.95,
        "coverage": {name: float(np.mean(each)) for name, each in covered.items()},
    }


def _turn_samples(rng: np.random.Generator, rate: float) -> tuple[CheckedSample, CheckedSample]:
    """Return 5,000 turns of 1 to about 40 steps, drawn whole with probability 0.1: as turns, and as requests.

    Of a turn either nearly all steps lose or nearly none does. A fifth of what is lost is known without the draw, and
    counts with it for turns; requests have it in the same two strata.
    """
    num, inclusion = 5000, 0.1
    num_steps = rng.geometric(0.125, num)
    chance = np.where(rng.random(num) < (rate - 0.01) / 0.89, 0.9, 0.01)
    turn = np.repeat(np.arange(num), num_steps)
    lost = rng.random(len(turn)) < chance[turn]
    known = lost & (rng.random(len(turn)) < 0.2)
    drawn = (rng.random(num) < inclusion)[turn]
    found = [
        turn_outcome(each[~knew & was].tolist(), [1.0] * int(knew.sum()), len(each), inclusion)
        for each, knew, was in _split(num_steps, lost.astype(np.float64), known, drawn)
        if was.any() or knew.any()
    ]
    losses, chances = (np.array(each, dtype=np.float64) for each in zip(*found, strict=True))
    seen = known | drawn
    return (
        CheckedSample(losses, chances, num, inclusion),
        CheckedSample(lost[seen].astype(np.float64), np.where(known, 1.0, inclusion)[seen], len(turn), inclusion),
    )


def _split(num_steps: np.ndarray, *columns: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    ends = np.cumsum(num_steps)
    for begin, end in zip(ends - num_steps, ends, strict=True):
        yield tuple([each[begin:end] for each in columns])


def _log_of_turns(rng: np.random.Generator, p: np.ndarray) -> tuple[LoggedRows, np.ndarray]:
    """Return turns decided once and right or wrong as a whole, and the turn of each step."""
    num_steps = rng.geometric(0.125, len(p))
    return _log(rng, p, _serving(p)), np.repeat(np.arange(len(p)), num_steps)


def promotion(rng: np.random.Generator, runs: int) -> dict[str, Any]:
    """Weeks in which a router that is worse, and one that is better, would have been promoted."""
    rule = PromotionRule(quality_value_usd=0.01)
    found = {}
    for name, target in (("worse", _worse), ("better", _target)):
        verdicts = []
        for _ in range(runs):
            p = _probabilities(rng, 6000)
            quality = _log(rng, p, _serving(p))
            prices = np.tile(COSTS_USD, (len(p), 1))
            cost = LoggedRows(quality.chosen, quality.propensity, COSTS_USD[quality.chosen], prices)
            verdicts.append(judge_promotion(quality, cost, target(p), _serving(p), rule).verdict)
        found[name] = float(np.mean([each is PromotionVerdict.PROMOTE for each in verdicts]))
    return {"stated_wrong_promotions": 1 - rule.confidence, "weeks": runs, "share_promoted": found}


def caution(rng: np.random.Generator, runs: int) -> dict[str, Any]:
    """Weeks in which a candidate is worse by what it is shipped with, judged from the most cautious on.

    After a drift everything is served by the top tier and asked below beside it. Candidates overrate the tiers below by
    so much (in log-odds); one is worse where its worth is below the serving router's, or its quality below the floor by
    more than is permitted to be missed.
    """
    found = {}
    for overrated in (0.0, 1.0, 1.25, 1.5, 2.0):
        shipped = [_shipped(rng, overrated) for _ in range(runs)]
        found[f"overrated by {overrated:g}"] = {
            "shipped": float(np.mean([each is not None for each in shipped])),
            "worse": float(np.mean([each is not None and each[0] for each in shipped])),
            "cost_of_top": float(np.mean([1.0 if each is None else each[1] for each in shipped])),
        }
    chains = [list(chain) for chain in CHAINS]
    return {"stated_wrong_promotions": 0.05, "weeks": runs, "chains": chains, "candidates": found}


def _shipped(rng: np.random.Generator, overrated: float) -> tuple[bool, float] | None:
    """Return whether what is shipped after a week is worse, and its cost; None where nothing is."""
    rule, floor = PromotionRule(quality_value_usd=0.01, confidence=confidence_per_chain(0.95)), 0.9
    p = _probabilities(rng, 3000)
    p[:, 2] = 1.0
    log_odds = np.log(p[:, :2] / (1.0 - p[:, :2])) + overrated + rng.normal(size=(len(p), 2))
    said = np.column_stack([1.0 / (1.0 + np.exp(-log_odds)), np.ones(len(p))])
    quality = _asked_beside(rng, p, said)
    cost = LoggedRows(quality.chosen, quality.propensity, COSTS_USD[quality.chosen], np.tile(COSTS_USD, (len(p), 1)))
    top, best = _one_hot(np.full(len(p), 2)), None
    for chain in CHAINS:
        for factor in chain:
            target = _one_hot((factor * rule.quality_value_usd * said - COSTS_USD).argmax(axis=1))
            _, mine = within_floor(doubly_robust(quality, target, 2 * rule.confidence - 1).estimate, floor, rule)
            if judge_promotion(quality, cost, target, top, mine).verdict is not PromotionVerdict.PROMOTE:
                break
            best = target
    if best is None:
        return None
    kept, paid_usd = float((best * p).sum(axis=1).mean()), float((best * COSTS_USD).sum(axis=1).mean())
    gained_usd = rule.quality_value_usd * (kept - 1.0) - (paid_usd - COSTS_USD[2])
    return gained_usd < 0.0 or kept < floor - rule.max_quality_loss, paid_usd / COSTS_USD[2]


def _asked_beside(rng: np.random.Generator, p: np.ndarray, said: np.ndarray) -> LoggedRows:
    """Of each request the outcome of one tier is seen: below the top that of the answer asked beside it."""
    chance = np.tile([0.55, 0.25, 0.2], (len(p), 1))
    seen = rng.choice(3, len(p), p=chance[0])
    right = (rng.random(len(p)) < p[np.arange(len(p)), seen]).astype(np.float64)
    return LoggedRows(seen, chance, right, said)


def _probabilities(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    difficulty = rng.beta(1.0, 1.5, size=(num_rows, 1))
    p: np.ndarray = 1.0 / (1.0 + np.exp(-8.0 * (_STRENGTHS - difficulty)))
    return p


def _one_hot(columns: np.ndarray) -> np.ndarray:
    return np.asarray(np.eye(3)[columns])


def _serving(p: np.ndarray) -> np.ndarray:
    return _one_hot(np.where(p[:, 0] > 0.9, 0, np.where(p[:, 1] > 0.7, 1, 2)))


def _target(p: np.ndarray) -> np.ndarray:
    """Return the best choice when a right answer is worth a cent."""
    return _one_hot((0.01 * p - COSTS_USD).argmax(axis=1))


def _worse(p: np.ndarray) -> np.ndarray:
    """Serving, but a part of the hard requests goes down."""
    kept = _serving(p)
    return np.where((p[:, :1] < 0.3) & (p[:, 1:2] < 0.6), _one_hot(np.zeros(len(p), dtype=np.int64)), kept)


def _mean_of_target(p: np.ndarray) -> float:
    return float((_target(p) * p).sum(axis=1).mean())


def _log(rng: np.random.Generator, p: np.ndarray, serving: np.ndarray) -> LoggedRows:
    """Return a tenth of the traffic explores; the model of outcomes is biased and blurred."""
    propensity = 0.9 * serving + 0.1 / 3
    chosen = (rng.random((len(p), 1)) > propensity.cumsum(axis=1)).sum(axis=1).clip(0, 2).astype(np.int64)
    right = (rng.random(len(p)) < p[np.arange(len(p)), chosen]).astype(np.float64)
    return LoggedRows(chosen, propensity, right, np.clip(0.8 * p + 0.05, 0.0, 1.0))


SIMULATIONS = {
    "drift": drift,
    "certificate": certificate,
    "offpolicy": offpolicy,
    "turns": turns,
    "promotion": promotion,
    "caution": caution,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="suffice bench statistics", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200, help="simulated histories a claim")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(SIMULATIONS))
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    given = parser.parse_args(arguments)
    if given.runs < 1:
        parser.error("--runs must be at least 1")
    names = [given.only] if given.only else list(SIMULATIONS)
    results = {name: SIMULATIONS[name](np.random.default_rng(given.seed), given.runs) for name in names}
    facts = {**card(), "numpy": np.__version__, "seed": given.seed, "runs": given.runs}
    if not given.json:
        print_card("Statistics bench", facts)
        for name, found in results.items():
            print(f"\n{name}")
            for key, value in found.items():
                print(f"  {key}: {value}")
    print(json.dumps({"bench": "statistics", "card": facts, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
