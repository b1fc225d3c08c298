"""Checks an answer predicted by the caller as one long draft, instead of writing it token by token.

The target reads predicted tokens many at a time and keeps those it would have written itself, by the same rule as any
certain draft (:mod:`engine.draft_verifier`): greedy and seeded output is what it would have been, token for token, and
sampled output is the target's own draw at every position, so its distribution is unchanged. At the first token the
target would not have written it goes on by itself from its own choice; the keys and values of what stood are kept.

How much is checked in one step is bounded, since a wrong prediction is computed in vain: the first check is short, each
check that stands whole doubles the next. After a difference the prediction is taken up again where the latest tokens of
the answer are found further on in it; each time that proves wrong, a longer match is asked for.

References
----------
Leviathan et al. 2023, Algorithm 1, with a draft distribution of one point. Saxena 2023, "Prompt lookup decoding", for
the search by n-grams.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.request import Prediction

FIRST_CHECK = 32
"""Tokens of the first check: about what a step takes beside a prompt without being slower for it."""
LONGEST_CHECK = 128
MOST_CHECKED = 256
"""Tokens checked of one sequence, and of all, in a step: each takes a row of logits, and 256 rows of a vocabulary of
150,000 tokens are 154 MB."""
_CHECK_AGAIN = 8
_SHORTEST_MATCH, _LONGEST_MATCH = 2, 6


class PredictionCursor:
    """Follows where one answer stands in the text that was predicted for it.

    Attributes
    ----------
    num_accepted : predicted tokens that the answer has
    """

    __slots__ = (
        "_after_id",
        "_at",
        "_ids",
        "_index",
        "_is_resumed",
        "_is_waiting",
        "_length",
        "_lost_at",
        "_match",
        "_tail",
        "num_accepted",
    )

    def __init__(self, prediction: Prediction) -> None:
        self._ids = prediction.token_ids
        self._after_id = prediction.after_id
        self._is_waiting = prediction.after_id is not None
        # The next predicted token; None when out of step.
        self._at: int | None = None if self._is_waiting or not self._ids else 0
        self._lost_at = 0
        self._length = FIRST_CHECK
        self._match = _SHORTEST_MATCH
        self._is_resumed = False  # taken up after a difference, and nothing stood since
        self._index: dict[tuple[int, ...], list[int]] | None = None
        self._tail: list[int] = []
        self.num_accepted = 0

    @property
    def num_predicted(self) -> int:
        return len(self._ids)

    @property
    def num_wanted(self) -> int:
        """Return the tokens it would like the next step to check; 0 while the answer is elsewhere."""
        return 0 if self._at is None else min(self._length, len(self._ids) - self._at)

    def propose(self, count: int) -> list[int]:
        """Return the next ``count`` predicted tokens."""
        return [] if self._at is None else list(self._ids[self._at : self._at + count])

    def observe(self, token_ids: Seq[int], num_checked: int = 0) -> None:
        """Follow the answer by these tokens, of which ``num_checked`` predicted ones had been proposed."""
        for token_id in token_ids:
            self._follow(token_id)
        if num_checked and self._at is not None:
            # Everything proposed stood, and so did the draw after it.
            self._length = min(2 * self._length, LONGEST_CHECK)
        if self._at is None and not self._is_waiting:
            self._resume()

    def _follow(self, token_id: int) -> None:
        if self._is_waiting:
            if token_id == self._after_id:
                self._is_waiting, self._at = False, 0 if self._ids else None
            return
        self._tail = [*self._tail[1 - _LONGEST_MATCH :], token_id]
        if self._at is None:
            return
        if token_id == self._ids[self._at]:
            self.num_accepted += 1
            self._is_resumed = False
            following = self._at + 1
            self._at, self._lost_at = (following if following < len(self._ids) else None), following
            return
        if self._is_resumed:
            self._match = min(self._match + 1, _LONGEST_MATCH)
        self._lost_at, self._at = self._at, None
        self._length = _CHECK_AGAIN

    def _resume(self) -> None:
        """Find the answer's latest tokens further on in the prediction, the longest match first."""
        if self._lost_at + self._match >= len(self._ids):
            return
        if self._index is None:
            self._index = _index(self._ids)
        for size in range(min(_LONGEST_MATCH, len(self._tail)), self._match - 1, -1):
            for end in self._index.get(tuple(self._tail[-size:]), ()):
                # Only forward: what was passed has been checked.
                if end > self._lost_at:
                    self._at, self._is_resumed = end, True
                    return


def _index(ids: Seq[int]) -> dict[tuple[int, ...], list[int]]:
    """Map each n-gram that has a token after it to where it ends, first to last."""
    found: dict[tuple[int, ...], list[int]] = {}
    for end in range(_SHORTEST_MATCH, len(ids)):
        for size in range(_SHORTEST_MATCH, min(_LONGEST_MATCH, end) + 1):
            found.setdefault(tuple(ids[end - size : end]), []).append(end)
    return found
