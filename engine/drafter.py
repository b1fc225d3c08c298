"""Proposes drafts, from the text so far or by a smaller model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.batch import Batch
from engine.blocks import BlockPool
from engine.draft_verifier import uses_rejection
from engine.kv_cache import KVCache
from engine.rng import uniform
from engine.sampler import LogitsRow, Sampler, draw
from engine.sequence import Sequence

if TYPE_CHECKING:
    from engine.runner import StepModel

DRAFT = 3  # the stream of `uniform` that draws drafts judged by rejection


class Drafter(Protocol):
    """Proposes tokens."""

    def propose(self, sequences: list[Sequence], counts: list[int]) -> int:
        """Fill ``draft_ids`` (at most ``counts[i]`` tokens) and ``draft_probs`` of each sequence.

        Returns
        -------
        Number of forward passes this took, catching up with new tokens included
        """

    def release(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence. Harmless if there is nothing."""


class NGramDrafter:
    """Proposes what followed the last time the latest few tokens were seen in prompt or output.

    Good where answers quote their prompt or themselves; costs microseconds. Saxena 2023, "Prompt lookup decoding".

    Parameters
    ----------
    longest, shortest : lengths of the context that must match, longest tried first
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        assert longest >= shortest >= 1
        self._sizes = range(longest, shortest - 1, -1)

    def propose(self, sequences: list[Sequence], counts: list[int]) -> int:
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.draft_probs = None
            sequence.draft_ids = self._continue(sequence, count) if count else []
        return 0

    def _continue(self, sequence: Sequence, count: int) -> list[int]:
        tokens = sequence.token_ids
        index = self._index(sequence)
        for size in self._sizes:
            follows = index.ends.get(tuple(tokens[-size:])) if len(tokens) > size else None
            if follows is not None:
                return tokens[follows : follows + count]
        return []

    def _index(self, sequence: Sequence) -> _NGramIndex:
        """Index every n-gram that has a token after it, by where that token is; later ones replace earlier ones."""
        if sequence.drafter_state is None:
            sequence.drafter_state = _NGramIndex()
        index: _NGramIndex = sequence.drafter_state
        tokens = sequence.token_ids
        for follows in range(index.num_indexed, len(tokens)):
            for size in self._sizes:
                if follows >= size:
                    index.ends[tuple(tokens[follows - size : follows])] = follows
        index.num_indexed = len(tokens)
        return index

    def release(self, sequence: Sequence) -> None:
        sequence.drafter_state = None


@dataclass(slots=True)
class _NGramIndex:
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 1


@dataclass(slots=True)
class _DraftState:
    """Holds a sequence's place in the draft model's own pool."""

    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    last_used: int = 0
    base: int = 0  # length of the sequence when `drafts` were proposed
    drafts: list[int] = field(default_factory=list)

    def roll_back(self, token_ids: list[int]) -> None:
        """Keep what was computed for tokens that stood."""
        stood = self.base
        for draft in self.drafts:
            if stood >= len(token_ids) or token_ids[stood] != draft:
                break
            stood += 1
        # The last token always runs again: the first draft is drawn from it.
        self.num_computed = min(self.num_computed, stood, len(token_ids) - 1)


class ModelDrafter:
    """Proposes with a smaller model on its own KV pool.

    The weights may be another tier's; only keys and values are this drafter's own. A sequence that finds no blocks
    is not drafted for, after the longest unused ones were dropped.

    Parameters
    ----------
    model : the draft model; its tokenizer must be the target's
    kv : its pool
    vocab_size : V of the target; the draft's logits are cut or padded to it
    max_batch_tokens : most tokens of one catching-up pass
    pool : the books of ``kv``'s blocks where its memory is shared
    """

    def __init__(
        self,
        model: StepModel,
        kv: KVCache,
        *,
        vocab_size: int,
        max_batch_tokens: int = 1024,
        pool: BlockPool | None = None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.pool = pool or BlockPool(kv.num_blocks, kv.block_size)
        self._max_batch_tokens = max_batch_tokens
        self._sampler = Sampler(vocab_size, model.device)
        self._states: dict[int, tuple[Sequence, _DraftState]] = {}
        self._round = 0

    def propose(self, sequences: list[Sequence], counts: list[int]) -> int:
        self._round += 1
        for sequence in sequences:
            sequence.draft_ids, sequence.draft_probs = [], None
        active = [
            (sequence, count)
            for sequence, count in zip(sequences, counts, strict=True)
            # A draft model may have a shorter context than its target; beyond it nothing is proposed.
            if count and len(sequence.token_ids) + count <= self.model.config.context_length
        ]
        active = [(sequence, count) for sequence, count in active if self._reserve(sequence, count)]
        num_passes, probs = 0, {id(sequence): list[Tensor]() for sequence, _ in active}
        with torch.inference_mode():
            while active:
                hidden, passes = self._catch_up([sequence for sequence, _ in active])
                num_passes += passes
                self._extend([sequence for sequence, _ in active], self._logits(hidden), probs)
                active = [(s, count) for s, count in active if len(s.draft_ids) < count]
        for sequence in sequences:
            state = sequence.drafter_state
            if state is not None:
                state.base, state.drafts = len(sequence.token_ids), sequence.draft_ids
            if probs.get(id(sequence)):
                sequence.draft_probs = torch.stack(probs[id(sequence)])
        return num_passes

    def release(self, sequence: Sequence) -> None:
        entry = self._states.pop(id(sequence), None)
        if entry is not None:
            self.pool.release(entry[1].block_table)
        sequence.drafter_state = None

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        """Own blocks for the sequence and all drafts but the last, which is never run here."""
        state = sequence.drafter_state
        if state is None:
            state = sequence.drafter_state = _DraftState(base=len(sequence.token_ids))
            self._states[id(sequence)] = (sequence, state)
        state.last_used = self._round
        state.roll_back(sequence.token_ids)
        needed = self.pool.blocks_for(len(sequence.token_ids) + count - 1) - len(state.block_table)
        if needed <= 0:
            return True
        with self.pool.lock:
            while needed > self.pool.room_for(needed):
                _, oldest = min(self._states.values(), key=lambda entry: entry[1].last_used)
                if oldest.last_used == self._round:
                    return False
                self.release(next(s for s, kept in self._states.values() if kept is oldest))
            state.block_table += self.pool.allocate(needed)
        return True

    def _catch_up(self, sequences: list[Sequence]) -> tuple[Tensor, int]:
        """Run every token this model has not seen, drafts included; (B, H) of each sequence's last, and the passes."""
        last: dict[int, Tensor] = {}
        left = list(sequences)
        passes = 0
        while left:
            tokens, lengths, tables, taken = [], [], [], []
            room = self._max_batch_tokens
            for sequence in left:
                state = sequence.drafter_state
                run = [*sequence.token_ids[state.num_computed :], *sequence.draft_ids]
                run = run[max(0, state.num_computed - len(sequence.token_ids)) :][:room]
                if not run:
                    break
                room -= len(run)
                tokens.append(run)
                lengths.append(state.num_computed + len(run))
                tables.append(state.block_table[: self.pool.blocks_for(lengths[-1])])
                taken.append(sequence)
            batch = Batch.build(tokens, lengths, tables, block_size=self.pool.block_size, device=self.model.device)
            hidden = self.model.forward(batch, self.kv)
            passes += 1
            end = 0
            for sequence, run, length in zip(taken, tokens, lengths, strict=True):
                end += len(run)
                sequence.drafter_state.num_computed = length
                if length == len(sequence.token_ids) + len(sequence.draft_ids):
                    last[id(sequence)] = hidden[end - 1]
            left = [sequence for sequence in left if id(sequence) not in last]
        return torch.stack([last[id(sequence)] for sequence in sequences]), passes

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.logits(hidden)
        missing = self._sampler.vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self._sampler.vocab_size]

    def _extend(self, sequences: list[Sequence], logits: Tensor, probs: dict[int, list[Tensor]]) -> None:
        """Append one drafted token to each sequence, drawn so that the target can judge it."""
        rows = [LogitsRow(sequence, tuple(sequence.draft_ids)) for sequence in sequences]
        # A draft needs no diagnosis: where this model's logits are bad, any guess will do and the target decides.
        logits = torch.nan_to_num(logits, nan=0.0, posinf=1e4)
        self._sampler.mask(logits, rows)
        edited = self._sampler.edit(logits, rows, {})
        ids = self._sampler.choose(edited, rows)
        judged = [i for i, sequence in enumerate(sequences) if uses_rejection(sequence)]
        if judged:
            some = [rows[i] for i in judged]
            distributions = self._sampler.probabilities(edited[judged], some)
            # A stream of its own: DRAW at this position belongs to the target's final token.
            uniforms = [uniform(row.sequence.seed, row.position, DRAFT) for row in some]
            for place, (i, token) in enumerate(zip(judged, draw(distributions, uniforms), strict=True)):
                ids[i] = token
                probs[id(sequences[i])].append(distributions[place])
        for sequence, token in zip(sequences, ids, strict=True):
            sequence.draft_ids.append(token)
