"""Maps from an estimator's log-odds to a probability that holds on rows it was not fitted on.

References
----------
Platt 1999, "Probabilistic Outputs for Support Vector Machines". Zadrozny and Elkan 2002, "Transforming Classifier
Scores into Accurate Multiclass Probability Estimates" (isotonic). Niculescu-Mizil and Caruana 2005: Platt wins with few
rows, isotonic with thousands; here held-out log-loss decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from classifier.heads import sigmoid
from classifier.rows import Floats


@dataclass(frozen=True, slots=True)
class Calibrator:
    """Maps one output: ``sigmoid(slope * z + intercept)``, or straight lines between knots where there are any.

    Attributes
    ----------
    slope, intercept : Platt's two parameters
    x, y : float64 (k,), isotonic knots, both non-decreasing; empty when Platt's map is used
    """

    slope: float
    intercept: float
    x: Floats
    y: Floats

    @property
    def kind(self) -> str:
        """Return ``platt`` or ``isotonic``."""
        return "isotonic" if len(self.x) else "platt"

    def __call__(self, logits: Floats) -> Floats:
        """Return calibrated probabilities, the shape of ``logits``."""
        if len(self.x):
            return np.interp(logits, self.x, self.y)
        return sigmoid(self.slope * logits + self.intercept)


@dataclass(frozen=True, slots=True)
class CalibratorBank:
    """Holds all outputs' calibrators as four arrays, as an artifact stores them.

    Attributes
    ----------
    platt : float64 (num_outputs, 2), slope and intercept
    offsets : int64 (num_outputs + 1,), output o owns knots ``offsets[o]:offsets[o + 1]``
    x, y : float64 (num_knots,)
    """

    platt: Floats
    offsets: NDArray[np.int64]
    x: Floats
    y: Floats

    @classmethod
    def pack(cls, calibrators: list[Calibrator]) -> CalibratorBank:
        """Lay calibrators end to end."""
        offsets = np.concatenate([[0], np.cumsum([len(c.x) for c in calibrators])]).astype(np.int64)
        platt = np.array([[c.slope, c.intercept] for c in calibrators], dtype=np.float64)
        x = np.concatenate([c.x for c in calibrators])
        return cls(platt, offsets, x, np.concatenate([c.y for c in calibrators]))

    def __call__(self, logits: Floats) -> Floats:
        """Return calibrated probabilities of requests, float64 (n, num_outputs), as their log-odds."""
        p = sigmoid(self.platt[:, 0] * logits + self.platt[:, 1])
        for output in (self.offsets[1:] > self.offsets[:-1]).nonzero()[0].tolist():
            knots = slice(self.offsets[output], self.offsets[output + 1])
            p[:, output] = np.interp(logits[:, output], self.x[knots], self.y[knots])
        return p

    def check(self) -> None:
        """Raise ValueError where an output's knots lie outside the arrays, or out of order."""
        ends = self.offsets
        if ends[0] != 0 or (np.diff(ends) < 0).any() or ends[-1] != len(self.x) or self.x.shape != self.y.shape:
            raise ValueError("a calibration's knots lie outside its arrays")
        # Knots rise within an output, and begin anew with the next.
        within = np.ones(max(len(self.x) - 1, 0), dtype=np.bool_)
        within[[end - 1 for end in ends[1:-1].tolist() if 0 < end < len(self.x)]] = False
        if (np.diff(self.x)[within] < 0).any() or self.y.min(initial=0.0) < 0 or self.y.max(initial=1.0) > 1:
            raise ValueError("a calibration's knots are out of order, or no probabilities")
