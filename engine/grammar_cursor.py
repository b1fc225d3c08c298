"""Follows one answer through its grammar: which tokens may come next, and whether it is complete.

Reasoning before the answer is free, but cannot end the request. After it, one token of line breaks may come before
the answer, as models write it; it is not part of the answer (:mod:`engine.text_stream`). From then on every token is
the grammar's. An answer that nothing can be added to is complete, and the request ends with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from enum import Enum

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from engine.errors import GrammarTooLarge
from engine.request import Constraint

Masks = NDArray[np.int32]

# A mask takes 0.03 ms as a rule. What a request's masks take beyond this each is added up, and it ends at the sum.
_USUAL_S = 0.02
_MOST_EXCESS_S = 1.0


class _Phase(Enum):
    BEFORE = 0  # the answer, or reasoning
    REASONING = 1
    AFTER = 2  # a line break, or the answer
    SPACED = 3  # the answer, after a line break
    ANSWER = 4


class GrammarCursor:
    """Holds one answer's place in its grammar; belongs to the engine's thread.

    Parameters
    ----------
    constraint : the grammar, and where it begins
    ignores_eos : the end-of-sequence tokens are left to answers that can only end
    """

    __slots__ = ("_constraint", "_excess_s", "_grammar", "_ignores_eos", "_matcher", "_phase")

    def __init__(self, constraint: Constraint, *, ignores_eos: bool = False) -> None:
        self._constraint = constraint
        self._grammar = constraint.grammar
        self._ignores_eos = ignores_eos
        self._matcher: LLMatcher | None = None  # not before it is needed: many may wait
        self._excess_s = 0.0
        if constraint.in_reasoning:
            self._phase = _Phase.REASONING
        else:
            self._phase = _Phase.ANSWER if constraint.open_id is None else _Phase.BEFORE

    @property
    def num_words(self) -> int:
        """Return the int32 words of a mask, one bit per token."""
        return -(-self._grammar.vocab_size // 32)

    @property
    def is_whole(self) -> bool:
        """Tell whether the answer satisfies the grammar as it is."""
        return self._phase is _Phase.ANSWER and self._own().is_accepting()

    @property
    def is_plain(self) -> bool:
        """Tell whether the matcher's mask is the mask but for :meth:`finish`."""
        return self._phase is _Phase.ANSWER

    @property
    def matcher(self) -> LLMatcher:
        """Return the matcher, for masks of many answers at once, each followed by :meth:`finish`."""
        return self._own()

    def finish(self, masks: Masks, row: int) -> None:
        """Complete a mask that the matcher filled, and take note if it failed."""
        if self._own().is_error():
            self._excess_s = np.inf  # the next token ends the request
            masks[row] = -1
        elif self._ignores_eos:
            open_ended = masks[row] & self._grammar.all_but_eos
            if open_ended.any():
                masks[row] = open_ended

    def push(self, token_id: int, *, is_forced: bool = False) -> bool:
        """Take a token of the output; True if the answer is complete.

        Parameters
        ----------
        is_forced : written by the engine itself; line breaks of these after reasoning are no part of the answer

        Raises
        ------
        GrammarTooLarge
            Following it takes more than may be spent on it.
        """
        is_taken = self._step(token_id) or (is_forced and token_id in self._grammar.line_breaks)
        if not is_taken or self._excess_s > _MOST_EXCESS_S:
            raise GrammarTooLarge("The grammar became too complex to follow in the middle of the answer; simplify it.")
        return self._phase is _Phase.ANSWER and self._own().is_stopped()

    def num_allowed(self, token_ids: Seq[int]) -> int:
        """Count how many of these tokens may come next, one after the other."""
        if self._phase is _Phase.ANSWER:
            return self._own().validate_tokens(list(token_ids))
        return self._walk(token_ids)

    def fill(self, masks: Masks, token_ids: Seq[int] = ()) -> None:
        """Write which tokens may come next, a bit each, the lowest first.

        Parameters
        ----------
        masks : int32 (m, words), each row contiguous; the last is for after all of ``token_ids``, the one before for
            after all but the last of them, and so on
        token_ids : tokens that may follow, m - 1 or more; rows after one that may not are all ones
        """
        began_s = time.thread_time()
        self._walk(token_ids, masks)
        self._excess_s += max(time.thread_time() - began_s - _USUAL_S * len(masks), 0.0)

    def _own(self) -> LLMatcher:
        if self._matcher is None:
            self._matcher = self._grammar.matcher()
        return self._matcher

    def _walk(self, token_ids: Seq[int], masks: Masks | None = None) -> int:
        """Go on by tokens as far as they are allowed, filling masks on the way, and come back."""
        phase, num_taken, num_consumed = self._phase, 0, 0
        first = len(token_ids) if masks is None else len(token_ids) + 1 - len(masks)
        for place in range(len(token_ids) + 1):
            if masks is not None and place >= first:
                self._fill(masks, place - first)
            if place == len(token_ids) or not self._step(token_ids[place]):
                break
            num_taken += 1
            num_consumed += self._phase is _Phase.ANSWER
        if masks is not None:
            masks[max(num_taken + 1 - first, 0) :] = -1
        if num_consumed:
            self._own().rollback(num_consumed)
        self._phase = phase
        return num_taken

    def _step(self, token_id: int) -> bool:
        """Take one token; False, and nothing changes, if it is not allowed."""
        if self._phase is _Phase.REASONING:
            if token_id == self._constraint.close_id:
                self._phase = _Phase.AFTER
            return token_id not in self._grammar.eos_token_ids
        if self._phase is _Phase.BEFORE and token_id == self._constraint.open_id:
            self._phase = _Phase.REASONING
            return True
        if self._phase is _Phase.AFTER and token_id in self._grammar.line_breaks:
            self._phase = _Phase.SPACED
            return True
        if self._own().try_consume_tokens([token_id]) != 1:
            return False
        self._phase = _Phase.ANSWER
        return True

    def _fill(self, masks: Masks, row: int) -> None:
        if self._phase is _Phase.REASONING:
            masks[row] = self._grammar.all_but_eos
            return
        mask = masks[row]
        self._own().unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.finish(masks, row)
        if self._phase is _Phase.BEFORE and self._constraint.open_id is not None:
            _set(mask, (self._constraint.open_id,))
        elif self._phase is _Phase.AFTER:
            _set(mask, self._grammar.line_breaks)


def _set(mask: Masks, token_ids: Seq[int] | frozenset[int]) -> None:
    words = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
