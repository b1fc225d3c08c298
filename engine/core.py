"""Does the part of an engine that belongs to its thread: one step at a time, and the books of every request.

A step is: schedule, draft, launch, collect, settle. An asynchronous engine launches the next step before it collects
the last, so that the device never waits for the host:

    synchronous    schedule 1, launch 1, collect 1, settle 1; schedule 2, launch 2, collect 2, settle 2; ...
    asynchronous   schedule 1, launch 1; schedule 2, launch 2, collect 1, settle 1; schedule 3, launch 3, collect 2, ...

Step 2 is then planned without knowing what step 1 will draw. Where step 1 ends a request, the token that step 2 draws
for it is never looked at. Where the host must know (drafts, tokens that it draws itself), step 1 is settled before step
2 is planned. Where only the draws must know (a grammar says what may come next), step 2 is launched without
them, and they follow once step 1 is settled. Answers are the same either way.

Everything that belongs to a request is freed in the step that ends it; when nothing is left the books are summed.
Nothing here locks: whoever calls owns the core meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from engine import device_faults
from engine.arena import Arena
from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.draft_verifier import cut_drafts
from engine.errors import EngineError, StepFailed
from engine.kv_cache import KVCache
from engine.kv_sizing import context_length_of, make_cache
from engine.models.decoder import DecoderModel
from engine.request import Event, FinishReason, RequestEnding, TokenChunk, TokenLogprob
from engine.runner import Flight, Runner, StepModel, StepResult, StepRunner
from engine.scheduler import ChunkBounds, Scheduler, StepPlan
from engine.sequence import Sequence
from engine.sink import Sink
from engine.speculator import Speculator
from engine.stats import Ewma
from engine.step_costs import ChunkCosts

logger = logging.getLogger(__name__)

# Summing the books costs about 0.1 ms per 1,000 blocks, so an engine that goes idle often does it at most this often.
_AUDIT_EVERY_S = 5.0
# Smaller chunks of a prompt than this waste more on each step than they save in waiting.
_LEAST_CHUNK = 32

Events = list[tuple[Sink, Event]]


class EngineCore:
    """Holds scheduler, runner and speculator of one model, and is stepped by hand.

    Parameters
    ----------
    model, config, arena, speculator, clock, name : as for :class:`engine.engine.Engine`
    was_alone : whether no other engine used the device since a time of the clock
    """

    def __init__(
        self,
        model: StepModel,
        config: EngineConfig,
        *,
        speculator: Speculator | None,
        name: str,
        clock: Callable[[], float],
        arena: Arena | None = None,
        was_alone: Callable[[float], bool] = lambda since_s: True,
    ) -> None:
        self.config = config
        self.itl_target_s = config.itl_target_s
        self.name = name
        self.clock = clock
        kv = make_cache(config, model.config, dtype=model.dtype, device=model.device, arena=arena)
        self.num_blocks = kv.num_blocks
        # What the whole pool could not hold is refused when it is submitted, not found out in the middle of an answer.
        longest = context_length_of(config, model.config)
        self.context_length = min(longest, kv.num_blocks * kv.block_size)
        self.runner = _make_runner(model, kv, config, context_length=self.context_length, name=name)
        if arena is None:
            self.pool = BlockPool(kv.num_blocks, kv.block_size)
        else:
            self.pool = arena.join(name, kv, min_tokens=self.context_length)
        beside = model.device.type != "cpu"
        self._asynchronous = beside if config.asynchronous is None else config.asynchronous
        self._flight: Flight | None = None
        self._landed_s = self._device_landed_s = 0.0  # when the last step's results were here
        self.speculator = speculator
        self._lacks_draft_memory = False  # since drafts were last made
        self.scheduler = self._new_scheduler()
        self.live: dict[int, Sequence] = {}
        # On a single-threaded CPU, bill CPU time, since other threads' work must not count; otherwise wall time.
        alone = model.device.type == "cpu" and config.threads == 1
        self._device_time = time.thread_time if alone else time.perf_counter
        if speculator is not None:
            speculator.clock = self._device_time
            speculator.padded = self.runner.padded

        self.num_steps = 0
        self.num_failed_steps = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.last_step_s = self._last_audit_s = clock()
        self.service_s = Ewma(0.1)  # from first scheduled to the end
        self.step_s = Ewma(0.1)
        self.last_device_s = 0.0  # what the last step took
        self._chunk_costs = ChunkCosts()
        self._was_alone = was_alone

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            self.pool,
            max_num_seqs=self.config.max_num_seqs,
            max_batch_tokens=self.config.max_batch_tokens,
            aging_s=self.config.aging_s,
            chunk_bounds=self._chunk_bounds,
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
        """End every sequence with an error; what is in flight is waited for and thrown away."""
        self._flight = None
        try:
            self.runner.close()
        except Exception:  # a device that failed cannot be waited for, and its requests end all the same
            logger.exception("%s: the device did not finish what it was doing", self.name)
        for sequence in list(self.live.values()):
            self._end(sequence, FinishReason.ERROR, events, error)
        self.pool.close()

    @property
    def has_work(self) -> bool:
        """Tell whether :meth:`step` would do anything."""
        return self._flight is not None or self.scheduler.has_work

    @property
    def has_prompts(self) -> bool:
        """Tell whether prompts wait to be computed or are being computed."""
        flying = () if self._flight is None else self._flight.plan.items
        return (
            bool(self.scheduler.waiting)
            or any(item.num_tokens > 1 for item in flying)
            or any(sequence.num_left > 1 for sequence in self.scheduler.running)
        )

    def step(self, events: Events) -> None:
        """Do one step; its events are appended. Never raises for what a request or the device can cause."""
        self._guarded(self._step, events)

    def settle(self, events: Events) -> None:
        """Wait for the step in flight, if there is one, and begin no other."""
        self._guarded(self._land_last, events)

    def _guarded(self, work: Callable[[Events], None], events: Events) -> None:
        if self.has_work:
            try:
                with self.runner.on_stream():
                    work(events)
            except Exception as cause:  # a bug of ours outside the model
                self._start_over(cause, events)
        if not self.has_work:
            self._audit(events)

    def _land_last(self, events: Events) -> None:
        if self._flight is not None:
            self._land(self._flight, events)

    def _step(self, events: Events) -> None:
        self._limit_drafts()
        if self._flight is not None and self._must_wait(self._flight):
            self._land(self._flight, events)
            self._limit_drafts()
        now_s, device_s = self.clock(), self._device_time()
        before = self._flight
        if before is None:
            self._landed_s, self._device_landed_s = now_s, device_s
        self._flight = self._launch(self.scheduler.schedule(now_s), events)
        if before is not None:
            self._land(before, events)
        if self._flight is not None:
            self._draw(self._flight, events)
        if before is None and self._flight is not None and not self._asynchronous:
            self._land(self._flight, events)

    def _limit_drafts(self) -> None:
        if self.speculator is not None:
            self.speculator.set_limits(self.scheduler.decoding(), other_tokens=self.scheduler.num_to_prefill())

    def _must_wait(self, flight: Flight) -> bool:
        """Tell whether the next step can only be planned with the results of the one in flight."""
        for item in flight.plan.items:
            prediction = item.sequence.prediction
            if item.num_drafts or (prediction is not None and prediction.num_wanted):
                return True
            if item.draws and self.runner.must_wait(item.sequence):
                return True
        return self.speculator is not None and any(each.draft_limit for each in self.scheduler.decoding())

    def _land(self, flight: Flight, events: Events) -> None:
        """Wait for a launched step and settle what it gave."""
        plan = flight.plan
        if flight is self._flight:
            self._flight = None
        results = self._collect(flight, events)
        self.scheduler.land(plan.items)
        now_s, device_now_s = self.clock(), self._device_time()
        # With a step always in flight, a step takes from the end of the one before it to its own end.
        seconds, device_s = now_s - self._landed_s, device_now_s - self._device_landed_s
        self._landed_s, self._device_landed_s = now_s, device_now_s
        # What the host measured includes the drafting, what the device measured does not.
        target_s = max(device_s - flight.draft_s, 0.0) if flight.device_s is None else flight.device_s
        self.last_device_s = target_s
        if self.speculator is not None and results:
            self.speculator.observe(results, plan.num_tokens, target_s if flight.is_typical else None)
        if flight.is_typical:
            self.step_s.observe(seconds)
            self._learn_cost(plan, seconds if flight.device_s is None else flight.device_s)
        self.num_steps += 1
        self.last_step_s = now_s
        # A step is billed by tokens, rejected drafts included: they took the device's time like any other.
        share_s = (target_s + flight.draft_s) / max(plan.num_tokens, 1)
        for result in results:
            item = result.item
            item.sequence.compute_s += share_s * (item.num_tokens + item.num_drafts)
            if id(item.sequence) not in self.live:
                continue  # it ended while this step was in flight
            try:
                self._settle(result, now_s, events)
            except Exception as cause:  # a caller's stop check or grammar: its own request ends with it
                error = cause if isinstance(cause, EngineError) else self._failed(cause)
                self._end(item.sequence, FinishReason.ERROR, events, error)

    def _learn_cost(self, plan: StepPlan, seconds: float) -> None:
        alone = self._was_alone(self.clock() - seconds)
        self._chunk_costs.observe(plan.num_tokens, seconds, alone=alone)

    def _chunk_bounds(self) -> ChunkBounds:
        """Let running requests wait for about ``itl_target_s`` a step, however many prompts there are to compute."""
        most = self._chunk_costs.chunk(self.itl_target_s)
        return ChunkBounds(
            self.config.max_batch_tokens if most is None else self.runner.whole_tiles(most),
            max(_LEAST_CHUNK, self._chunk_costs.least_worthwhile()),
        )

    def _launch(self, plan: StepPlan, events: Events) -> Flight | None:
        """Draft and start a step; if that raises, everything in the step ends with the error and the rest goes on."""
        self.num_preemptions += len(plan.preempted)
        began_s = self._device_time()
        try:
            if self.speculator is not None:
                self._draft(plan, self.speculator)
            cut_drafts(plan)
            if not plan.items:
                return None
            draft_s = self._device_time() - began_s
            flight = self._launch_what_fits(plan)
            flight.draft_s = draft_s
        except Exception as cause:
            self._fail(plan, cause, events)
            return None
        self.scheduler.launch(plan)
        return flight

    def _draft(self, plan: StepPlan, speculator: Speculator) -> None:
        """Have drafts made; where there is no memory for them, the step does without, which is said when it begins."""
        for sequence in plan.preempted:
            speculator.release(sequence)
        try:
            speculator.propose(plan)
        except torch.OutOfMemoryError:
            if not self._lacks_draft_memory:
                logger.warning("%s: no memory for drafts", self.name)
            self._lacks_draft_memory = True
            for item in plan.items:
                if item.num_drafts and not item.is_predicted:
                    speculator.release(item.sequence)  # what was computed for it is not known
                    plan.num_tokens -= item.num_drafts
                    item.num_drafts = 0
        else:
            self._lacks_draft_memory &= not any(item.num_drafts and not item.is_predicted for item in plan.items)

    def _launch_what_fits(self, plan: StepPlan) -> Flight:
        """Start a step, less the largest of what is in it while there is no memory for all."""
        while True:
            try:
                return self.runner.launch(plan)
            except torch.OutOfMemoryError:
                if len(plan.items) == 1:
                    raise
                victim = self.scheduler.put_back(plan)
                logger.warning("%s: no memory for a step; %s waits", self.name, victim.request.request_id)
                self.num_preemptions += 1
                if self.speculator is not None:
                    self.speculator.release(victim)

    def _draw(self, flight: Flight, events: Events) -> None:
        """Start the draws of a launched step that has not done so; if that raises, everything in the step ends."""
        try:
            self.runner.draw(flight)
        except Exception as cause:
            self._flight = None
            self._fail(flight.plan, cause, events)
            self.scheduler.land(flight.plan.items)

    def _collect(self, flight: Flight, events: Events) -> list[StepResult]:
        """Wait for a step; if the device failed, everything in the step ends with the error and the rest goes on."""
        try:
            return self.runner.collect(flight)
        except Exception as cause:
            self._fail(flight.plan, cause, events)
            return []

    def _fail(self, plan: StepPlan, cause: Exception, events: Events) -> None:
        self.num_failed_steps += 1
        self.last_step_s = self.clock()
        logger.error(
            "%s: step %d failed, with %d sequences", self.name, self.num_steps, len(plan.items), exc_info=cause
        )
        error = device_faults.check(self.runner.kv.device, cause) or self._failed(cause)
        for item in plan.items:
            if id(item.sequence) in self.live:
                self._end(item.sequence, FinishReason.ERROR, events, error)

    def _settle(self, result: StepResult, now_s: float, events: Events) -> None:
        """Add a step's tokens to their sequence, publish its blocks, and end it if it is at an end."""
        item, sequence = result.item, result.item.sequence
        if result.error is not None:
            # Bad values may sit in its blocks, and masked reads of a NaN are NaN: nobody may meet them.
            self.scheduler.pool.forget(sequence.block_table)
            self.runner.kv.clear([b for b in sequence.block_table if not self.scheduler.pool.is_shared(b)])
            self._end(sequence, FinishReason.ERROR, events, result.error)
            return
        computed = item.start + item.num_tokens
        is_kept = item.epoch == sequence.num_preemptions  # else its blocks went to others meanwhile
        if not item.draws:
            if is_kept:
                self.scheduler.commit(sequence, computed)
            if is_kept and sequence.is_full and computed == len(sequence.token_ids):
                self._end(sequence, FinishReason.LENGTH, events)
            return
        before = len(sequence.token_ids)
        num_drawn, reason = self._append(sequence, result.token_ids)
        sequence.draft_ids = []
        if is_kept:
            self.scheduler.commit(sequence, computed + num_drawn - 1)
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        sequence.last_token_s = now_s
        self.num_output_tokens += len(sequence.token_ids) - before
        if sequence.prediction is not None:
            sequence.prediction.observe(sequence.token_ids[before:], item.num_drafts if item.is_predicted else 0)
        logprobs = result.logprobs[:num_drawn]
        if logprobs:
            logprobs += [TokenLogprob(t, 0.0, 0) for t in sequence.token_ids[before + num_drawn :]]
        events.append((sequence.sink, TokenChunk(tuple(sequence.token_ids[before:]), tuple(logprobs))))
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
            is_complete = sequence.grammar is not None and sequence.grammar.push(token)
            if request.stop_check is not None and request.stop_check.push(token):
                return count, FinishReason.STOP
            if is_complete:
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
        if forced:
            self._withdraw(sequence)
        sequence.token_ids.extend(forced)
        for each in forced:
            if sequence.grammar is not None:
                sequence.grammar.push(each, is_forced=True)
            if sequence.request.stop_check is not None:
                sequence.request.stop_check.push(each)
        return True

    def _withdraw(self, sequence: Sequence) -> None:
        """Leave unused what the step in flight draws for a sequence: other tokens come in its place."""
        for item in self.scheduler.flying:
            if item.sequence is sequence and item.draws:
                item.draws = False
                sequence.num_due -= 1

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
        sequence.sampler_state = sequence.grammar = None

    def _failed(self, cause: Exception) -> StepFailed:
        error = StepFailed(f"A step of {self.name} failed with {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error

    def _start_over(self, cause: Exception, events: Events) -> None:
        """End everyone with the error and begin new books, since the old ones cannot be trusted."""
        logger.error("%s: step %d failed outside the model", self.name, self.num_steps, exc_info=cause)
        self.num_failed_steps += 1
        error = self._failed(cause)
        for sequence in list(self.live.values()):
            sequence.block_table = []
            self._end(sequence, FinishReason.ERROR, events, error)
        self._flight = None
        self.pool.reset()
        self.scheduler = self._new_scheduler()

    def _audit(self, events: Events) -> None:
        """Check, with nothing to do, that all blocks are free or cached; if not, count a failure, begin new books."""
        now = self.clock()
        thorough = now - self._last_audit_s >= _AUDIT_EVERY_S
        try:
            pool = self.scheduler.pool
            assert not pool.num_owned, f"{pool.num_owned} blocks of {self.name} leaked"
            if thorough:
                self._last_audit_s = now
                self.scheduler.check_integrity()
        except AssertionError as leak:
            self._start_over(leak, events)


def _make_runner(model: StepModel, kv: KVCache, config: EngineConfig, *, context_length: int, name: str) -> StepRunner:
    on_device = getattr(model, "prefers_fused", False)
    if config.runner == "plain" or (config.runner == "auto" and not on_device):
        return Runner(model, kv)
    # Imported here: an engine on a CPU has no use for it.
    from engine.device.runner import DeviceRunner

    if not isinstance(model, DecoderModel):
        from engine.parallel.model import ParallelModel
        from engine.parallel.runner import ParallelRunner

        assert isinstance(model, ParallelModel), "the device's runner knows decoders only"
        return ParallelRunner(model, kv, config, max_tokens_per_sequence=context_length, name=name)
    return DeviceRunner(model, kv, config, max_tokens_per_sequence=context_length, name=name)


def _ending(sequence: Sequence, reason: FinishReason, error: EngineError | None, now_s: float) -> RequestEnding:
    first, last, num_output = sequence.first_token_s, sequence.last_token_s, sequence.num_output
    pooled = None
    if sequence.pooled_sum is not None and sequence.pooled_done:
        pooled = tuple((sequence.pooled_sum / sequence.num_prompt).tolist())
    return RequestEnding(
        reason=reason,
        num_prompt_tokens=sequence.num_prompt,
        num_output_tokens=num_output,
        num_cached_tokens=sequence.num_cached,
        num_draft_tokens=sequence.drafted,
        num_accepted_tokens=sequence.accepted,
        num_predicted_tokens=0 if sequence.prediction is None else sequence.prediction.num_predicted,
        num_accepted_predicted_tokens=0 if sequence.prediction is None else sequence.prediction.num_accepted,
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
