"""One model being served: requests in from any thread, events out to wherever they were asked from.

A step is: take what came in, schedule, draft, run, draw, hand over. Everything that belongs to a request is freed in
the step that ends it; when nothing is left the books are summed.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import torch

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.errors import EngineClosed, EngineError, EngineOverloaded, InvalidRequest, RequestTooLong, StepFailed
from engine.kv_cache import KVCache
from engine.loop import StepLoop
from engine.memory import plan_blocks
from engine.request import Chunk, Ending, Event, FinishReason, Request, TokenLogprob
from engine.runner import Model, Runner, StepResult
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import Sequence
from engine.sink import AsyncSink, QueueSink, Sink, deliver
from engine.speculator import Speculator
from engine.stats import EngineStats, Ewma

logger = logging.getLogger(__name__)

# Summing the books costs about 0.1 ms per 1,000 blocks, so an engine that goes idle often does it at most this often.
_AUDIT_EVERY_S = 5.0

_DEFAULT = EngineConfig()


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    ending: Ending


class Engine:
    """Serves one model.

    Parameters
    ----------
    model : weights, perhaps shared with other engines
    config : limits and sizes
    eos_token_ids : tokens that end an answer; by default the model config's
    loop : the thread that steps this engine, perhaps shared; None makes one, and :meth:`close` then ends it
    start : False leaves the stepping to the caller (:meth:`step`), with no thread
    speculator : proposes drafts, if any
    clock : monotonic seconds

    Raises
    ------
    OutOfMemoryPlan
        The KV pool does not fit.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig = _DEFAULT,
        *,
        eos_token_ids: tuple[int, ...] | None = None,
        loop: StepLoop | None = None,
        start: bool = True,
        speculator: Speculator | None = None,
        name: str = "model",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.config = config
        self.name = name
        self.clock = clock
        self.eos_token_ids = model.config.eos_token_ids if eos_token_ids is None else eos_token_ids
        plan = plan_blocks(config, model.config, dtype=model.dtype, device=model.device)
        self.num_blocks = plan.num_blocks
        self.context_length = min(config.context_length or model.config.context_length, plan.num_tokens)
        kv = KVCache(model.config, plan.num_blocks, plan.block_size, dtype=model.dtype, device=model.device)
        self.runner = Runner(model, kv)
        self.speculator = speculator
        self.scheduler = self._new_scheduler()
        # Work on a CPU is this thread's own time; work on a GPU is the time the thread waits for it.
        self._device_time = time.thread_time if model.device.type == "cpu" else time.perf_counter

        self._inbox: deque[tuple[Sequence, bool]] = deque()  # (sequence, is a cancellation)
        self._num_submitted = 0
        self._num_queued = 0  # sequences in the inbox that wait to be added
        self._live: dict[int, Sequence] = {}
        self._lock = threading.Lock()  # guards order numbers and `_closed`
        self._step_lock = threading.Lock()  # held during a step
        self._closed = False

        self._num_steps = 0
        self._num_failed_steps = 0
        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_output_tokens = 0
        self._last_step_s = self._busy_since_s = self._last_audit_s = clock()
        self._service_s = Ewma(0.1)
        self._step_s = Ewma(0.1)

        self._owns_loop = start and loop is None
        if self._owns_loop:
            loop = StepLoop(f"engine-{name}", on_start=partial(torch.set_num_threads, config.threads))
        self._loop = loop if start else None
        if self._loop is not None:
            self._loop.add(self)

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            BlockPool(self.num_blocks, self.config.block_size),
            max_num_seqs=self.config.max_num_seqs,
            max_batch_tokens=self.config.max_batch_tokens,
            aging_s=self.config.aging_s,
        )

    # From any thread

    def submit(self, request: Request, sink: Sink) -> Sequence:
        """Queue a request; its events go to ``sink``, the last of them an :class:`Ending`.

        Returns
        -------
        A handle for :meth:`cancel`

        Raises
        ------
        InvalidRequest, RequestTooLong : it could never be served
        EngineOverloaded : the queue is full
        EngineClosed : the engine is
        """
        max_output = self._check(request)
        sampling = request.sampling
        waiting = self._num_waiting()
        if waiting >= self.config.max_waiting:
            raise EngineOverloaded(waiting, self.config.max_waiting, self.predicted_wait_s())
        eos = () if sampling.ignore_eos else self.eos_token_ids
        with self._lock:
            if self._closed:
                raise EngineClosed(f"The engine of {self.name} is closed.")
            self._num_submitted += 1
            sequence = Sequence(
                request,
                order=self._num_submitted,
                arrival_s=self.clock(),
                max_output=max_output,
                seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
                stop_ids=frozenset((*eos, *sampling.stop_token_ids)),
                sink=sink,
            )
            self._num_queued += 1
            self._inbox.append((sequence, False))
        self._wake()
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """End a request; its blocks are free after the step in progress. Harmless if it has ended."""
        self._inbox.append((sequence, True))
        self._wake()

    async def stream(self, request: Request) -> AsyncIterator[Event]:
        """Submit, and yield the events. Closing the iterator early cancels the request."""
        sink = AsyncSink()
        sequence = self.submit(request, sink)
        ended = False
        try:
            while not ended:
                event = await sink.get()
                ended = isinstance(event, Ending)
                yield event
        finally:
            if not ended:
                self.cancel(sequence)

    async def run(self, request: Request) -> Result:
        """Submit, and wait for the whole answer; raises the error of a request that ended with one."""
        chunks: list[Chunk] = []
        async for event in self.stream(request):
            if isinstance(event, Chunk):
                chunks.append(event)
            else:
                return _result(chunks, event)
        raise AssertionError("a stream ended without an ending")

    def run_blocking(self, request: Request, timeout_s: float | None = None) -> Result:
        """:meth:`run` for a thread that may block."""
        sink = QueueSink()
        self.submit(request, sink)
        return collect(sink, timeout_s)

    def predicted_wait_s(self) -> float:
        """Seconds until a live request made now would first be scheduled.

        Little's law: places become free at (running / mean time a request holds one) a second.
        """
        running, waiting = len(self.scheduler.running), self._num_waiting()
        if not waiting and running < self.config.max_num_seqs:
            return self._step_s.value or 0.0 if running else 0.0
        return (waiting + 1) * (self._service_s.value or self._step_s.value or 0.0) / max(running, 1)

    def stats(self) -> EngineStats:
        """A snapshot, in microseconds and without waiting for a step."""
        now = self.clock()
        pool = self.scheduler.pool
        speculator = self.speculator
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=self._num_waiting(),
            kv_free_fraction=pool.num_available / pool.num_blocks,
            predicted_wait_s=self.predicted_wait_s(),
            acceptance_rate=None if speculator is None else speculator.acceptance_rate,
            num_steps=self._num_steps,
            last_step_s=now - self._last_step_s,
            stalled_s=now - max(self._last_step_s, self._busy_since_s) if self.has_work() else 0.0,
            prefix_hit_rate=self._num_cached_tokens / max(self._num_prompt_tokens, 1),
            num_preemptions=self._num_preemptions,
            num_failed_steps=self._num_failed_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
        )

    def close(self) -> None:
        """End every request with :class:`EngineClosed` and free everything. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._loop is not None:
            self._loop.remove(self)
            if self._owns_loop:
                self._loop.close()
        with self._step_lock:
            error = EngineClosed(f"The engine of {self.name} was closed while the request ran.")
            events: list[tuple[Sink, Event]] = []
            self._take_inbox(events)
            for sequence in list(self._live.values()):
                self._end(sequence, FinishReason.ERROR, events, error)
            deliver(events)

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.wake()

    def _num_waiting(self) -> int:
        return len(self.scheduler.waiting) + self._num_queued

    def _check(self, request: Request) -> int:
        """Refuse what could never be served; returns the most tokens the answer may have."""
        num_prompt, vocab_size = len(request.prompt_ids), self.model.config.vocab_size
        sampling, limit = request.sampling, self.context_length
        if not num_prompt:
            raise InvalidRequest("prompt", "The prompt has no tokens; give at least one.")
        for param, ids in (
            ("prompt", request.prompt_ids),
            ("logit_bias", sampling.logit_bias),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
                bad = next(i for i in ids if not 0 <= i < vocab_size)
                raise InvalidRequest(param, f"{param} has token id {bad}; expected 0 to {vocab_size - 1}.")
        if request.score_from is not None and not 1 <= request.score_from <= num_prompt:
            raise InvalidRequest(
                "score_from", f"score_from is {request.score_from}; expected 1 to {num_prompt}, the prompt's length."
            )
        max_tokens = sampling.max_tokens
        if num_prompt + (1 if max_tokens is None else max_tokens) > limit:
            pool = self.num_blocks * self.config.block_size
            why = (
                f"the KV pool has {self.num_blocks} blocks of {self.config.block_size}"
                if limit == pool
                else ("the model's context")
            )
            raise RequestTooLong(num_prompt, max_tokens, limit, why)
        return limit - num_prompt if max_tokens is None else max_tokens

    # On the engine's thread

    def has_work(self) -> bool:
        """Whether :meth:`step` would do anything."""
        return bool(self._inbox) or self.scheduler.has_work

    def step(self) -> None:
        """Do one step. Never raises for what a request or the device can cause."""
        with self._step_lock:
            events: list[tuple[Sink, Event]] = []
            was_idle = not self.scheduler.has_work
            self._take_inbox(events)
            if was_idle:
                self._busy_since_s = self.clock()
            if self.scheduler.has_work:
                try:
                    self._step(events)
                except (
                    Exception
                ) as error:  # a bug of ours in scheduling: the books cannot be trusted, so start them anew
                    logger.exception("%s: step %d failed outside the model", self.name, self._num_steps)
                    self._start_over(error, events)
            for sink in deliver(events):
                self._cancel_sink(sink)
            if not self.scheduler.has_work:
                self._audit()

    def _take_inbox(self, events: list[tuple[Sink, Event]]) -> None:
        while self._inbox:
            sequence, is_cancellation = self._inbox.popleft()
            if not is_cancellation:
                with self._lock:
                    self._num_queued -= 1
                self._live[id(sequence)] = sequence
                self.scheduler.add(sequence)
            elif id(sequence) in self._live:
                self._end(sequence, FinishReason.CANCELLED, events)

    def _step(self, events: list[tuple[Sink, Event]]) -> None:
        began_s, device_began_s = self.clock(), self._device_time()
        if self.speculator is not None:
            self.speculator.set_limits(self.scheduler.decoding(), other_tokens=self.scheduler.num_to_prefill())
        plan = self.scheduler.schedule(began_s)
        self._num_preemptions += len(plan.preempted)
        results = self._run(plan, events)
        ended_s = self.clock()
        self._step_s.observe(ended_s - began_s)
        self._num_steps += 1
        self._last_step_s = ended_s
        share_s = (self._device_time() - device_began_s) / max(plan.num_tokens, 1)
        for result in results:
            item = result.item
            item.sequence.compute_s += share_s * (item.num_tokens + item.num_drafts)
            self._settle(result, ended_s, events)

    def _run(self, plan: StepPlan, events: list[tuple[Sink, Event]]) -> list[StepResult]:
        """Run the model; if it raises, everything in the step ends with the error and the rest goes on."""
        try:
            if self.speculator is not None:
                for sequence in plan.preempted:
                    self.speculator.release(sequence)
                self.speculator.propose(plan)
            began_s = time.perf_counter()
            results = self.runner.run(plan)
            if self.speculator is not None:
                self.speculator.observe(results, plan.num_tokens, time.perf_counter() - began_s)
        except Exception as cause:
            self._num_failed_steps += 1
            logger.exception("%s: step %d failed with %d sequences", self.name, self._num_steps, len(plan.items))
            error = StepFailed(f"A step of {self.name} failed with {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            for item in plan.items:
                self._end(item.sequence, FinishReason.ERROR, events, error)
            return []
        return results

    def _settle(self, result: StepResult, now_s: float, events: list[tuple[Sink, Event]]) -> None:
        """Add a step's tokens to their sequence, publish its blocks, and end it if it is at an end."""
        item, sequence = result.item, result.item.sequence
        if result.error is not None:
            # Bad values may sit in its blocks, and masked reads of a NaN are NaN: nobody may meet them.
            self.scheduler.pool.forget(sequence.block_table)
            self.runner.kv.clear([b for b in sequence.block_table if not self.scheduler.pool.is_shared(b)])
            self._end(sequence, FinishReason.ERROR, events, result.error)
            return
        computed = sequence.num_computed + item.num_tokens
        if not result.token_ids:
            self.scheduler.commit(sequence, computed)
            if computed == len(sequence.token_ids):
                self._end(sequence, FinishReason.LENGTH, events)
            return
        before = len(sequence.token_ids)
        num_drawn, reason = self._append(sequence, result.token_ids)
        sequence.draft_ids = []
        self.scheduler.commit(sequence, computed + num_drawn - 1)
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        sequence.last_token_s = now_s
        self._num_output_tokens += len(sequence.token_ids) - before
        logprobs = result.logprobs[:num_drawn]
        if logprobs:
            logprobs += [TokenLogprob(t, 0.0, 0) for t in sequence.token_ids[before + num_drawn :]]
        events.append((sequence.sink, Chunk(tuple(sequence.token_ids[before:]), tuple(logprobs))))
        if reason is not None:
            self._end(sequence, reason, events)

    def _append(self, sequence: Sequence, drawn: list[int]) -> tuple[int, FinishReason | None]:
        """Take drawn tokens until one ends the request or its thinking.

        Returns
        -------
        How many were taken (forced tokens after them not counted), and the reason to end, if any
        """
        request, tokens = sequence.request, sequence.token_ids
        min_tokens = request.sampling.min_tokens
        for count, token in enumerate(drawn, start=1):
            tokens.append(token)
            if token in sequence.stop_ids and sequence.num_output > min_tokens:
                return count, FinishReason.STOP
            if request.stop_check is not None and request.stop_check.push(token):
                return count, FinishReason.STOP
            if sequence.num_output >= sequence.max_output:
                return count, FinishReason.LENGTH
            if sequence.num_thinking >= 0 and self._think(sequence, token):
                full = sequence.num_output >= sequence.max_output
                return count, FinishReason.LENGTH if full else None
        return len(drawn), None

    def _think(self, sequence: Sequence, token: int) -> bool:
        """Count a token of reasoning; True if its budget is spent and the closing tokens were written."""
        thinking = sequence.request.thinking
        assert thinking is not None
        if token == thinking.close_id:
            sequence.num_thinking = -1
            return False
        sequence.num_thinking += 1
        if sequence.num_thinking < thinking.max_tokens:
            return False
        sequence.num_thinking = -1
        room = sequence.max_output - sequence.num_output
        forced = thinking.close_ids[:room]
        sequence.token_ids.extend(forced)
        if sequence.request.stop_check is not None:
            for each in forced:
                sequence.request.stop_check.push(each)
        return True

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        events: list[tuple[Sink, Event]],
        error: EngineError | None = None,
    ) -> None:
        self.scheduler.remove(sequence)
        self._live.pop(id(sequence), None)
        if self.speculator is not None:
            self.speculator.release(sequence)
        now_s = self.clock()
        if sequence.scheduled_s is not None:
            self._service_s.observe(now_s - sequence.scheduled_s)
            self._num_prompt_tokens += sequence.num_prompt
            self._num_cached_tokens += sequence.num_cached
        events.append((sequence.sink, _ending(sequence, reason, error, now_s)))
        sequence.sampler_state = None

    def _cancel_sink(self, sink: Sink) -> None:
        for sequence in list(self._live.values()):
            if sequence.sink is sink:
                self._end(sequence, FinishReason.CANCELLED, [])

    def _start_over(self, cause: Exception, events: list[tuple[Sink, Event]]) -> None:
        self._num_failed_steps += 1
        error = StepFailed(f"A step of {self.name} failed with {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        for sequence in list(self._live.values()):
            sequence.block_table = []
            self._end(sequence, FinishReason.ERROR, events, error)
        self.scheduler = self._new_scheduler()

    def _audit(self) -> None:
        """With nothing to do, every block must be free or cached."""
        pool = self.scheduler.pool
        assert pool.num_available == pool.num_blocks, f"{pool.num_owned} blocks of {self.name} leaked"
        now = self.clock()
        if now - self._last_audit_s >= _AUDIT_EVERY_S:
            self._last_audit_s = now
            self.scheduler.check_integrity()


def collect(sink: QueueSink, timeout_s: float | None = None) -> Result:
    """Wait for a request's whole answer; raises the error of one that ended with one."""
    chunks: list[Chunk] = []
    while True:
        event = sink.get(timeout_s)
        if isinstance(event, Ending):
            return _result(chunks, event)
        chunks.append(event)


def _result(chunks: list[Chunk], ending: Ending) -> Result:
    if ending.error is not None:
        raise ending.error
    return Result(
        tuple(token for chunk in chunks for token in chunk.token_ids),
        tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        ending,
    )


def _ending(sequence: Sequence, reason: FinishReason, error: EngineError | None, now_s: float) -> Ending:
    first, last, num_output = sequence.first_token_s, sequence.last_token_s, sequence.num_output
    pooled = None
    if sequence.pooled_sum is not None and sequence.pooled_done:
        pooled = tuple((sequence.pooled_sum / sequence.num_prompt).tolist())
    return Ending(
        reason=reason,
        num_prompt_tokens=sequence.num_prompt,
        num_output_tokens=num_output,
        num_cached_tokens=sequence.num_cached,
        num_draft_tokens=sequence.drafted,
        num_accepted_tokens=sequence.accepted,
        num_preemptions=sequence.num_preemptions,
        queue_s=(now_s if sequence.scheduled_s is None else sequence.scheduled_s) - sequence.arrival_s,
        ttft_s=0.0 if first is None else first - sequence.arrival_s,
        itl_s=0.0 if first is None or last is None or num_output < 2 else (last - first) / (num_output - 1),
        total_s=now_s - sequence.arrival_s,
        compute_s=sequence.compute_s,
        error=error,
        prompt_logprobs=tuple(sequence.scores),
        pooled=pooled,
    )
