"""Decides how many tokens to draft for whom: as many as measured acceptance and measured costs say will pay.

A step with drafts costs the target's step over more tokens and the drafter's passes; it gives each sequence one token
and every draft that stands. The length of every draft is chosen to make tokens per second largest. Zero is an ordinary
answer, so speculation switches itself off where it would lose: many sequences at once, or a drafter that guesses badly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.drafter import Drafter
from engine.runner import StepResult
from engine.scheduler import StepPlan
from engine.sequence import Sequence
from engine.step_costs import StepCosts

_WEIGHT = 0.1  # of one draft token's fate in a sequence's acceptance rate
_PRIOR, _PRIOR_WEIGHT = 0.7, 4.0  # acceptance assumed before anything was seen, and the drafts that is worth
_MEMORY = 0.998  # what a judged draft keeps of its say in the common rate when the next one is judged
_MARGIN = 1.05  # what drafting must promise over none: estimates are noisy, and uneven steps cost a little more
_PROBE_EVERY = 48  # tokens after which a sequence that is not drafted for gets one draft, to notice a change
_SELDOM = 16  # times as many where not even a drafter that is always right would pay


class Speculator:
    """Sets draft lengths, has drafts made, learns from what became of them.

    Parameters
    ----------
    drafter : makes the drafts
    max_draft_tokens : most per sequence and step
    adaptive : False always drafts ``max_draft_tokens``, for tests and measurements

    Attributes
    ----------
    clock : seconds of work; the engine sets the one by which it bills
    padded : tokens that a step of so many sequences really computes when the longest draft has so many; the engine sets
        it where every sequence is padded to the longest draft. There no prompt can be computed beside a check.
    """

    def __init__(self, drafter: Drafter, *, max_draft_tokens: int = 5, adaptive: bool = True) -> None:
        self.drafter = drafter
        self.max_draft_tokens = max_draft_tokens
        self.adaptive = adaptive
        self.target_costs = StepCosts()
        self.draft_costs = StepCosts()
        self.num_drafted = 0
        self.num_accepted = 0
        self.clock: Callable[[], float] = time.perf_counter
        self.padded: Callable[[int, int], int] | None = None
        self._judged = 0.0
        self._stood = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Return the share of recent draft tokens that stood; None before any was judged."""
        return self._stood / self._judged if self._judged else None

    def set_limits(self, decoding: Seq[Sequence], *, other_tokens: int = 0) -> None:
        """Give each decoding sequence its ``draft_limit`` for the step about to be scheduled.

        Parameters
        ----------
        decoding : sequences that could be drafted for
        other_tokens : tokens the step will hold besides theirs
        """
        able = []
        for sequence in decoding:
            room = sequence.max_output - sequence.num_output - 1
            sequence.draft_limit = min(self.max_draft_tokens, room) if sequence.request.speculate else 0
            if sequence.draft_limit > 0:
                able.append(sequence)
        if not self.adaptive or not able:
            return
        if self.padded is not None and other_tokens:
            for sequence in able:
                sequence.draft_limit = 0
            return
        others = len(decoding) - len(able), other_tokens
        best = self._best_lengths(able, *others, [self._rate_of(sequence) for sequence in able])
        due = [not length and self._is_due(sequence, 1) for sequence, length in zip(able, best, strict=True)]
        if any(due) and not any(self._best_lengths(able, *others, [1.0] * len(able))):
            due = [self._is_due(sequence, _SELDOM) for sequence in able]
        for sequence, length, is_due in zip(able, best, due, strict=True):
            sequence.draft_limit = min(sequence.draft_limit, max(length, int(is_due)))

    def _is_due(self, sequence: Sequence, times: int) -> bool:
        every = times * _PROBE_EVERY
        return sequence.num_output % every == every - 1

    def _best_lengths(self, able: Seq[Sequence], num_undrafted: int, other_tokens: int, rates: Seq[float]) -> list[int]:
        """Draft lengths that make (expected tokens of all that decode) / (expected seconds) largest.

        A draft token at depth j stands with probability a**j, a being its sequence's acceptance rate. Depths are tried
        from 0 up; at each, a sequence takes part only where that probability repays the token's own share of the
        cost at the rate without drafts.

        Parameters
        ----------
        num_undrafted : sequences that decode without drafts in the same step
        other_tokens : further tokens in it
        rates : a of each sequence
        """
        lengths, num_others = [0] * len(able), num_undrafted + other_tokens
        expected = float(len(able) + num_undrafted)
        alone_s = self._step_s(num_others, lengths)
        if alone_s is None or alone_s <= 0.0:
            return [sequence.draft_limit for sequence in able]
        # Where shorter drafts are padded to the longest, one more draft token costs nothing.
        with_each_s = None if self.padded is not None else self._step_s(num_others, [1] * len(able))
        per_draft_s = max((with_each_s or alone_s) - alone_s, 0.0) / len(able)
        least = expected / alone_s * per_draft_s
        best, best_rate = list(lengths), _MARGIN * expected / alone_s
        draft_s = 0.0
        for depth in range(1, self.max_draft_tokens + 1):
            joined = [
                i
                for i, sequence in enumerate(able)
                if lengths[i] == depth - 1 and depth <= sequence.draft_limit and rates[i] ** depth >= least
            ]
            if not joined:
                break
            for i in joined:
                lengths[i] = depth
                expected += rates[i] ** depth
            draft_s += self.draft_costs.estimate(len(joined)) or 0.0
            rate = expected / ((self._step_s(num_others, lengths) or alone_s) + draft_s)
            if rate > best_rate:
                best, best_rate = list(lengths), rate
        return best

    def _step_s(self, num_others: int, lengths: Seq[int]) -> float | None:
        """Estimate the seconds of a step of the target with drafts of these lengths."""
        if self.padded is not None:
            return self.target_costs.estimate(self.padded(num_others + len(lengths), max(lengths)))
        return self.target_costs.estimate(num_others + len(lengths) + sum(lengths))

    def _rate_of(self, sequence: Sequence) -> float:
        if sequence.acceptance is not None:
            return sequence.acceptance
        return (self._stood + _PRIOR * _PRIOR_WEIGHT) / (self._judged + _PRIOR_WEIGHT)

    def propose(self, plan: StepPlan) -> None:
        """Have drafts made where the scheduler reserved room; the plan then holds what was really proposed."""
        items = [item for item in plan.items if item.num_drafts and not item.is_predicted]
        if not items:
            return
        began_s = self.clock()
        sequences = [item.sequence for item in items]
        passes = self.drafter.propose(sequences, [item.num_drafts for item in items])
        if passes:
            self.draft_costs.observe(len(items), (self.clock() - began_s) / passes)
        for item in items:
            made = len(item.sequence.draft_ids)
            plan.num_tokens -= item.num_drafts - made
            item.num_drafts = made

    def observe(self, results: Seq[StepResult], num_tokens: int, seconds: float | None) -> None:
        """Learn from a step of the target that took ``num_tokens`` and ``seconds``, drafting not included.

        ``seconds`` is None where the time of the step says nothing of others.
        """
        # A prompt's tokens cost otherwise than as many sequences' next ones.
        if seconds is not None and all(result.item.num_tokens == 1 for result in results):
            if self.padded is not None:
                num_tokens = self.padded(len(results), max(result.item.num_drafts for result in results))
            self.target_costs.observe(num_tokens, seconds)
        for result in results:
            drafted = result.item.num_drafts
            if not drafted or result.item.is_predicted or result.error is not None:
                continue
            accepted = len(result.token_ids) - 1
            sequence = result.item.sequence
            sequence.drafted += drafted
            sequence.accepted += accepted
            self.num_drafted += drafted
            self.num_accepted += accepted
            rate = self._rate_of(sequence)
            # After the first rejection nothing was judged.
            for stood in [True] * accepted + [False] * (accepted < drafted):
                rate += _WEIGHT * (stood - rate)
                self._judged = self._judged * _MEMORY + 1.0
                self._stood = self._stood * _MEMORY + stood
            sequence.acceptance = rate

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that ended or was preempted."""
        sequence.draft_ids, sequence.draft_probs = [], None
        self.drafter.release(sequence)
