"""Fills the masks of a step's grammars: those that only a matcher decides in one call, the others one by one."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from llguidance import LLExecutor

from engine.grammar_cursor import GrammarCursor, Masks

_MOST_THREADS = 8
# One call from here on: it hands over to other threads, which takes as long as filling a few masks here.
_FEW = 4
# Masks are filled side by side unless that took so long lately: then each is timed, and answers for itself.
_SLOW_S = 0.02
_NUM_TIMED = 100


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Names ``num_rows`` rows from ``first`` on of one sequence: the last is for after all of ``draft_ids``."""

    grammar: GrammarCursor
    first: int
    num_rows: int = 1
    draft_ids: Seq[int] = ()


class MaskFiller:
    """Fills masks; belongs to the engine's thread. Its other threads start with the first step that needs them."""

    def __init__(self) -> None:
        self._num_threads = num_threads()
        self._executor: LLExecutor | None = None
        self._num_timed = 0

    def fill(self, masks: Masks, rows: Seq[MaskedRows]) -> None:
        """Write which tokens may come next, a bit each, the lowest first.

        Parameters
        ----------
        masks : int32 (R, words), C-contiguous
        rows : which of its rows to write; the others are left as they are
        """
        together = self._together(rows)
        if together:
            self._fill_together(masks, together)
        if len(together) < len(rows):
            done = {each.first for each in together}
            for each in rows:
                if each.first not in done:
                    each.grammar.fill(masks[each.first : each.first + each.num_rows], each.draft_ids)

    def _together(self, rows: Seq[MaskedRows]) -> list[MaskedRows]:
        if self._num_threads < 2:
            return []  # one other thread gains nothing, and is waited for where others want its core
        if self._num_timed > 0:
            self._num_timed -= 1
            return []
        plain = [each for each in rows if not each.draft_ids and each.grammar.is_plain]
        return plain if len(plain) >= _FEW else []

    def _fill_together(self, masks: Masks, rows: Seq[MaskedRows]) -> None:
        began_s = time.perf_counter()
        if self._executor is None:
            self._executor = LLExecutor(self._num_threads)
        matchers = [(each.grammar.matcher, each.first) for each in rows]
        self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(masks))
        for each in rows:
            each.grammar.finish(masks, each.first)
        if time.perf_counter() - began_s > _SLOW_S:
            self._num_timed = _NUM_TIMED


def num_threads() -> int:
    """Return how many threads fill masks: half of the cores, for the step's arithmetic has the others."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2))
