"""One calibrated probability out of the graders' scores: a logistic regression per kind of evidence, as plain JSON.

What is known of a pair differs: with a second answer there is something to compare, without one the top tier has only
read the first. Each kind of evidence has a model of its own; the first whose graders all had an opinion decides.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gateway.verify.answer_pair import Grade
from gateway.verify.errors import CombinationUnusable

BUILTIN = Path(__file__).parent / "builtin" / "combination.json"
FORMAT = 1
_MAX_LOGIT = 6.0

Grades = Mapping[str, Grade]
"""Grader's name -> its grade, only those that had an opinion."""


@dataclass(frozen=True, slots=True)
class EvidenceModel:
    """A logistic regression over some features, and the map that calibrates its log-odds.

    Parameters
    ----------
    name : of the kind of evidence
    requires : graders that must have an opinion
    is_portable : whether it rests on texts alone, not on the probabilities of the models it was fitted with
    features : see :func:`feature`
    weights : one a feature
    bias : log-odds of a pair whose features are all 0
    slope, intercept : Platt's map of the log-odds, used without knots
    x, y : knots of an isotonic map instead, both rising
    """

    name: str
    requires: tuple[str, ...]
    is_portable: bool
    features: tuple[str, ...]
    weights: tuple[float, ...]
    bias: float
    slope: float = 1.0
    intercept: float = 0.0
    x: tuple[float, ...] = ()
    y: tuple[float, ...] = ()

    def probability(self, grades: Grades) -> float:
        """P(the cheap answer was good enough)."""
        logit = self.bias + sum(
            weight * feature(grades, name) for weight, name in zip(self.weights, self.features, strict=True)
        )
        logit = min(max(logit, -_MAX_LOGIT), _MAX_LOGIT)
        return self._interpolate(logit) if self.x else _sigmoid(self.slope * logit + self.intercept)

    def _interpolate(self, logit: float) -> float:
        place = bisect_right(self.x, logit)
        if place == 0:
            return self.y[0]
        if place == len(self.x):
            return self.y[-1]
        low, high = self.x[place - 1], self.x[place]
        share = (logit - low) / (high - low)
        return self.y[place - 1] + share * (self.y[place] - self.y[place - 1])


CALLS = EvidenceModel(
    name="calls",
    requires=("tool_calls",),
    is_portable=True,
    features=("tool_calls.same_kind", "tool_calls", "tool_calls.exact"),
    weights=(1.53, 3.68, 2.52),
    bias=-1.73,
)
"""What the comparison of calls is worth where a combination has no model for it: not fitted, but set with caution.

P(good enough) is 0.998 for the same calls, 0.97 for calls that are the same in normal form, 0.45 for different ones
(either may be right) and 0.15 where only one side calls. docs/verification.md has what each was measured to be.
"""


@dataclass(frozen=True, slots=True)
class GraderCombination:
    """Models in order of preference. ``version`` names the content; ``card`` says what it was fitted on."""

    models: tuple[EvidenceModel, ...]
    version: str
    card: Mapping[str, Any]

    @classmethod
    def load(cls, path: Path | str, *, portable_only: bool = False) -> GraderCombination:
        """Read a file, or the one that ships (``builtin``).

        Parameters
        ----------
        path : JSON made by :mod:`gateway.verify.fitting`
        portable_only : leave out what rests on the probabilities of other models than those that serve

        Raises
        ------
        CombinationUnusable
            There is no such file, or it is none.
        """
        file = BUILTIN if str(path) == "builtin" else Path(path)
        try:
            written = orjson.loads(file.read_bytes())
            if written["format"] != FORMAT:
                raise ValueError(f"its format is {written['format']!r}, this version reads {FORMAT}")
            models = tuple(_model(each) for each in written["models"])
        except OSError as error:
            raise CombinationUnusable(str(file), error.strerror or str(error)) from error
        except (KeyError, TypeError, ValueError) as error:
            raise CombinationUnusable(str(file), f"{type(error).__name__}: {error}") from error
        if portable_only:
            models = tuple(model for model in models if model.is_portable)
        if not any(CALLS.requires[0] in model.requires for model in models):
            models += (CALLS,)
        return cls(models, str(written["version"]), written.get("card", {}))

    def model_for(self, graders: frozenset[str]) -> EvidenceModel | None:
        """Return the first model whose graders are all among these."""
        return next((model for model in self.models if graders.issuperset(model.requires)), None)

    def combine(self, grades: Grades) -> tuple[float, str] | None:
        """P(good enough) and the name of the model that says so; None where none has the evidence it needs."""
        model = self.model_for(frozenset(grades))
        return None if model is None else (model.probability(grades), model.name)


def feature(grades: Grades, name: str) -> float:
    """Return a number out of the grades; 0 where the grader has no opinion.

    ``overlap`` is that grader's score, ``likelihood.agreed`` one of its details; ``final_answer.equal`` and
    ``final_answer.different`` are 1 where there are final answers to compare, so that "none" is neither;
    ``open.overlap`` is the overlap where there are none: beside final answers the wording says nothing.
    """
    if name.startswith("open."):
        return 0.0 if "final_answer" in grades else feature(grades, name.removeprefix("open."))
    if name == "final_answer.equal":
        return float("final_answer" in grades and grades["final_answer"].score >= 0.5)
    if name == "final_answer.different":
        return float("final_answer" in grades and grades["final_answer"].score < 0.5)
    grader, _, detail = name.partition(".")
    if grader not in grades:
        return 0.0
    return grades[grader].details.get(detail, 0.0) if detail else grades[grader].score


def flat_scores(grades: Grades) -> dict[str, float]:
    """Return all scores and details under their names, for the log."""
    scores = {name: grade.score for name, grade in grades.items()}
    return scores | {f"{name}.{key}": value for name, grade in grades.items() for key, value in grade.details.items()}


def _model(written: Mapping[str, Any]) -> EvidenceModel:
    model = EvidenceModel(
        name=str(written["name"]),
        requires=tuple(map(str, written["requires"])),
        is_portable=bool(written["is_portable"]),
        features=tuple(map(str, written["features"])),
        weights=tuple(map(float, written["weights"])),
        bias=float(written["bias"]),
        slope=float(written.get("slope", 1.0)),
        intercept=float(written.get("intercept", 0.0)),
        x=tuple(map(float, written.get("x", ()))),
        y=tuple(map(float, written.get("y", ()))),
    )
    if len(model.weights) != len(model.features) or len(model.x) != len(model.y):
        raise ValueError("features and weights, or x and y, differ in length")
    if list(model.x) != sorted(set(model.x)):
        raise ValueError("x does not rise")
    if not all(map(math.isfinite, (*model.weights, *model.x, *model.y, model.bias, model.slope, model.intercept))):
        raise ValueError("a number is not finite")
    return model


def _sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit))
