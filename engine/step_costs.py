"""Estimates what a step costs, from the steps that ran.

The table answers "how long would a step of n tokens take?" for choosing draft lengths, and it is what a router can ask
before it sends a request somewhere. Sizes are kept in quarters of an octave: a step with a few drafts must not share an
average with one without, and finer sizes would each be seen too rarely.
"""

from __future__ import annotations

import math

from engine.stats import Ewma


class StepCosts:
    """Estimates the seconds of a step by its number of tokens.

    Where nothing was measured, the line through the two nearest measured sizes is used; with one size measured, that
    one, which is optimistic for larger steps and so makes them be tried once.
    """

    def __init__(self, weight: float = 0.1) -> None:
        self._weight = weight
        self._buckets: dict[int, tuple[Ewma, Ewma]] = {}  # size class -> (mean tokens, mean seconds)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step."""
        sizes, times = self._buckets.setdefault(
            round(4 * math.log2(num_tokens)), (Ewma(self._weight), Ewma(self._weight))
        )
        # One slow step (a page fault, another process) must not move the estimate far.
        if times.value is not None:
            seconds = min(seconds, 3.0 * times.value)
        sizes.observe(num_tokens)
        times.observe(seconds)

    def estimate(self, num_tokens: int) -> float | None:
        """Return the seconds of a step of ``num_tokens``, or None before any was seen."""
        points = sorted((sizes.value or 0.0, times.value or 0.0) for sizes, times in self._buckets.values())
        if not points:
            return None
        if len(points) == 1:
            return points[0][1]
        above = next((i for i, (size, _) in enumerate(points) if size >= num_tokens), len(points) - 1)
        (x0, y0), (x1, y1) = points[max(above, 1) - 1], points[max(above, 1)]
        # A larger step is never taken to be cheaper: noise between neighbours must not pay for drafts.
        slope = max((y1 - y0) / (x1 - x0), 0.0) if x1 > x0 else 0.0
        return max(y0 + slope * (num_tokens - x0), min(y0, y1) * 0.5)


# By so much a token of a small step may cost more than one of the best step.
_THRIFTY = 1.2


class ChunkCosts:
    """Estimates how many tokens a step with prompts may hold.

    Beside other engines every step takes longer. Chunks are cut by the longer time, but not to sizes at which a token
    costs notably more than it need: then each step would read all weights for a few tokens, and the work would grow
    just when there is least room for it. So what sizes cost is learned of steps that had the device to themselves
    (others may only lower it), and by how much other engines lengthen steps is learned beside it.
    """

    def __init__(self, weight: float = 0.2) -> None:
        self._weight = weight
        self._seconds: dict[int, tuple[int, float]] = {}  # size class -> (tokens of the largest seen, seconds)
        self._crowding = 1.0  # how many times as long steps take now

    def observe(self, num_tokens: int, seconds: float, *, alone: bool) -> None:
        """Learn from a step; ``alone`` says that the device did nothing else."""
        key = round(4 * math.log2(num_tokens))
        size, known_s = self._seconds.get(key, (num_tokens, seconds))
        moved_s = known_s + self._weight * (seconds - known_s) if alone else min(known_s, seconds)
        self._seconds[key] = max(size, num_tokens), moved_s
        crowding = 1.0 if alone or not moved_s else seconds / moved_s
        self._crowding += self._weight * (crowding - self._crowding)

    def chunk(self, seconds: float) -> int | None:
        """Return the tokens of a step that should take ``seconds``, or None before anything was seen."""
        most = self.most_tokens(seconds)
        if most is None:
            return None
        return max(self.most_tokens(seconds / max(self._crowding, 1.0)) or 0, self._thrifty(most))

    def _thrifty(self, most: int) -> int:
        """Return the smallest size seen, up to ``most``, at which a token costs little more than at the best."""
        each_s = {size: size_s / size for size, size_s in self._seconds.values() if size <= most}
        best_s = min(each_s.values(), default=0.0)
        return min((size for size, cost_s in each_s.items() if cost_s <= _THRIFTY * best_s), default=most)

    def most_tokens(self, seconds: float) -> int | None:
        """Return the tokens computed in ``seconds`` with the device to oneself, or None before anything was seen.

        Between sizes that were seen it is the straight line; beyond the largest it goes on in proportion, which is
        careful, since part of a step's time is the same for any size.
        """
        below, below_s = 0.0, 0.0
        for size, size_s in sorted(self._seconds.values()):
            # A larger step is never taken to be the cheaper one.
            size_s = max(size_s, below_s)
            if size_s > seconds:
                share = (seconds - below_s) / (size_s - below_s)
                return int(below + share * (size - below))
            below, below_s = size, size_s
        return int(below * seconds / below_s) if below_s else None

    def least_worthwhile(self) -> int:
        """Return the tokens from which on computing takes longer than a step's fixed part, reading the weights."""
        if not self._seconds:
            return 0
        _, fixed_s = min(self._seconds.values())
        return self.most_tokens(2 * fixed_s) or 0
