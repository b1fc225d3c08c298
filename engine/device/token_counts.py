"""Counts the tokens that a sequence has had, on the device, for its penalties.

Every penalised sequence has a line; a step counts what it draws there by itself, so the next step can be launched
before the host knows the token. A line is written anew from the host's tokens whenever it cannot be right: when it
changes hands, when the host drew a token, when a drawn token was withdrawn for another, when a step found no memory and
may or may not have counted.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.sampling import Penalties
from engine.scheduler import ScheduledSequence
from engine.sequence import Sequence


@dataclass(slots=True)
class _CountLine:
    sequence: Sequence
    length: int = -1  # tokens of the sequence that are in it once the steps launched so far have run
    drawn_by: ScheduledSequence | None = None  # what drew the last of them
    last_used: int = 0


class TokenCounts:
    """Keeps a line for each penalised sequence of a step; memory is taken with the first.

    Parameters
    ----------
    max_sequences : most in one step
    vocab_size : V
    device : where logits are
    """

    def __init__(self, max_sequences: int, vocab_size: int, device: torch.device) -> None:
        self._max_sequences = max_sequences
        self._vocab_size = vocab_size
        self._device = device
        # Line 0 is nobody's: rows without penalties read it and count into it, to no effect.
        self._unused = list(range(max_sequences, 0, -1))
        self._lines: dict[int, tuple[int, _CountLine]] = {}  # by id of the sequence
        self._turn = 0
        self._tables: tuple[Tensor, Tensor] | None = None

    def lines_for(self, items: Seq[ScheduledSequence], due: Callable[[Sequence], Tensor]) -> list[int]:
        """Return each item's line, up to date, 0 without penalties; the step launched next draws for all of them.

        Parameters
        ----------
        due : a sequence's token that only the device knows, int64 (1,) on it; asked for where a line is written anew
        """
        self._turn += 1
        penalised = [item for item in items if is_penalised(item.sequence)]
        for item in penalised:
            if id(item.sequence) in self._lines:
                self._lines[id(item.sequence)][1].last_used = self._turn
        for item in penalised:
            number, line = self._line_of(item.sequence)
            is_current = line.drawn_by is None or line.drawn_by.draws
            if line.length != item.sequence.num_tokens or not is_current:
                self._write(number, item.sequence, due)
            line.length, line.drawn_by = item.sequence.num_tokens + 1, item
        return [self._lines[id(item.sequence)][0] if is_penalised(item.sequence) else 0 for item in items]

    def distrust(self, items: Seq[ScheduledSequence]) -> None:
        """Have the items' lines written anew: whether the step that was to draw for them counted is not known."""
        for item in items:
            held = self._lines.get(id(item.sequence))
            if held is not None:
                held[1].length = -1

    def penalties(self, lines: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor) -> Penalties:
        """Return the tables with the rows' lines, int64 (R,), and strengths, float32 (R,)."""
        prompts, counts = self._made()
        return Penalties(presence, frequency, repetition, lines, counts, prompts)

    def _line_of(self, sequence: Sequence) -> tuple[int, _CountLine]:
        held = self._lines.get(id(sequence))
        if held is None:
            if not self._unused:
                # A step holds no more sequences than there are lines, so one of them is not in this step.
                oldest = min(self._lines, key=lambda key: self._lines[key][1].last_used)
                self._unused.append(self._lines.pop(oldest)[0])
            held = self._lines[id(sequence)] = self._unused.pop(), _CountLine(sequence, last_used=self._turn)
        return held

    def _write(self, number: int, sequence: Sequence, due: Callable[[Sequence], Tensor]) -> None:
        prompts, counts = self._made()
        on_gpu = self._device.type == "cuda"
        ids = torch.tensor(sequence.token_ids, dtype=torch.int64, pin_memory=on_gpu).to(self._device, non_blocking=True)
        prompts[number] = False
        prompts[number].index_fill_(0, ids[: sequence.num_prompt], True)
        output = ids[sequence.num_prompt :]
        if sequence.num_due:
            output = torch.cat([output, due(sequence)])
        counts[number] = 0
        counts[number].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def _made(self) -> tuple[Tensor, Tensor]:
        """Return the prompts' tokens, bool (lines, V), and how often each is in the output, int32 (lines, V)."""
        if self._tables is None:
            shape = (self._max_sequences + 1, self._vocab_size)
            self._tables = (
                torch.zeros(shape, dtype=torch.bool, device=self._device),
                torch.zeros(shape, dtype=torch.int32, device=self._device),
            )
        return self._tables


def is_penalised(sequence: Sequence) -> bool:
    """Tell whether tokens it has had change its next one's chances."""
    sampling = sequence.request.sampling
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)
