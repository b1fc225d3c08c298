"""Turns how sure a model was of its own answer into a probability, calibrated on labelled traffic.

A model that writes an answer gives a log-probability to each token of it. Their sum and the least of them, with the
number of tokens, become one calibrated number a tier: P(right) after the answer is known, where a router's is P(right)
before. Both are also read as logarithms of doubt (minus the log-probability): right answers differ by orders of
magnitude in how nearly certain they are, and without those a calibration cannot tell 0.97 from 0.999.

Known problems: a model can be sure and wrong, most of all on prompts unlike those it was trained on; the calibration
holds for traffic like that it was fitted on, for greedy answers and whole ones. The beginning of an answer is judged by
the same numbers, which is an extrapolation.

References
----------
Kadavath et al. 2022, "Language Models (Mostly) Know What They Know", sections 3 and 4, for the calibration of a model's
own probabilities. Platt 1999 for the form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from classifier.errors import TrainingError
from classifier.heads import MAX_LOGIT
from classifier.metrics import brier, roc_auc

SIGNALS = ("log_doubt", "log_least_doubt", "log_tokens", "total", "least")
"""What a calibration is fitted on, in the order of its weights."""

# Below these a sum or a token says nothing more, and one absurd token should not decide alone.
_LEAST_TOTAL, _LEAST_TOKEN = -60.0, -20.0
# Doubts smaller than this are all the same: it is about what rounding leaves of a probability of 1.
_LEAST_DOUBT = 1e-4
_MIN_ROWS, _MIN_OF_A_KIND = 60, 12
_NUM_FOLDS = 5


@dataclass(frozen=True, slots=True)
class AnswerSignals:
    """Holds the log-probabilities of one answer's tokens, summed up.

    Attributes
    ----------
    num_tokens : of the answer, reasoning apart
    total_logprob, least_logprob : natural logarithms, under the model's own distribution at temperature 1
    """

    num_tokens: int
    total_logprob: float
    least_logprob: float

    @classmethod
    def of(cls, logprobs: Iterable[float]) -> Self:
        """Sum up; an answer without tokens is one of which nothing is known."""
        found = list(logprobs)
        return cls(len(found), math.fsum(found), min(found, default=0.0))

    @property
    def mean_probability(self) -> float:
        """Return the geometric mean of the tokens' probabilities, a confidence without calibration; 0 for no tokens."""
        return math.exp(self.total_logprob / self.num_tokens) if self.num_tokens else 0.0

    def values(self, names: Sequence[str] = SIGNALS) -> tuple[float, ...]:
        """Return the named signals."""
        return tuple(_READ[name](self) for name in names)


def _total(answer: AnswerSignals) -> float:
    return max(answer.total_logprob, _LEAST_TOTAL)


def _least(answer: AnswerSignals) -> float:
    return max(answer.least_logprob, _LEAST_TOKEN)


_READ: Mapping[str, Callable[[AnswerSignals], float]] = {
    "log_doubt": lambda answer: math.log(_LEAST_DOUBT - _total(answer)),
    "log_least_doubt": lambda answer: math.log(_LEAST_DOUBT - _least(answer)),
    "log_tokens": lambda answer: math.log1p(answer.num_tokens),
    "total": _total,
    "mean": lambda answer: max(answer.total_logprob / max(answer.num_tokens, 1), _LEAST_TOKEN),
    "least": _least,
}


@dataclass(frozen=True, slots=True)
class TierConfidence:
    """Holds one tier's calibration: ``sigmoid(bias + weights . signals)``.

    Attributes
    ----------
    weights : one per signal
    bias : log-odds
    num_rows : labelled answers it was fitted on
    auc, brier : on answers left out of the fit
    """

    weights: tuple[float, ...]
    bias: float
    num_rows: int
    auc: float
    brier: float

    def p_right(self, values: Sequence[float]) -> float:
        """Return calibrated P(right) by the values of the signals."""
        logit = self.bias + math.fsum(w * x for w, x in zip(self.weights, values, strict=True))
        return 1 / (1 + math.exp(-max(-MAX_LOGIT, min(MAX_LOGIT, logit))))


@dataclass(frozen=True, slots=True)
class AnswerConfidence:
    """Holds the calibrations of a ladder, by tier number; a tier may have none. ``signals`` are what they rest on."""

    tiers: Mapping[int, TierConfidence] = field(default_factory=dict)
    signals: tuple[str, ...] = SIGNALS

    def p_right(self, tier: int, answer: AnswerSignals) -> float:
        """Return P(right) where the tier was calibrated, else the mean probability of a token."""
        found = self.tiers.get(tier)
        if found is None or not answer.num_tokens:
            return answer.mean_probability
        return found.p_right(answer.values(self.signals))

    def to_json(self) -> dict[str, Any]:
        """Return it as an artifact carries it."""
        return {
            "signals": list(self.signals),
            "tiers": {
                str(tier): {
                    "weights": list(each.weights),
                    "bias": each.bias,
                    "num_rows": each.num_rows,
                    "auc": each.auc,
                    "brier": each.brier,
                }
                for tier, each in self.tiers.items()
            },
        }

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> Self:
        """Read :meth:`to_json` back; nothing at all is no calibration.

        Raises
        ------
        ValueError, KeyError, TypeError
            It is not of that form, or rests on signals that this version does not compute.
        """
        if not described:
            return cls()
        names = tuple(described["signals"])
        if unknown := set(names) - set(_READ):
            raise ValueError(f"confidence rests on {sorted(unknown)}, known are {sorted(_READ)}")
        return cls({int(tier): _read_tier(each, len(names)) for tier, each in described["tiers"].items()}, names)


def _read_tier(described: Mapping[str, Any], num_signals: int) -> TierConfidence:
    weights = tuple(float(weight) for weight in described["weights"])
    bias = float(described["bias"])
    if len(weights) != num_signals or not all(map(math.isfinite, (*weights, bias))):
        raise ValueError(f"confidence has weights {weights} and bias {bias}, expected {num_signals} and 1 numbers")
    return TierConfidence(weights, bias, int(described["num_rows"]), float(described["auc"]), float(described["brier"]))


def fit_confidence(
    signals: Mapping[int, Sequence[AnswerSignals]], right: Mapping[int, Sequence[float]], *, seed: int = 0
) -> AnswerConfidence:
    """Calibrate every tier that has enough labelled answers of both kinds.

    Parameters
    ----------
    signals : tier -> its answers'
    right : tier -> the same answers' grades, 0..1; half and more counts as right
    seed : of the folds

    Returns
    -------
    Without the tiers that have fewer than 60 answers, or fewer than 12 right or wrong ones
    """
    fitted = {tier: _fit_tier(each, right[tier], seed) for tier, each in signals.items()}
    return AnswerConfidence({tier: each for tier, each in fitted.items() if each is not None})


def _fit_tier(signals: Sequence[AnswerSignals], right: Sequence[float], seed: int) -> TierConfidence | None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if len(signals) != len(right):
        raise TrainingError(f"{len(signals)} answers have {len(right)} grades; expected one each.")
    labels = np.asarray(right, dtype=np.float64) >= 0.5
    if len(labels) < _MIN_ROWS or min(labels.sum(), (~labels).sum()) < _MIN_OF_A_KIND:
        return None
    x = np.array([each.values() for each in signals])
    model = make_pipeline(StandardScaler(), LogisticRegression(C=1.0, max_iter=1000))
    folds = StratifiedKFold(_NUM_FOLDS, shuffle=True, random_state=seed)
    left_out = cross_val_predict(model, x, labels, cv=folds, method="predict_proba")[:, 1]
    model.fit(x, labels)
    scaler, regression = model.steps[0][1], model.steps[1][1]
    # In the signals' own units, so that serving needs no scaler.
    weights = regression.coef_[0] / scaler.scale_
    bias = float(regression.intercept_[0] - np.dot(weights, scaler.mean_))
    return TierConfidence(
        tuple(float(weight) for weight in weights),
        bias,
        len(labels),
        roc_auc(left_out, labels.astype(np.float64)),
        brier(left_out, labels.astype(np.float64)),
    )
