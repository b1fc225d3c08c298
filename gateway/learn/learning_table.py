"""The training table: requests of the log as arrays, with what was checked of them and how likely that was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classifier.checked_rows import CheckedRows
from classifier.log_view import LogViews
from classifier.types import RouterRequest

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEAST_CHANCE = 1e-6
"""Least inclusion probability that is counted: no row weighs more than a million."""


_ARRAYS = (
    "created_s",
    "served",
    "propensity",
    "labels",
    "chance",
    "label_origins",
    "sampling_weight",
    "cost_usd",
    "prompt_tokens",
    "completion_tokens",
    "num_steps",
    "groups",
)
"""Columns of a table that are arrays with one row a request."""


class LabelOrigin(IntEnum):
    """Names a label's origin. Only drawn checks against the top tier count in estimates of value.

    ``UP``: the answer was compared with the top tier's. ``DOWN``: the tier was asked beside the top one, which had
    answered. ``DERIVED``: compared with a tier between, and reckoned on. ``GOLD``: known from outside the draw.
    """

    NONE = 0
    UP = 1
    DOWN = 2
    DERIVED = 3
    GOLD = 4


@dataclass(frozen=True, slots=True)
class LearningTable:
    """Answered turns of one base router, oldest first; nearly all of one request.

    Attributes
    ----------
    request_ids : n ids
    created_s : float64 (n,), epoch seconds
    views : the base router's predictions
    served : int64 (n,), column of the tier that answered
    propensity : float64 (n, T), chance the logging policy gave each tier
    labels : float64 (n, T - 1), P(the tier's answer is as good as the top tier's); NaN where nothing is known
    chance : float64 (n, T - 1), chance that the drawn check happened, given that the tier it started from answered
    label_origins : int8 (n, T - 1), :class:`LabelOrigin`
    sampling_weight : float64 (n,), requests of the log that a row stands for; 0 for rows that only carry labels: from
        outside the draw, or from before what is to be judged
    cost_usd : float64 (n,), of all steps of the turn
    prompt_tokens, completion_tokens : int64 (n,), likewise
    num_steps : int64 (n,), answers of the turn
    groups : int64 (n,), equal digests of the prompt share one
    policies : n names of policies
    overrides : n mappings, what the request asked for
    tools : n tuples, what the request said of tools, see :class:`classifier.types.RouterRequest`
    num_requests : requests of the log that the frame stands for
    num_other : checked requests left out, since a router of another base, or none, had estimated them
    num_unread : requests left out, since their rows have no features that can be read
    requests : n prompts as the router read them, None where none was kept; None as a whole where none was looked for
    """

    request_ids: tuple[str, ...]
    created_s: Floats
    views: LogViews
    served: Ints
    propensity: Floats
    labels: Floats
    chance: Floats
    label_origins: NDArray[np.int8]
    sampling_weight: Floats
    cost_usd: Floats
    prompt_tokens: Ints
    completion_tokens: Ints
    num_steps: Ints
    groups: Ints
    policies: tuple[str, ...]
    overrides: tuple[Mapping[str, Any], ...]
    tools: tuple[tuple[float, ...], ...]
    num_requests: int
    num_other: int
    num_unread: int = 0
    requests: tuple[RouterRequest | None, ...] | None = None

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def num_tiers(self) -> int:
        return int(self.propensity.shape[1])

    @property
    def is_checked(self) -> NDArray[np.bool_]:
        """Return rows with at least one label, bool (n,)."""
        return np.asarray((~np.isnan(self.labels)).any(axis=1), dtype=np.bool_)

    @property
    def has_text(self) -> NDArray[np.bool_]:
        """Return rows whose prompt is known, bool (n,)."""
        if self.requests is None:
            return np.zeros(len(self), dtype=np.bool_)
        return np.array([each is not None for each in self.requests], dtype=np.bool_)

    def prompts(self) -> tuple[RouterRequest, ...]:
        """Return the prompts of a table whose rows all have one."""
        assert self.requests is not None
        found = tuple(each for each in self.requests if each is not None)
        assert len(found) == len(self)
        return found

    @property
    def lengths(self) -> Floats:
        """Characters of the prompts, float64 (n,)."""
        found: Floats = np.expm1(self.views.dense[:, 0].astype(np.float64))
        return found

    def weighted_since(self, since_s: float) -> LearningTable:
        """Return the rows with sampling weight 0 before a moment; earlier ones carry their labels only."""
        return replace(self, sampling_weight=np.where(self.created_s >= since_s, self.sampling_weight, 0.0))

    def take(self, rows: Ints) -> LearningTable:
        """Return some of the rows, in the given order."""
        arrays = {name: getattr(self, name)[rows] for name in _ARRAYS}
        return replace(
            self,
            request_ids=tuple(self.request_ids[i] for i in rows),
            views=self.views.take(rows),
            policies=tuple(self.policies[i] for i in rows),
            overrides=tuple(self.overrides[i] for i in rows),
            tools=tuple(self.tools[i] for i in rows),
            requests=None if self.requests is None else tuple(self.requests[i] for i in rows),
            **arrays,
        )

    def weights(self) -> Floats:
        """Inverse probability of each label, float64 (n, T - 1): of the tier's having answered and of the draw.

        Labels of rows outside the frame stand for no traffic but their own.
        """
        started = np.where(self.label_origins == LabelOrigin.UP, self.propensity[:, :-1], self._taken()[:, None])
        is_drawn = (
            np.isin(self.label_origins, (LabelOrigin.UP, LabelOrigin.DOWN, LabelOrigin.DERIVED))
            & (self.sampling_weight > 0)[:, None]
        )
        chance = np.where(is_drawn, started * self.chance, 1.0)
        found: Floats = self.fitting_weight()[:, None] / np.maximum(chance, LEAST_CHANCE)
        return found

    def fitting_weight(self) -> Floats:
        """Return rows outside the frame weigh as one request where labels are fitted."""
        return np.where(self.sampling_weight > 0, self.sampling_weight, 1.0)

    def _taken(self) -> Floats:
        taken: Floats = np.maximum(self.propensity[np.arange(len(self)), self.served], LEAST_CHANCE)
        return taken

    def checked(self) -> CheckedRows:
        """Return the rows that carry a label, as an adjustment is fitted on them."""
        rows = np.flatnonzero(self.is_checked)
        return CheckedRows(
            views=self.views.take(rows),
            labels=self.labels[rows],
            weights=self.weights()[rows],
            groups=self.groups[rows],
        )

    def shifted_outcomes(self, guess: Floats) -> Floats:
        """Unbiased stand-ins for every tier's outcome on every row of the frame, float64 (n, T).

        A guess, corrected where the truth was seen by the inverse of the chance of seeing it (Robins, Rotnitzky and
        Zhao 1994). A tier's answer may be seen because it was served and checked, or because a dearer one was served
        and the tier asked beside it; each sight counts by its own share of the two chances together (the balance
        heuristic), which no outcome influences. The top tier's outcome is 1 by definition.

        Parameters
        ----------
        guess : float64 (n, T), P(as good), made without these rows' labels
        """
        found = guess.copy()
        found[:, -1] = 1.0
        share_up = self._share_of_up()
        rows = np.arange(len(self))
        for tier in range(self.num_tiers - 1):
            for origin, started, share in (
                (LabelOrigin.UP, self.propensity[:, tier], share_up[:, tier]),
                (LabelOrigin.DOWN, self.propensity[rows, self.served], 1.0 - share_up[:, tier]),
            ):
                seen = np.flatnonzero((self.label_origins[:, tier] == origin) & (self.sampling_weight > 0))
                chance = np.maximum(started[seen] * self.chance[seen, tier], LEAST_CHANCE)
                found[seen, tier] += share[seen] * (self.labels[seen, tier] - guess[seen, tier]) / chance
        return found

    def sights(self) -> tuple[Ints, Floats]:
        """Return the tier whose outcome each row shows, int64 (n,), and every tier's probability of it, float64 (n, T).

        A row without a label shows the top tier's, which is known without looking.
        """
        up, down = self._chances()
        chance = np.empty((len(self), self.num_tiers))
        chance[:, :-1] = np.clip(up + down, LEAST_CHANCE, 1.0)
        chance[:, -1] = np.maximum(1.0 - chance[:, :-1].sum(axis=1), LEAST_CHANCE)
        known = ~np.isnan(self.labels)
        seen = np.where(known.any(axis=1), known.argmax(axis=1), self.num_tiers - 1)
        return seen.astype(np.int64), chance

    def _share_of_up(self) -> Floats:
        """Return the share of the tier's own check in a row's probability of showing its outcome."""
        up, down = self._chances()
        return np.divide(up, up + down, out=np.ones_like(up), where=up + down > 0)

    def _chances(self) -> tuple[Floats, Floats]:
        """Return the probabilities to see a tier's outcome: by its own check, beside the top tier; float64 (n, T - 1).

        By what is typical under the row's policy, apart for what was chosen and what is explored: a policy that never
        asks a tier beside the top one leaves its own checks the whole. Only answers of the top tier count as asked
        beside, see :class:`LabelOrigin`.
        """
        up, down = (np.zeros((len(self), self.num_tiers - 1)) for _ in range(2))
        names, policy = np.unique(np.array(self.policies, dtype=np.str_), return_inverse=True)
        for number in range(len(names)):
            for tier in range(self.num_tiers - 1):
                for origin, started, found in (
                    (LabelOrigin.UP, tier, up),
                    (LabelOrigin.DOWN, self.num_tiers - 1, down),
                ):
                    is_chosen = self.propensity[:, started] >= 0.5
                    for kind in (is_chosen, ~is_chosen):
                        rows = np.flatnonzero((policy == number) & kind)
                        drawn = self.chance[rows, tier][self.label_origins[rows, tier] == origin]
                        found[rows, tier] = self.propensity[rows, started] * _typical(drawn)
        return up, down


def _typical(chances: Floats) -> float:
    return float(np.median(chances)) if len(chances) else 0.0
