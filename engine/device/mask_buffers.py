"""Brings grammars' token masks to the device, between a step's logits and its draws.

Which tokens may come next depends on the token before, which the step before draws. So a step with a grammar in it is
launched in two parts. The first computes logits and is launched before those tokens are known, like any step. While the
device is busy with it the host takes the tokens in, fills the masks, and launches the second part, which draws. The
device waits only if the host takes longer than it computes.

Logits and masks lie where captured graphs find them. Rows without a grammar are all ones; where no row has one there
are no masks, and one part.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.mask_filler import MaskedRows, MaskFiller
from engine.scheduler import ScheduledSequence

# Rows of logits beyond one per sequence, for drafts; a step with more leaves its draws to the host.
_DRAFT_ROWS = 256


def masked_rows(items: Seq[ScheduledSequence], logits_rows: Seq[int]) -> list[MaskedRows]:
    """Return what has to be masked of the sequences drawn from, whose rows of logits these are, in order.

    A sequence has a row to draw from, and one after it for each draft.
    """
    rows, place = [], 0
    for item in items:
        sequence = item.sequence
        # Whoever ended meanwhile has no grammar any more, and nobody looks at its rows.
        if sequence.grammar is not None and len(sequence.draft_ids) == item.num_drafts:
            rows.append(
                MaskedRows(sequence.grammar, logits_rows[place], item.num_drafts + 1, tuple(sequence.draft_ids))
            )
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
        self._filler = MaskFiller()

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
        self._filler.fill(masks, rows)
        end = max((each.first + each.num_rows for each in rows), default=0)
        num_changed = max(end, self._num_written)
        device[:num_changed].copy_(pinned[:num_changed], non_blocking=True)
        self._num_written = end
