"""Brings grammars' token masks to the device, between a step's logits and its draws.

Which tokens may come next depends on the token before, which the step before draws. So a step with a grammar in it is
launched in two parts. The first computes logits and is launched before those tokens are known, like any step. While the
device is busy with it the host takes the tokens in, fills the masks, and launches the second part, which draws. The
device waits only if the host takes longer than it computes.

Logits and masks lie where captured graphs find them. Rows without a grammar are all ones; where no row has one there
are no masks, and one part.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLExecutor
from torch import Tensor

from engine.grammar_cursor import GrammarCursor
from engine.scheduler import ScheduledSequence

# Rows of logits beyond one per sequence, for drafts; a step with more leaves its draws to the host.
_DRAFT_ROWS = 256
_MOST_THREADS = 8
# Masks are filled side by side unless that took so long lately: then each is timed, and answers for itself.
_SLOW_S = 0.02
_NUM_TIMED = 100


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Names the rows of one sequence: ``first`` is drawn from, the ones after it check ``draft_ids``."""

    grammar: GrammarCursor
    first: int
    draft_ids: Seq[int]


def masked_rows(items: Seq[ScheduledSequence], logits_rows: Seq[int]) -> list[MaskedRows]:
    """Return what has to be masked of the sequences drawn from, whose rows of logits these are, in order."""
    rows, place = [], 0
    for item in items:
        sequence = item.sequence
        # Whoever ended meanwhile has no grammar any more, and nobody looks at its rows.
        if sequence.grammar is not None and len(sequence.draft_ids) == item.num_drafts:
            rows.append(MaskedRows(sequence.grammar, logits_rows[place], tuple(sequence.draft_ids)))
        place += item.num_drafts + 1
    return rows


class MaskBuffers:
    """Holds masks and logits of a step's rows; memory is taken with the first step that needs it.

    Parameters
    ----------
    max_sequences : most in one step
    vocab_size : V
    device : where logits are

    Attributes
    ----------
    max_rows : most rows of a step
    """

    def __init__(self, max_sequences: int, vocab_size: int, device: torch.device) -> None:
        self.max_rows = max(max_sequences, _DRAFT_ROWS)
        self._vocab_size = vocab_size
        self._device = device
        self._logits: Tensor | None = None
        self._masks: tuple[Tensor, Tensor] | None = None  # on the device, and on the host
        self._num_written = 0  # rows of the device's masks that are not all ones, the last of them and those before
        self._executor: LLExecutor | None = None
        self._num_timed = 0

    def logits(self, num_rows: int, dtype: torch.dtype) -> Tensor:
        """Return where a step's logits go, (num_rows, V)."""
        if self._logits is None:
            self._logits = torch.empty((self.max_rows, self._vocab_size), dtype=dtype, device=self._device)
            shape = (self.max_rows, -(-self._vocab_size // 32))
            pinned = torch.full(shape, -1, dtype=torch.int32, pin_memory=self._device.type == "cuda")
            self._masks = pinned.to(self._device, copy=True), pinned
        return self._logits[:num_rows]

    def masks(self, num_rows: int) -> Tensor:
        """Return where a step's masks are, int32 (num_rows, words)."""
        assert self._masks is not None
        return self._masks[0][:num_rows]

    def fill(self, rows: Seq[MaskedRows]) -> None:
        """Write the masks of a step and bring them to the device.

        The step before has been collected, so nobody reads the host's copy any more.
        """
        assert self._masks is not None
        device, pinned = self._masks
        masks = pinned.numpy()
        masks[: self._num_written] = -1
        self._fill(masks, rows)
        end = max((each.first + len(each.draft_ids) + 1 for each in rows), default=0)
        num_changed = max(end, self._num_written)
        device[:num_changed].copy_(pinned[:num_changed], non_blocking=True)
        self._num_written = end

    def _fill(self, masks: np.ndarray[tuple[int, ...], np.dtype[np.int32]], rows: Seq[MaskedRows]) -> None:
        plain = [each for each in rows if not each.draft_ids and each.grammar.is_plain]
        if len(plain) < 4 or self._num_timed > 0 or self._num_threads() < 2:
            plain = []
            self._num_timed -= self._num_timed > 0
        apart = {id(each) for each in plain}
        if plain:
            began_s = time.perf_counter()
            if self._executor is None:
                self._executor = LLExecutor(self._num_threads())
            matchers = [(each.grammar.matcher, each.first) for each in plain]
            self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(masks))
            for each in plain:
                each.grammar.check(masks[each.first])
            if time.perf_counter() - began_s > _SLOW_S:
                self._num_timed = _NUM_TIMED
        for each in rows:
            if id(each) not in apart:
                each.grammar.fill(masks[each.first : each.first + len(each.draft_ids) + 1], each.draft_ids)

    @staticmethod
    def _num_threads() -> int:
        return min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2)
