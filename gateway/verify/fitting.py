"""Fits a combination of graders to pairs whose truth is known, and writes it with its card.

``python -m gateway.verify.fitting --data DIR --ladder 200 --out gateway/verify/builtin/combination.json``

Pairs of recorded responses teach what texts alone can tell and serve with any models (``is_portable``); pairs of the
built-in ladder teach what its own probabilities mean, and serve with it alone. ``--graded FILE`` takes pairs of a
ladder that were graded before, as ``python -m gateway.bench.graders --write-graded FILE`` writes them.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from classifier.fitting import fit_calibrator
from classifier.metrics import brier, calibration_error, roc_auc
from gateway.outcomes.task_split import FITTING_SPLIT
from gateway.verify.graded_corpus import TRAINABLE, recorded_pairs, run_builtin_ladder
from gateway.verify.graded_pairs import GradedPair, read_graded, write_graded
from gateway.verify.grader_combination import FORMAT, feature

Floats = NDArray[np.float64]

_NUM_FOLDS = 5
_DECIMALS = 6


@dataclass(frozen=True, slots=True)
class EvidenceRecipe:
    """A kind of evidence: what must be known, what is read off it, and whether it rests on texts alone."""

    name: str
    requires: tuple[str, ...]
    features: tuple[str, ...]
    is_portable: bool


_TEXT = ("final_answer.equal", "final_answer.different", "open.overlap")
# Of texts alone only equal final answers speak for the cheap one. How often it was good enough without them differs too
# much between sets to lend to traffic nobody has labelled, and open text must not pass because its words are alike.
_PORTABLE = ("final_answer.equal",)
_READ = (
    "likelihood",
    "likelihood.top_mean",
    "likelihood.top_least",
    "likelihood.agreed",
    "likelihood.cheap_mean",
    "likelihood.cheap_least",
    "likelihood.log_num_tokens",
)

RECIPES = (
    EvidenceRecipe("compare_and_read", ("overlap", "likelihood"), (*_TEXT, *_READ), is_portable=False),
    EvidenceRecipe("compare", ("overlap",), _PORTABLE, is_portable=True),
    EvidenceRecipe("read", ("likelihood",), _READ, is_portable=False),
)
"""In the order of preference: the more is known, the better."""


def fit(pairs: Sequence[GradedPair], *, seed: int = 0) -> dict[str, Any]:
    """Return all recipes that the pairs have evidence for, as the file's JSON.

    Parameters
    ----------
    pairs : of the ladder and recorded ones; portable models weigh both kinds alike, the others see the ladder's
    seed : of the folds

    Raises
    ------
    ValueError
        There is nothing to fit.
    """
    models = []
    for recipe in RECIPES:
        fitting = [
            pair
            for pair in pairs
            if all(name in pair.grades for name in recipe.requires)
            and (pair.source == "ladder" or (recipe.is_portable and pair.source in TRAINABLE))
        ]
        if len({pair.is_good for pair in fitting}) == 2:
            models.append(fit_recipe(recipe, fitting, seed=seed))
    if not models:
        raise ValueError("No recipe has pairs of both kinds, good and not; give more of them.")
    content = orjson.dumps(models, option=orjson.OPT_SORT_KEYS)
    return {"format": FORMAT, "version": sha256(content).hexdigest()[:12], "models": models, "card": _card(pairs, seed)}


def fit_recipe(recipe: EvidenceRecipe, pairs: Sequence[GradedPair], *, seed: int) -> dict[str, Any]:
    """One logistic regression on standardised features, calibrated and measured on rows it has not seen.

    Every source weighs the same, however many pairs it has.
    """
    x, y, weights = _arrays(recipe, pairs)
    folds = _folds([pair.group for pair in pairs], seed)
    held_out = np.zeros(len(y))
    for fold in range(_NUM_FOLDS):
        test = folds == fold
        w, b = _logistic(x[~test], y[~test], weights[~test])
        held_out[test] = np.clip(x[test] @ w + b, -6.0, 6.0)
    calibrator = fit_calibrator(held_out, y, weights, folds)
    w, b = _logistic(x, y, weights)
    probabilities = _cross_calibrated(held_out, y, weights, folds)
    knots = _rising(calibrator.x, calibrator.y)
    return {
        "name": recipe.name,
        "requires": list(recipe.requires),
        "is_portable": recipe.is_portable,
        "features": list(recipe.features),
        "weights": _rounded(w),
        "bias": round(float(b), _DECIMALS),
        "slope": round(float(calibrator.slope), _DECIMALS),
        "intercept": round(float(calibrator.intercept), _DECIMALS),
        "x": _rounded(knots[0]),
        "y": _rounded(knots[1]),
        "measured": _measured(pairs, probabilities, y),
    }


def _arrays(recipe: EvidenceRecipe, pairs: Sequence[GradedPair]) -> tuple[Floats, Floats, Floats]:
    x = np.array([[feature(pair.grades, name) for name in recipe.features] for pair in pairs])
    y = np.array([float(pair.is_good) for pair in pairs])
    sizes: dict[str, int] = {}
    for pair in pairs:
        sizes[pair.source] = sizes.get(pair.source, 0) + 1
    weights = np.array([1.0 / sizes[pair.source] for pair in pairs])
    return x, y, weights * len(pairs) / weights.sum()


def _logistic(x: Floats, y: Floats, weights: Floats) -> tuple[Floats, float]:
    """Weights and bias for the features as they are, fitted on standardised ones."""
    from sklearn.linear_model import LogisticRegression

    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale[scale == 0.0] = 1.0
    model = LogisticRegression(C=1.0, max_iter=2000).fit((x - mean) / scale, y, sample_weight=weights)
    w = model.coef_[0] / scale
    return w, float(model.intercept_[0] - w @ mean)


def _cross_calibrated(logits: Floats, y: Floats, weights: Floats, folds: NDArray[np.int64]) -> Floats:
    """Return each fold's log-odds through a map fitted on the other folds."""
    probabilities = np.zeros(len(y))
    for fold in range(_NUM_FOLDS):
        test = folds == fold
        calibrator = fit_calibrator(logits[~test], y[~test], weights[~test], folds[~test])
        probabilities[test] = calibrator(logits[test])
    return probabilities


def _folds(groups: Sequence[str], seed: int) -> NDArray[np.int64]:
    """Return a fold of every row, the same for all rows of a group, whatever their order."""
    digests = {group: sha256(f"{seed}/{group}".encode()).digest() for group in set(groups)}
    return np.array([int.from_bytes(digests[group][:8], "big") % _NUM_FOLDS for group in groups], dtype=np.int64)


def _measured(pairs: Sequence[GradedPair], probabilities: Floats, y: Floats) -> dict[str, Any]:
    """Per source, on held-out folds."""
    sources = np.array([pair.source for pair in pairs])
    found = {}
    for source in sorted(set(sources.tolist())):
        rows = sources == source
        found[source] = {
            "num_pairs": int(rows.sum()),
            "share_good": round(float(y[rows].mean()), 4),
            "auc": round(roc_auc(probabilities[rows], y[rows]), 4),
            "brier": round(brier(probabilities[rows], y[rows]), 4),
            "calibration_error": round(calibration_error(probabilities[rows], y[rows]), 4),
        }
    return found


def _rising(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Knots at different places after rounding; of those that meet the last one counts."""
    kept = {round(float(place), _DECIMALS): float(value) for place, value in zip(x, y, strict=True)}
    return np.array(list(kept.keys())), np.clip(np.array(list(kept.values())), 0.01, 0.99)


def _rounded(values: Floats) -> list[float]:
    return [round(float(value), _DECIMALS) for value in values]


def _card(pairs: Sequence[GradedPair], seed: int) -> Mapping[str, Any]:
    counts: dict[str, int] = {}
    for pair in pairs:
        if pair.source == "ladder" or pair.source in TRAINABLE:
            counts[pair.source] = counts.get(pair.source, 0) + 1
    return {
        "pairs": counts,
        "seed": seed,
        "truth": "the cheap answer's score is not below the top one's",
        "folds": f"{_NUM_FOLDS}, no group in two of them; each source weighs the same",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m gateway.verify.fitting", description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, metavar="DIR", help="recorded responses in parquet files")
    parser.add_argument(
        "--ladder", type=int, default=0, metavar="TASKS", help="run the built-in ladder on so many tasks"
    )
    parser.add_argument("--graded", type=Path, metavar="FILE", help="graded pairs of a ladder instead")
    parser.add_argument("--write-graded", type=Path, metavar="FILE", help="keep the ladder's graded pairs")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    pairs = recorded_pairs(given.data) if given.data else []
    pairs += read_graded(given.graded) if given.graded else []
    if given.ladder:
        run = asyncio.run(run_builtin_ladder(FITTING_SPLIT, given.ladder, given.seed, with_judge=False))
        if given.write_graded:
            write_graded(given.write_graded, run)
        pairs += run
    fitted = fit(pairs, seed=given.seed)
    given.out.write_bytes(orjson.dumps(fitted, option=orjson.OPT_INDENT_2) + b"\n")
    print(
        orjson.dumps(
            {
                "out": str(given.out),
                **fitted["card"],
                "measured": {model["name"]: model["measured"] for model in fitted["models"]},
            }
        ).decode()
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
