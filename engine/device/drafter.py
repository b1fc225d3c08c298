"""Drafts with a smaller model on a GPU: k passes launched one behind the other, read back once.

The first pass runs a sequence's last two tokens, whatever became of the drafts before: if all of them stood, the last
one and the token after it are new here; if not, one is run again, which changes nothing. So every pass has a fixed
shape and is a captured graph. Longer gaps (a prompt, a stretch that was not drafted for) are computed before, launched
kernel by kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.blocks import BlockPool
from engine.device.draw_kinds import DrawKind, put_padding, put_row, sampling_tensors
from engine.device.graph_cache import GraphCache, bucket
from engine.device.step_buffers import BlockTables, DeviceFields, HostFields, StepShape, device_fields, host_fields
from engine.draft_verifier import uses_rejection
from engine.drafter import DRAFT
from engine.kernels.sampling import draw, probabilities, sample, uniforms
from engine.kv_cache import KVCache
from engine.models.decoder import DecoderModel
from engine.models.fused import StepTensors
from engine.sequence import Sequence

# Tokens of the first pass of a round.
_REDONE = 2


@dataclass(slots=True)
class _SequenceState:
    """Holds a sequence's place in the draft model's own pool."""

    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens that stood and have keys and values here
    last_used: int = 0
    base: int = 0  # length of the sequence when `drafts` were proposed
    drafts: list[int] = field(default_factory=list)

    def roll_back(self, token_ids: list[int]) -> None:
        """Keep what was computed for drafts that stood; the last of a draft is never run."""
        stood = self.base
        for draft in self.drafts[:-1]:
            if stood >= len(token_ids) or token_ids[stood] != draft:
                break
            stood += 1
        self.num_computed = min(self.num_computed + stood - self.base, len(token_ids))
        self.base, self.drafts = len(token_ids), []


class DeviceDrafter:
    """Implements :class:`engine.drafter.Drafter`; call it on the stream of the engine it drafts for.

    The weights may be another tier's; keys and values are this drafter's own. A sequence that finds no blocks is not
    drafted for, after the longest unused ones were dropped. Penalties and bias are the target's business: a
    guess need not know them.

    Parameters
    ----------
    model : the draft model; its tokenizer must be the target's
    kv : its pool
    vocab_size : V of the target
    max_draft_tokens : most tokens per draft
    max_sequences : most sequences drafted for at once
    max_batch_tokens : most tokens of one catching-up pass
    name : of the engine, for the log
    pool : the books of ``kv``'s blocks where its memory is shared
    """

    def __init__(
        self,
        model: DecoderModel,
        kv: KVCache,
        *,
        vocab_size: int,
        max_draft_tokens: int,
        max_sequences: int,
        max_batch_tokens: int = 1024,
        name: str = "drafter",
        pool: BlockPool | None = None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.pool = pool or BlockPool(kv.num_blocks, kv.block_size)
        self._vocab_size = vocab_size
        self._max_batch_tokens = max_batch_tokens
        self._most = bucket(max_sequences) or max_sequences
        self._states: dict[int, tuple[Sequence, _SequenceState]] = {}
        self._round = self._turn = 0
        device, is_cuda = model.device, model.device.type == "cuda"
        self._tables = BlockTables(self._most, -(-model.config.context_length // kv.block_size), device)
        # All passes of a round are in flight together, and the round before has been read back.
        num_bytes = StepShape(self._most * _REDONE, self._most, self._most).num_bytes
        self._pinned = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(max_draft_tokens)]
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._drawn = torch.zeros((max_draft_tokens, self._most), dtype=torch.int64, device=device)
        self._latest = torch.zeros(self._most, dtype=torch.int64, device=device)
        self._landed = torch.zeros((max_draft_tokens, self._most), dtype=torch.int64, pin_memory=is_cuda)
        self._probs: Tensor | None = None  # float32 (sequences, V): of the pass at hand
        self._ready = torch.cuda.Event(blocking=True) if is_cuda else None  # type: ignore[no-untyped-call]
        self.graphs = GraphCache(name, enabled=is_cuda)

    def propose(self, sequences: list[Sequence], counts: list[int]) -> int:
        """See :class:`engine.drafter.Drafter`; 0 passes where kernels were compiled or a graph was captured."""
        self._round += 1
        others = self.graphs.num_others
        for sequence in sequences:
            sequence.draft_ids, sequence.draft_probs = [], None
        pairs = zip(sequences, counts, strict=True)
        wanted = [(sequence, count) for sequence, count in pairs if self._suits(sequence, count)]
        active = [(sequence, count) for sequence, count in wanted[: self._most] if self._reserve(sequence, count)]
        if not active:
            return 0
        with torch.inference_mode():
            passes = self._catch_up([sequence for sequence, _ in active])
            most = max(count for _, count in active)
            rejecting = [uses_rejection(sequence) for sequence, _ in active]
            distributions = self._run(active, rejecting)
            drafts = self._read_back(most, len(active))
        for row, (sequence, count) in enumerate(active):
            state = self._states[id(sequence)][1]
            sequence.draft_ids = state.drafts = [drafts[j][row] for j in range(count)]
            state.num_computed = state.base = len(sequence.token_ids)
            if rejecting[row]:
                sequence.draft_probs = torch.stack([probs[row] for probs in distributions[:count]])
        return passes + most if self.graphs.num_others == others else 0

    def release(self, sequence: Sequence) -> None:
        entry = self._states.pop(id(sequence), None)
        if entry is not None:
            self.pool.release(entry[1].block_table)

    def _suits(self, sequence: Sequence, count: int) -> bool:
        length = len(sequence.token_ids)
        return count > 0 and length >= _REDONE and length + count <= self.model.config.context_length

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        """Own blocks for the sequence and all drafts but the last, which is never run here."""
        entry = self._states.get(id(sequence))
        if entry is None:
            entry = self._states[id(sequence)] = (sequence, _SequenceState(base=len(sequence.token_ids)))
        state = entry[1]
        state.last_used = self._round
        state.roll_back(sequence.token_ids)
        needed = self.pool.blocks_for(len(sequence.token_ids) + count - 1) - len(state.block_table)
        if needed <= 0:
            return True
        with self.pool.lock:
            while needed > self.pool.room_for(needed):
                other, oldest = min(self._states.values(), key=lambda entry: entry[1].last_used)
                if oldest.last_used == self._round:
                    return False
                self.release(other)
            state.block_table += self.pool.allocate(needed)
        return True

    def _catch_up(self, sequences: list[Sequence]) -> int:
        """Compute what is missing before each sequence's last two tokens; the number of passes."""
        passes = 0
        left = [(sequence, self._states[id(sequence)][1]) for sequence in sequences]
        left = [(s, state) for s, state in left if state.num_computed < len(s.token_ids) - _REDONE]
        while left:
            tokens, lengths, tables = [], [], []
            room = self._max_batch_tokens
            for sequence, state in left:
                end = min(len(sequence.token_ids) - _REDONE, state.num_computed + room)
                if end <= state.num_computed:
                    break
                tokens.append(sequence.token_ids[state.num_computed : end])
                room -= len(tokens[-1])
                state.num_computed = end
                lengths.append(end)
                tables.append(state.block_table[: self.pool.blocks_for(end)])
            batch = Batch.build(tokens, lengths, tables, block_size=self.pool.block_size, device=self.model.device)
            self.model.fused.forward(StepTensors.of(batch), self.kv)
            passes += 1
            left = [(s, state) for s, state in left if state.num_computed < len(s.token_ids) - _REDONE]
        return passes

    def _run(self, active: list[tuple[Sequence, int]], rejecting: list[bool]) -> list[Tensor]:
        """Launch the passes; the distributions of each, float32 (B, V), where some draft is judged by rejection."""
        sequences = [sequence for sequence, _ in active]
        size = bucket(len(sequences)) or len(sequences)
        draws = DrawKind.GREEDY
        if any(sequence.request.sampling.temperature > 0.0 for sequence in sequences):
            draws = DrawKind.FILTERED if any(_is_filtered(sequence) for sequence in sequences) else DrawKind.SCALED
        for row, sequence in enumerate(sequences):
            self._tables.set(row, self._states[id(sequence)][1].block_table)
        self._turn += 1
        self._tables.upload(self._turn)
        distributions: list[Tensor] = []
        for number in range(max(count for _, count in active)):
            query_len = _REDONE if number == 0 else 1
            shape = StepShape(size * query_len, size, size)
            host, fields = host_fields(self._pinned[number], shape), device_fields(self._bytes, shape)
            self._fill(host, active, size, number, rejecting, draws)
            self._bytes[: shape.num_bytes].copy_(self._pinned[number][: shape.num_bytes], non_blocking=True)
            keeps = draws is not DrawKind.GREEDY and any(rejecting)
            probs = self.graphs.run(
                (size, query_len, draws, keeps),
                lambda fields=fields, query_len=query_len, keeps=keeps: self._pass(  # type: ignore[misc]
                    fields, size, query_len, draws, keeps
                ),
            )
            self._drawn[number, :size].copy_(self._latest[:size])
            if probs is not None:
                distributions.append(probs.clone())  # the next pass writes there again
        return distributions

    def _fill(
        self,
        host: HostFields,
        active: list[tuple[Sequence, int]],
        size: int,
        number: int,
        rejecting: list[bool],
        draws: DrawKind,
    ) -> None:
        count, query_len = len(active), _REDONE if number == 0 else 1
        sequences = [sequence for sequence, _ in active]
        # Who has all its drafts is padding from then on: it owns no blocks further on.
        goes_on = np.array([number < limit for _, limit in active])
        ends = np.array([len(sequence.token_ids) + number for sequence in sequences], dtype=np.int64)
        tokens = np.zeros((size, query_len), dtype=np.int64)
        sources = np.full((size, query_len), -1, dtype=np.int64)
        if number == 0:
            tokens[:count] = [sequence.token_ids[-_REDONE:] for sequence in sequences]
        else:
            sources[:count, 0] = np.arange(count)
        positions = np.zeros((size, query_len), dtype=np.int64)
        positions[:count] = ends[:, None] - query_len + np.arange(query_len)
        slots = np.full((size, query_len), -1, dtype=np.int64)
        rows = np.nonzero(goes_on)[0]
        found = self._tables.slots(rows.repeat(query_len), positions[rows].reshape(-1), self.kv.block_size)
        slots[rows] = found.reshape(-1, query_len)
        host.token_ids[:], host.source_rows[:] = tokens.reshape(-1), sources.reshape(-1)
        host.positions[:], host.slots[:] = positions.reshape(-1), slots.reshape(-1)
        host.rows[:] = np.arange(1, size + 1) * query_len - 1
        host.query_starts[:] = np.arange(size + 1) * query_len
        host.context_lens[:count], host.context_lens[count:] = np.where(goes_on, ends, 0), 0
        host.rejects[:count], host.rejects[count:] = rejecting, 0
        if draws is not DrawKind.GREEDY:
            for row, sequence in enumerate(sequences):
                put_row(host, row, sequence, len(sequence.token_ids) + number)
            put_padding(host, count)

    def _pass(self, fields: DeviceFields, size: int, query_len: int, draws: DrawKind, keeps: bool) -> Tensor | None:
        """Run the model and draw into ``_latest``; the distributions if they are to be kept."""
        due = self._latest.index_select(0, fields.source_rows.clamp_min(0))
        step = StepTensors(
            token_ids=torch.where(fields.source_rows < 0, fields.token_ids, due),
            positions=fields.positions,
            paged=fields.paged(self._tables.tensor[:size], query_len),
        )
        hidden = self.model.fused.forward(step, self.kv)
        logits = self._logits(hidden if query_len == 1 else hidden.index_select(0, fields.rows))
        params = sampling_tensors(fields, draws)
        token_ids = sample(logits, params).token_ids
        probs: Tensor | None = None
        if keeps:
            probs = probabilities(logits, params)
            # A stream of its own: DRAW at this position belongs to the target's final token.
            drawn = draw(probs, uniforms(fields.seeds, fields.draw_positions, DRAFT))
            token_ids = torch.where(fields.rejects > 0, drawn, token_ids)
        self._latest[:size] = token_ids
        return probs

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return (R, V) of the target; where this model's logits are bad, any guess will do."""
        logits = self.model.lm_head(hidden)
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self._vocab_size].nan_to_num(nan=0.0, posinf=1e4, neginf=-1e4)

    def _read_back(self, num_passes: int, count: int) -> list[list[int]]:
        landed = self._landed[:num_passes]
        landed.copy_(self._drawn[:num_passes], non_blocking=True)
        if self._ready is not None:
            self._ready.record()
            self._ready.synchronize()
        return [row[:count] for row in landed.tolist()]


def _is_filtered(sequence: Sequence) -> bool:
    sampling = sequence.request.sampling
    return sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
