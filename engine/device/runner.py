"""Runs plans on a GPU: what the host does for a step is to fill one buffer and replay one graph.

Tokens drawn by one step are read by the next where they lie, so the next is launched before the host has seen them. A
step that decodes (or checks drafts) is one captured graph per batch size. A step with prompts in it is padded to one of
a few sizes and captured too, while it is so small that launching it takes longer than running it; a larger one is
launched kernel by kernel, which its longer kernels hide. Everything also runs on a CPU, through the kernels'
references and without graphs, which is how its tests run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.device.draft_verifier import verify_drafts
from engine.device.draw_kinds import DrawExtras, DrawKind, draws_of, error_of, needs_host, sampling_tensors
from engine.device.graph_cache import GraphCache, bucket
from engine.device.logprob_buffers import LogprobBuffers, read_logprob
from engine.device.mask_buffers import MaskBuffers, masked_rows
from engine.device.step_buffers import (
    RING,
    BlockTables,
    DeviceFields,
    HostFields,
    StepForm,
    StepShape,
    device_fields,
    host_fields,
)
from engine.device.step_shapes import (
    QUERY_LENGTHS,
    captured_sizes,
    keeps_prompt,
    padded_shape,
    rounded_up,
    uniform_query,
    whole_tiles,
)
from engine.device.step_writer import ResidentState, fill_decode, fill_mixed
from engine.device.token_counts import TokenCounts
from engine.draft_verifier import uses_rejection
from engine.kernels.sampling import count_tokens, mask_logits, sample
from engine.kv_cache import KVCache
from engine.layers.linear import Linear
from engine.models.fused import FusedDecoder, StepTensors
from engine.runner import Flight, KeptPrompt, StepModel, StepResult, draw_by_host, keep_prompt
from engine.sampler import LogitsRow, Sampler
from engine.scheduler import ScheduledSequence, StepPlan
from engine.sequence import Sequence


class DeviceModel(StepModel, Protocol):
    """Offers what the device's runner needs of a model; see :class:`engine.models.decoder.DecoderModel`."""

    @property
    def fused(self) -> FusedDecoder: ...

    @property
    def lm_head(self) -> Linear: ...


@dataclass(slots=True)
class DeviceFlight(Flight):
    """Holds a step in flight: how its tokens are drawn, and when it began and ended on the device."""

    draws: DrawKind = DrawKind.GREEDY
    extras: DrawExtras = field(default_factory=DrawExtras)
    drawing: list[StepResult] = field(default_factory=list)  # of the sequences drawn from, in the rows' order
    logits: Tensor | None = None
    logits_rows: list[int] = field(default_factory=list)
    tokens: Tensor | None = None  # int64 (2, R) on the host: ids, error codes
    lines: list[int] = field(default_factory=list)  # of `drawing`, see TokenCounts
    reports: tuple[Tensor, Tensor] | None = None  # on the host, see LogprobBuffers
    num_places: tuple[int, int] | None = None  # of `checked`; None where no drafts are checked
    checked: Tensor | None = None  # int64 (B, k + 3) on the host: k + 1 ids, how many of them are meant, error code
    draw_masked: Callable[[], object] | None = None  # what is left to launch once the masks are there
    began: torch.cuda.Event | None = None
    ended: torch.cuda.Event | None = None
    kept: list[KeptPrompt] = field(default_factory=list)  # what this step adds to, as it was before


class DeviceRunner:
    """Implements :class:`engine.runner.StepRunner` for a decoder on a GPU.

    Parameters
    ----------
    model : may be shared with other runners
    kv : this runner's own
    config : sizes
    max_tokens_per_sequence : the longest context a sequence may reach
    name : of the engine, for the log
    """

    def __init__(
        self, model: DeviceModel, kv: KVCache, config: EngineConfig, *, max_tokens_per_sequence: int, name: str
    ) -> None:
        self.model = model
        self.kv = kv
        self.sampler = Sampler(model.config.vocab_size, model.device)
        device, self._is_cuda = model.device, model.device.type == "cuda"
        most = bucket(config.max_num_seqs) or config.max_num_seqs
        self._max_tokens = rounded_up(max(config.max_batch_tokens, most * QUERY_LENGTHS[-1]))
        self._captured_sizes = tuple(size for size in captured_sizes(model.config) if size <= self._max_tokens)
        num_bytes = StepShape(self._max_tokens, most, self._max_tokens).num_bytes
        self._pinned = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(RING)]
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        # A short draft is padded to the graph's query length, and padding reads (unused) places beyond the sequence.
        max_blocks = -(-(max_tokens_per_sequence + QUERY_LENGTHS[-1]) // kv.block_size)
        self._tables = BlockTables(most, max_blocks, device)
        self._drawn = torch.zeros((2, most), dtype=torch.int64, device=device)
        self._landed = [torch.zeros((2, most), dtype=torch.int64, pin_memory=self._is_cuda) for _ in range(RING)]
        places = most * (QUERY_LENGTHS[-1] + 2)
        self._checked = torch.zeros(places, dtype=torch.int64, device=device)
        self._landed_checks = [torch.zeros(places, dtype=torch.int64, pin_memory=self._is_cuda) for _ in range(RING)]
        self._token_counts = TokenCounts(most, model.config.vocab_size, device)
        self._logprobs = LogprobBuffers(most, model.config.vocab_size, device)
        self._masks = MaskBuffers(most, model.config.vocab_size, device)
        self._draft_probs: dict[tuple[int, int], Tensor] = {}  # (sequences, drafts) → float32 (sequences, drafts, V)
        self._views: dict[StepShape, tuple[list[HostFields], DeviceFields]] = {}
        self._large: set[tuple[int, DrawKind]] = set()  # magnitudes of steps without a graph that were seen
        self._row_of: dict[int, int] = {}  # id of a sequence → row of `_drawn` that holds its token
        self._turn = 0
        self._stream: torch.cuda.Stream | None = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if self._is_cuda:
            self._stream = torch.cuda.Stream(device, priority=stream_priority(model))  # type: ignore[no-untyped-call]
            # A blocking event lets the waiting thread sleep: four engines that spin would take four cores.
            self._events = [
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=True))  # type: ignore[no-untyped-call]
                for _ in range(RING)
            ]
            torch.cuda.synchronize(device)  # weights and pool were written on other streams
        self.graphs = GraphCache(name, enabled=self._is_cuda)
        self._draw_graphs = GraphCache(name, enabled=self._is_cuda)  # of draws apart from their logits

    @property
    def max_sequences(self) -> int:
        """Return the most sequences of a step, padding included."""
        return self._drawn.shape[1]

    def on_stream(self) -> AbstractContextManager[object]:
        """Put everything of this engine on one stream, so that it happens in the order in which it was asked for."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def must_wait(self, sequence: Sequence) -> bool:
        return needs_host(sequence)

    def close(self) -> None:
        self._row_of = {}
        if self._stream is not None:
            self._stream.synchronize()

    def padded(self, num_sequences: int, num_drafts: int) -> int:
        """Return the tokens of the step that checks drafts of at most ``num_drafts`` tokens."""
        longest = next((length for length in QUERY_LENGTHS if length > num_drafts), num_drafts + 1)
        return (bucket(num_sequences) or num_sequences) * longest

    def whole_tiles(self, num_tokens: int) -> int:
        return whole_tiles(num_tokens)

    # Launching

    def launch(self, plan: StepPlan) -> Flight:
        flight = DeviceFlight(plan, [StepResult(item, [], []) for item in plan.items])
        try:
            self._launch(flight)
        except torch.OutOfMemoryError:
            self._undo(flight)
            raise
        return flight

    def _undo(self, flight: DeviceFlight) -> None:
        """Let it be as before a launch that found no memory, wherever it did: it is tried again, with less.

        Keys and values need nothing: the next try writes the same ones.
        """
        if self._stream is not None:
            self._stream.synchronize()  # what was asked of the device so far reads this turn's buffers
        # The next try is the same turn: further on in the ring is the step still in flight.
        self._turn -= 1
        if self._row_of:
            # The next try reads what that step drew, and this one may have drawn over it.
            self._drawn.copy_(self._landed[self._turn % RING])
        if flight.extras.penalised:
            self._token_counts.distrust([result.item for result in flight.drawing])
        for kept in flight.kept:
            kept.restore()

    def launch_padding(self, size: int, draws: DrawKind, query_len: int = 1) -> Flight:
        """Start what a decode of ``size`` sequences launches, of nobody's tokens; no other step may be in flight.

        It reads and writes no KV block and has no results.

        Parameters
        ----------
        size : of :data:`engine.device.graph_cache.LADDER`, at most :attr:`max_sequences`
        query_len : of :data:`engine.device.step_shapes.QUERY_LENGTHS`; more than 1 checks drafts
        """
        self._turn += 1
        flight = DeviceFlight(StepPlan(), draws=draws)
        self._begin(flight)
        with torch.inference_mode():
            self._decode(flight, size, query_len)
        self._end(flight)
        self._row_of = {}
        return flight

    def _begin(self, flight: DeviceFlight) -> None:
        if self._is_cuda:
            flight.began, flight.ended = self._events[self._turn % RING]
            flight.began.record()

    @staticmethod
    def _end(flight: DeviceFlight) -> None:
        if flight.ended is not None:
            flight.ended.record()

    def _launch(self, flight: DeviceFlight) -> None:
        self._turn += 1
        plan = flight.plan
        flight.drawing = [result for result in flight.results if result.item.draws]
        query_len, size = uniform_query(plan.items), bucket(len(plan.items))
        is_uniform = query_len is not None and size is not None and size <= self.max_sequences
        kinds = [
            DrawKind.BY_HOST if result.item.num_drafts and not is_uniform else draws_of(result.item.sequence)
            for result in flight.drawing
        ]
        flight.draws = max(kinds, key=lambda draws: draws.value, default=DrawKind.GREEDY)
        extras = DrawExtras.of(result.item.sequence for result in flight.drawing)
        has_drafts = any(item.num_drafts for item in plan.items)
        if has_drafts and not extras.suits_drafts:
            flight.draws = DrawKind.BY_HOST
        if extras.masked and (size or 0) * (query_len or 1) > self._masks.max_rows:
            flight.draws = DrawKind.BY_HOST
        if flight.draws is not DrawKind.BY_HOST:
            flight.extras = extras
        others = self._num_others()
        self._begin(flight)
        with torch.inference_mode():
            if flight.extras.penalised:
                flight.lines = self._token_counts.lines_for([result.item for result in flight.drawing], self._due)
            if is_uniform:
                assert size is not None
                assert query_len is not None
                self._decode(flight, size, query_len)
            else:
                self._mixed(flight)
            if flight.draw_masked is None:
                self._land_draws(flight)
        flight.is_typical &= self._num_others() == others
        if flight.draw_masked is None:
            self._end(flight)
        self._row_of = {}
        if flight.draws is not DrawKind.BY_HOST and flight.num_places is None:
            self._row_of = {id(result.item.sequence): row for row, result in enumerate(flight.drawing)}

    def _num_others(self) -> int:
        return self.graphs.num_others + self._draw_graphs.num_others

    def _land_draws(self, flight: DeviceFlight) -> None:
        """Bring what was drawn, or became of drafts, to the host."""
        if flight.draws is DrawKind.BY_HOST:
            return
        if flight.num_places:
            size, places = flight.num_places
            landed = self._landed_checks[self._turn % RING][: size * places]
            landed.copy_(self._checked[: size * places], non_blocking=True)
            flight.checked = landed.view(size, places)
            return
        flight.tokens = self._landed[self._turn % RING]
        flight.tokens.copy_(self._drawn, non_blocking=True)
        if flight.extras.reported:
            flight.reports = self._logprobs.land(len(flight.drawing), self._turn)

    def draw(self, flight: Flight) -> None:
        """Fill the masks of a step's grammars and launch its draws, if it has grammars."""
        assert isinstance(flight, DeviceFlight)
        if flight.draw_masked is None:
            return
        others = self._num_others()
        with torch.inference_mode():
            self._masks.fill(masked_rows([result.item for result in flight.drawing], flight.logits_rows))
            flight.draw_masked()
            self._land_draws(flight)
        flight.is_typical &= self._num_others() == others
        self._end(flight)

    def _due(self, sequence: Sequence) -> Tensor:
        """Return the token that the last step drew for a sequence, int64 (1,), where it lies."""
        row = self._row_of[id(sequence)]
        return self._drawn[0, row : row + 1]

    def _decode(self, flight: DeviceFlight, size: int, query_len: int) -> None:
        """Launch a step whose sequences all have one token and at most ``query_len - 1`` drafts: one graph."""
        items = flight.plan.items
        shape = StepShape(size * query_len, size, size * query_len)
        host, fields = self._fields(shape)
        has_options = flight.draws in (DrawKind.SCALED, DrawKind.FILTERED) or flight.extras.penalised
        fill_decode(host, items, query_len, self._resident(), has_options=has_options)
        self._fill_lines(host, flight)
        draws, extras = flight.draws, flight.extras
        step = self._step_tensors(fields, size, query_len)
        checks = query_len > 1 and draws is not DrawKind.BY_HOST
        probs = self._place_draft_probs(host, items, size, query_len - 1) if checks else None
        flight.num_places = (size, query_len + 2) if checks else None

        def draw(logits: Tensor) -> Tensor | None:
            if not checks:
                return self._draw(logits, fields, draws, extras)
            self._check(logits, fields, draws, size, probs)
            return None

        def run() -> Tensor | None:
            hidden = self.model.fused.forward(self._with_tokens(step, fields), self.kv)
            return self._draw_or_keep(hidden, extras, draw)

        key = (size, query_len, draws, probs is not None, extras)
        self._prepare_masked(flight, key, size * query_len, draw)
        self._upload(StepForm(shape, query_len, by_rows=False), key)
        flight.logits = self.graphs.run(key, run)
        flight.logits_rows = [i * query_len + j for i, item in enumerate(items) for j in range(item.num_drafts + 1)]

    def _mixed(self, flight: DeviceFlight) -> None:
        """Launch a step with prompts in it."""
        items, draws, extras = flight.plan.items, flight.draws, flight.extras
        lengths = [item.num_tokens + item.num_drafts for item in items]
        num_rows = sum(item.num_drafts + 1 for item in items if item.draws)
        num_tokens = sum(lengths)
        flight.logits_rows = list(range(num_rows))
        captured = None if any(map(keeps_prompt, items)) else bucket(num_tokens, self._captured_sizes)
        if captured is not None:
            shape = self._shape(captured, len(items), max(num_rows, 1))
            host, fields = self._fields(shape)
            fill_mixed(host, items, lengths, self._resident())
            self._fill_lines(host, flight)
            # The longest query is taken to be the whole step, so that one graph serves however it is divided.
            step = self._step_tensors(fields, shape.num_sequences, shape.num_tokens)
            key = (shape, draws, extras)
            self._prepare_masked(flight, key, shape.num_rows, lambda logits: self._draw(logits, fields, draws, extras))
            self._upload(StepForm(shape, shape.num_tokens, by_rows=True), key)
            flight.logits = self.graphs.run(key, lambda: self._run_mixed(step, fields, draws, extras)[1])
            return
        # A large step is compiled for when its like first comes.
        flight.is_typical = (num_tokens.bit_length(), draws) in self._large
        shape = self._shape(rounded_up(num_tokens), len(items), num_rows)
        host, fields = host_fields(self._pinned[self._turn % RING], shape), device_fields(self._bytes, shape)
        fill_mixed(host, items, lengths, self._resident())
        self._fill_lines(host, flight)
        self._prepare_masked(flight, None, shape.num_rows, lambda logits: self._draw(logits, fields, draws, extras))
        self._upload(StepForm(shape, max(lengths), by_rows=True), None)
        step = self._step_tensors(fields, shape.num_sequences, max(lengths))
        hidden, flight.logits = self._run_mixed(step, fields, draws, extras)
        self._large.add((num_tokens.bit_length(), draws))
        self._keep_prompts(flight, hidden)

    def _shape(self, num_tokens: int, num_sequences: int, num_rows: int) -> StepShape:
        most = self.max_sequences
        return padded_shape(num_tokens, num_sequences, num_rows, most=most, max_tokens=self._max_tokens)

    def _resident(self) -> ResidentState:
        return ResidentState(self._tables, self._row_of, self.kv.block_size)

    def _run_mixed(
        self, step: StepTensors, fields: DeviceFields, draws: DrawKind, extras: DrawExtras
    ) -> tuple[Tensor, Tensor | None]:
        hidden = self.model.fused.forward(self._with_tokens(step, fields), self.kv)
        if not fields.rows.shape[0]:
            return hidden, None
        chosen = hidden.index_select(0, fields.rows)
        return hidden, self._draw_or_keep(chosen, extras, lambda logits: self._draw(logits, fields, draws, extras))

    def _draw_or_keep(
        self, hidden: Tensor, extras: DrawExtras, draw: Callable[[Tensor], Tensor | None]
    ) -> Tensor | None:
        """Draw from rows of hidden states; where masks are to come, put the logits where the draws will look."""
        logits = self.model.lm_head(hidden)
        if not extras.masked:
            return draw(logits)
        self._masks.logits(logits.shape[0], logits.dtype).copy_(logits)
        return None

    def _prepare_masked(
        self, flight: DeviceFlight, key: Hashable | None, num_rows: int, draw: Callable[[Tensor], Tensor | None]
    ) -> None:
        """Say how a step with grammars goes on once its masks are there; without a key nothing is captured."""
        if not flight.extras.masked:
            return
        logits = self._masks.logits(num_rows, self.model.dtype)

        def run() -> Tensor | None:
            mask_logits(logits, self._masks.masks(num_rows))
            return draw(logits)

        flight.draw_masked = run if key is None else lambda: self._draw_graphs.run(key, run)

    def _keep_prompts(self, flight: DeviceFlight, hidden: Tensor) -> None:
        flight.kept = [KeptPrompt.of(item.sequence) for item in flight.plan.items if keeps_prompt(item)]
        start = 0
        for item, result in zip(flight.plan.items, flight.results, strict=True):
            if item.start < item.sequence.num_prompt:
                result.error = keep_prompt(self.model, item, hidden[start : start + item.num_tokens])
            start += item.num_tokens + item.num_drafts

    def _fields(self, shape: StepShape) -> tuple[HostFields, DeviceFields]:
        """Return views for a shape that comes again and again."""
        if shape not in self._views:
            hosts = [host_fields(pinned, shape) for pinned in self._pinned]
            self._views[shape] = hosts, device_fields(self._bytes, shape)
        hosts, fields = self._views[shape]
        return hosts[self._turn % RING], fields

    def _fill_lines(self, host: HostFields, flight: DeviceFlight) -> None:
        host.lines[:] = 0
        host.lines[: len(flight.lines)] = flight.lines

    def _upload(self, form: StepForm, key: Hashable | None) -> None:
        """Bring a step's input to the device; ``key`` is its graph's, None where it has none."""
        size = form.shape.num_bytes
        self._bytes[:size].copy_(self._pinned[self._turn % RING][:size], non_blocking=True)
        self._announce(form, key, self._tables.upload(self._turn))

    def _announce(self, form: StepForm, key: Hashable | None, tables: Tensor) -> None:
        """Say which step comes, and what changed of the block tables, to whoever computes along: here nobody."""

    def _step_tensors(self, fields: DeviceFields, num_sequences: int, query_len: int) -> StepTensors:
        return step_tensors(fields, self._tables.tensor[:num_sequences], query_len)

    def _with_tokens(self, step: StepTensors, fields: DeviceFields) -> StepTensors:
        """Take tokens that are due from where the last step drew them."""
        due = self._drawn[0].index_select(0, fields.source_rows.clamp_min(0))
        token_ids = torch.where(fields.source_rows < 0, fields.token_ids, due)
        return StepTensors(token_ids, step.positions, step.paged)

    def _draw(self, logits: Tensor, fields: DeviceFields, draws: DrawKind, extras: DrawExtras) -> Tensor | None:
        """Draw for each row of logits into ``_drawn``, or return them for the host."""
        if draws is DrawKind.BY_HOST:
            return logits.float()
        params = sampling_tensors(fields, draws)
        if extras.penalised:
            params.penalties = self._token_counts.penalties(
                fields.lines, fields.presence, fields.frequency, fields.repetition
            )
        num_logprobs = self._logprobs.num_alternatives if extras.reported else None
        sampled = sample(logits, params, num_logprobs)
        if params.penalties is not None:
            count_tokens(params.penalties, sampled.token_ids)
        if extras.reported:
            self._logprobs.keep(sampled)
        count = sampled.token_ids.shape[0]
        self._drawn[0, :count] = sampled.token_ids
        self._drawn[1, :count] = sampled.errors
        return None

    def _check(
        self, logits: Tensor, fields: DeviceFields, draws: DrawKind, size: int, draft_probs: Tensor | None
    ) -> None:
        """Judge the drafts of every sequence into ``_checked``."""
        used = (fields.slots >= 0).view(size, -1)
        checked = verify_drafts(
            logits,
            sampling_tensors(fields, draws),
            fields.token_ids.view(size, -1)[:, 1:],
            used.sum(dim=1) - 1,
            draft_probs,
            fields.rejects > 0,
        )
        places = used.shape[1]
        out = self._checked[: size * (places + 2)].view(size, places + 2)
        out[:, :places] = checked.token_ids
        out[:, places] = checked.counts
        out[:, places + 1] = checked.errors

    def _place_draft_probs(
        self, host: HostFields, items: list[ScheduledSequence], size: int, num_drafts: int
    ) -> Tensor | None:
        """Put the distributions that drafts were drawn from where the graph looks for them; None if none were."""
        host.rejects[:] = 0
        for row, item in enumerate(items):
            sequence = item.sequence
            host.rejects[row] = item.num_drafts > 0 and sequence.draft_probs is not None and uses_rejection(sequence)
        if not host.rejects.any():
            return None
        if (size, num_drafts) not in self._draft_probs:
            shape = (size, num_drafts, self.model.config.vocab_size)
            self._draft_probs[size, num_drafts] = torch.zeros(shape, device=self.model.device)
        probs = self._draft_probs[size, num_drafts]
        for row in np.nonzero(host.rejects)[0].tolist():
            probs[row, : items[row].num_drafts].copy_(items[row].sequence.draft_probs)
        return probs

    # Collecting

    def collect(self, flight: Flight) -> list[StepResult]:
        assert isinstance(flight, DeviceFlight)
        if flight.ended is not None and flight.began is not None:
            flight.ended.synchronize()
            flight.device_s = flight.began.elapsed_time(flight.ended) / 1e3
        if flight.draws is DrawKind.BY_HOST:
            self._draw_by_host(flight)
        elif flight.checked is not None:
            places = flight.checked.shape[1] - 2
            for result, found in zip(flight.drawing, flight.checked.tolist(), strict=False):
                result.error = error_of(found[places + 1])
                result.token_ids = [] if result.error else found[: found[places]]
        elif flight.tokens is not None:
            ids, errors = flight.tokens.tolist()
            for row, result in enumerate(flight.drawing):
                result.error = result.error or error_of(errors[row])
                result.token_ids = [] if result.error else [ids[row]]
                wanted = result.item.sequence.request.sampling.logprobs
                if flight.reports is not None and wanted is not None and not result.error:
                    values, numbers = (part[row] for part in flight.reports)
                    result.logprobs = [read_logprob(values, numbers, ids[row], wanted)]
        return flight.results

    def _draw_by_host(self, flight: DeviceFlight) -> None:
        assert flight.logits is not None
        rows: list[LogitsRow] = []
        places: list[int] = []
        drawing: list[StepResult] = []
        first = 0
        for result in flight.drawing:
            sequence, count = result.item.sequence, result.item.num_drafts + 1
            # Whoever was cancelled meanwhile has no drafts any more, and nobody asks for its tokens.
            if len(sequence.draft_ids) + 1 == count:
                drawing.append(result)
                rows += [LogitsRow(sequence, tuple(sequence.draft_ids[:j])) for j in range(count)]
                places += flight.logits_rows[first : first + count]
            first += count
        if rows:
            with torch.inference_mode():
                logits = flight.logits if len(places) == flight.logits.shape[0] else flight.logits[places]
                draw_by_host(self.sampler, logits, rows, drawing)


def step_tensors(fields: DeviceFields, tables: Tensor, query_len: int) -> StepTensors:
    """Return what the forward pass reads of a step's input."""
    return StepTensors(fields.token_ids, fields.positions, fields.paged(tables, query_len))


def stream_priority(model: StepModel) -> int:
    """Return the priority of a model's stream: smaller ones go first, as waiting doubles their short steps."""
    return -1 if model.weight_bytes < (16 << 30) else 0
