"""The part of an engine that belongs to its thread: one step at a time, and the books of every request.

A step is: schedule, draft, run, draw, settle. Everything that belongs to a request is freed in the step that ends it;
when nothing is left the books are summed. Nothing here locks: whoever calls owns the core meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.errors import EngineError, StepFailed
from engine.kv_cache import KVCache
from engine.memory import plan_blocks
from engine.request import Chunk, Ending, Event, FinishReason, TokenLogprob
from engine.runner import Model, Runner, StepResult
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import Sequence
from engine.sink import Sink
from engine.speculator import Speculator
from engine.stats import Ewma

logger = logging.getLogger(__name__)

# Summing the books costs about 0.1 ms per 1,000 blocks, so an engine that goes idle often does it at most this often.
_AUDIT_EVERY_S = 5.0
# Smaller chunks of a prompt than this waste more on each step than they save in waiting.
_LEAST_CHUNK = 32

Events = list[tuple[Sink, Event]]


class EngineCore:
    """Scheduler, runner and speculator of one model, stepped by hand.

    Parameters
    ----------
    model, config, speculator, clock, name : as for :class:`engine.engine.Engine`
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        speculator: Speculator | None,
        name: str,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.name = name
        self.clock = clock
        plan = plan_blocks(config, model.config, dtype=model.dtype, device=model.device)
        self.num_blocks = plan.num_blocks
        self.context_length = min(config.context_length or model.config.context_length, plan.num_tokens)
        kv = KVCache(model.config, plan.num_blocks, plan.block_size, dtype=model.dtype, device=model.device)
        self.runner = Runner(model, kv)
        self.speculator = speculator
        self.scheduler = self._new_scheduler()
        self.live: dict[int, Sequence] = {}
        # Work on one CPU thread is that thread's own time; else it is the time the thread waits for it.
        alone = model.device.type == "cpu" and config.threads == 1
        self._device_time = time.thread_time if alone else time.perf_counter
        if speculator is not None:
            speculator.clock = self._device_time

        self.num_steps = 0
        self.num_failed_steps = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.last_step_s = self._last_audit_s = clock()
        self.service_s = Ewma(0.1)  # from first scheduled to the end
        self.step_s = Ewma(0.1)
        self._prompt_token_s = Ewma(0.2)

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            BlockPool(self.num_blocks, self.config.block_size),
            max_num_seqs=self.config.max_num_seqs,
            max_batch_tokens=self.config.max_batch_tokens,
            aging_s=self.config.aging_s,
        )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that was checked to fit."""
        self.live[id(sequence)] = sequence
        self.scheduler.add(sequence)

    def cancel(self, sequence: Sequence, events: Events) -> None:
        """End a sequence and free its blocks; nothing if it has ended."""
        if id(sequence) in self.live:
            self._end(sequence, FinishReason.CANCELLED, events)

    def fail_all(self, error: EngineError, events: Events) -> None:
        """End every sequence with an error."""
        for sequence in list(self.live.values()):
            self._end(sequence, FinishReason.ERROR, events, error)

    def step(self, events: Events) -> None:
        """Do one step; its events are appended. Never raises for what a request or the device can cause."""
        if self.scheduler.has_work:
            try:
                self._step(events)
            except Exception as cause:  # a bug of ours outside the model
                self._start_over(cause, events)
        if not self.scheduler.has_work:
            self._audit(events)

    def _step(self, events: Events) -> None:
        began_s, device_began_s = self.clock(), self._device_time()
        if self.speculator is not None:
            self.speculator.set_limits(self.scheduler.decoding(), other_tokens=self.scheduler.num_to_prefill())
        plan = self.scheduler.schedule(began_s)
        self.num_preemptions += len(plan.preempted)
        results = self._run(plan, events)
        ended_s = self.clock()
        self.step_s.observe(ended_s - began_s)
        self._bound_prefills(plan, ended_s - began_s)
        self.num_steps += 1
        self.last_step_s = ended_s
        share_s = (self._device_time() - device_began_s) / max(plan.num_tokens, 1)
        for result in results:
            item = result.item
            item.sequence.compute_s += share_s * (item.num_tokens + item.num_drafts)
            try:
                self._settle(result, ended_s, events)
            except Exception as cause:  # a caller's stop check, most likely: its own request ends with it
                self._end(item.sequence, FinishReason.ERROR, events, self._failed(cause))

    def _bound_prefills(self, plan: StepPlan, seconds: float) -> None:
        """Let running requests wait for about ``itl_target_s`` of others' prompts a step, at what those cost here."""
        num_prompt = sum(item.num_tokens for item in plan.items if item.num_tokens > 1)
        if num_prompt < _LEAST_CHUNK:
            return
        # The whole step is laid to its prompt tokens: they are most of it, and too small a chunk is the safe side.
        self._prompt_token_s.observe(seconds / num_prompt)
        limit = int(self.config.itl_target_s / (self._prompt_token_s.value or 1e-9))
        self.scheduler.max_prefill_tokens = min(max(limit, _LEAST_CHUNK), self.config.max_batch_tokens)

    def _run(self, plan: StepPlan, events: Events) -> list[StepResult]:
        """Run the model; if it raises, everything in the step ends with the error and the rest goes on."""
        try:
            if self.speculator is not None:
                for sequence in plan.preempted:
                    self.speculator.release(sequence)
                self.speculator.propose(plan)
            began_s = self._device_time()
            results = self.runner.run(plan)
            if self.speculator is not None:
                self.speculator.observe(results, plan.num_tokens, self._device_time() - began_s)
        except Exception as cause:
            self.num_failed_steps += 1
            logger.exception("%s: step %d failed with %d sequences", self.name, self.num_steps, len(plan.items))
            error = self._failed(cause)
            for item in plan.items:
                self._end(item.sequence, FinishReason.ERROR, events, error)
            return []
        return results

    def _settle(self, result: StepResult, now_s: float, events: Events) -> None:
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
        self.num_output_tokens += len(sequence.token_ids) - before
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
        events: Events,
        error: EngineError | None = None,
    ) -> None:
        self.scheduler.remove(sequence)
        self.live.pop(id(sequence), None)
        if self.speculator is not None:
            self.speculator.release(sequence)
        now_s = self.clock()
        if sequence.scheduled_s is not None:
            self.service_s.observe(now_s - sequence.scheduled_s)
            self.num_prompt_tokens += sequence.num_prompt
            self.num_cached_tokens += sequence.num_cached
        events.append((sequence.sink, _ending(sequence, reason, error, now_s)))
        sequence.sampler_state = None

    def _failed(self, cause: Exception) -> StepFailed:
        error = StepFailed(f"A step of {self.name} failed with {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error

    def _start_over(self, cause: Exception, events: Events) -> None:
        """The books cannot be trusted: everyone ends with the error, and new books are begun."""
        logger.error("%s: step %d failed outside the model", self.name, self.num_steps, exc_info=cause)
        self.num_failed_steps += 1
        error = self._failed(cause)
        for sequence in list(self.live.values()):
            sequence.block_table = []
            self._end(sequence, FinishReason.ERROR, events, error)
        self.scheduler = self._new_scheduler()

    def _audit(self, events: Events) -> None:
        """With nothing to do, every block must be free or cached; if not, count a failure and begin new books."""
        now = self.clock()
        thorough = now - self._last_audit_s >= _AUDIT_EVERY_S
        try:
            pool = self.scheduler.pool
            assert pool.num_available == pool.num_blocks, f"{pool.num_owned} blocks of {self.name} leaked"
            if thorough:
                self._last_audit_s = now
                self.scheduler.check_integrity()
        except AssertionError as leak:
            self._start_over(leak, events)


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
