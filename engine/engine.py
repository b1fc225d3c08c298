"""Serves one model: requests in from any thread, events out to wherever they were asked from.

This is the engine's outer half: it checks and queues what comes in, wakes the thread that steps, and hands events over.
The inner half, :class:`engine.core.EngineCore`, is touched by that thread alone.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from engine import device_faults
from engine.arena import Arena
from engine.config import EngineConfig
from engine.core import EngineCore, Events
from engine.device.device_share import DeviceShare
from engine.errors import EngineClosed, EngineOverloaded, InvalidRequest, RequestTooLong
from engine.request import Event, Request, RequestEnding, TokenChunk, TokenLogprob
from engine.runner import StepModel
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.sink import AsyncSink, QueueSink, Sink, deliver
from engine.speculator import Speculator
from engine.stats import EngineStats
from engine.step_loop import StepLoop

logger = logging.getLogger(__name__)

_DEFAULT = EngineConfig()
# An engine that makes room for others still gives its answers' next tokens in this share of the time they may take.
_PACE = 0.75
# An engine whose steps take longer than this share of that time is short of its device.
_PRESSED = 0.5
# An engine that has done nothing for so long may do what can wait.
_QUIET_S = 0.2


@dataclass(frozen=True, slots=True)
class Result:
    """Holds a whole answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    ending: RequestEnding


class Engine:
    """Serves one model.

    Parameters
    ----------
    model : weights, perhaps shared with other engines
    config : limits and sizes
    eos_token_ids : tokens that end an answer; by default the model config's
    loop : the thread that steps this engine, perhaps shared; None makes one, and :meth:`close` then ends it
    start : False leaves the stepping to the caller (:meth:`step`), with no thread
    arena : memory that it shares with the device's other engines; None gives it a KV pool of its own
    speculator : proposes drafts, if any
    share : the other engines of its device, which it makes room for and which make room for it; None leaves it alone
    clock : monotonic seconds

    Raises
    ------
    OutOfMemoryPlan
        The KV pool does not fit.
    """

    def __init__(
        self,
        model: StepModel,
        config: EngineConfig = _DEFAULT,
        *,
        eos_token_ids: tuple[int, ...] | None = None,
        loop: StepLoop | None = None,
        start: bool = True,
        arena: Arena | None = None,
        speculator: Speculator | None = None,
        share: DeviceShare | None = None,
        name: str = "model",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.config = config
        self.name = name
        self.clock = clock
        self.eos_token_ids = model.config.eos_token_ids if eos_token_ids is None else eos_token_ids
        self._loop: StepLoop | None = None
        self._place = None
        if share is not None:
            pace_s = _PACE * config.itl_target_s
            self._place = share.join(weight_bytes=model.weight_bytes, pace_s=pace_s, wake=self._wake)
        was_alone = {} if self._place is None else {"was_alone": self._place.was_alone}
        self.core = EngineCore(model, config, arena=arena, speculator=speculator, name=name, clock=clock, **was_alone)
        self.context_length = self.core.context_length

        # (sequence, is a cancellation). A deque's ends are thread-safe, so that no caller waits for a step to end.
        self._inbox: deque[tuple[Sequence, bool]] = deque()
        self._num_submitted = 0
        self._num_queued = 0  # sequences in the inbox that wait to be added
        self._lock = threading.Lock()  # guards order numbers and `_closed`
        self._step_lock = threading.Lock()  # held during a step
        self._closed = False
        self._busy_since_s = clock()
        self._chores: Iterator[object] | None = None

        self._owns_loop = start and loop is None
        if self._owns_loop:
            loop = StepLoop(f"engine-{name}", on_start=partial(torch.set_num_threads, config.threads))
        self._loop = loop if start else None
        if self._loop is not None:
            self._loop.add(self)

    @property
    def scheduler(self) -> Scheduler:
        """Return the scheduler, for tests and measurements; it belongs to the stepping thread."""
        return self.core.scheduler

    @property
    def thread_id(self) -> int | None:
        """Return the id of the thread that steps this engine; None where the caller does."""
        return None if self._loop is None else self._loop.thread_id

    # From any thread

    def set_itl_target(self, itl_target_s: float) -> None:
        """Let running requests wait for about so many seconds a token from now on, instead of the configuration's."""
        self.core.itl_target_s = itl_target_s
        if self._place is not None:
            self._place.pace_s = _PACE * itl_target_s

    def submit(self, request: Request, sink: Sink) -> Sequence:
        """Queue a request; its events go to ``sink``, the last of them an :class:`RequestEnding`.

        Returns
        -------
        A handle for :meth:`cancel`

        Raises
        ------
        InvalidRequest, RequestTooLong : it could never be served
        EngineOverloaded : the queue is full
        EngineClosed : the engine is
        DeviceLost : a fault ended its GPU's context
        """
        sequence = self._queue(request, sink)
        self._wake()
        return sequence

    def submit_all(self, requests: list[tuple[Request, Sink]]) -> list[Sequence]:
        """Submit many requests (:meth:`submit`); if the engine is idle, they are looked at together.

        Raises
        ------
        As :meth:`submit`; those before the one refused are queued.
        """
        try:
            return [self._queue(request, sink) for request, sink in requests]
        finally:
            self._wake()

    def _queue(self, request: Request, sink: Sink) -> Sequence:
        device_faults.refuse_if_lost(self.core.runner.kv.device)
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
                ended = isinstance(event, RequestEnding)
                yield event
        finally:
            if not ended:
                self.cancel(sequence)

    async def run(self, request: Request) -> Result:
        """Submit, and wait for the whole answer; raises the error of a request that ended with one."""
        chunks: list[TokenChunk] = []
        async for event in self.stream(request):
            if isinstance(event, TokenChunk):
                chunks.append(event)
            else:
                return _result(chunks, event)
        raise AssertionError("a stream ended without an ending")

    def predicted_wait_s(self) -> float:
        """Return the seconds until a live request made now would first be scheduled.

        Little's law: places become free at (running / mean time a request holds one) a second.
        """
        core = self.core
        running, waiting = len(core.scheduler.running), self._num_waiting()
        step_s = core.step_s.value or 0.0
        if not waiting and running < self.config.max_num_seqs:
            return step_s if running else 0.0
        return (waiting + 1) * (core.service_s.value or step_s) / max(running, 1)

    def count(self, model: str) -> tuple[int, int]:
        """Count the requests for one of the models served here, running and waiting."""
        scheduler = self.scheduler
        # A tuple is made of a list or a deque in one go, whatever its own thread does meanwhile.
        arrived = [sequence for sequence, is_cancellation in tuple(self._inbox) if not is_cancellation]
        waiting = (*tuple(scheduler.waiting), *arrived)
        return _count(tuple(scheduler.running), model), _count(waiting, model)

    def when_quiet(self, chores: Iterator[object]) -> None:
        """Let the engine's thread take these steps, one at a time, after a moment in which it had nothing to do.

        A request that comes meanwhile waits for one of them at most. What one raises is logged, and the rest is left.
        """
        with self._step_lock:
            self._chores = None if self._closed else chores
        self._wake()

    @property
    def has_chores(self) -> bool:
        """Tell whether steps given to :meth:`when_quiet` are left to take."""
        return self._chores is not None

    def stats(self) -> EngineStats:
        """Return a snapshot, in microseconds and without waiting for a step."""
        core, now = self.core, self.clock()
        pool = core.scheduler.pool
        return EngineStats(
            num_running=len(core.scheduler.running),
            num_waiting=self._num_waiting(),
            kv_free_fraction=pool.free_fraction,
            predicted_wait_s=self.predicted_wait_s(),
            acceptance_rate=None if core.speculator is None else core.speculator.acceptance_rate,
            num_steps=core.num_steps,
            last_step_s=now - core.last_step_s,
            stalled_s=now - max(core.last_step_s, self._busy_since_s) if self.has_work() else 0.0,
            prefix_hit_rate=core.num_cached_tokens / max(core.num_prompt_tokens, 1),
            num_preemptions=core.num_preemptions,
            num_failed_steps=core.num_failed_steps,
            num_prompt_tokens=core.num_prompt_tokens,
            num_output_tokens=core.num_output_tokens,
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
            self._chores = None
            events: Events = []
            self._take_inbox(events)
            self.core.fail_all(EngineClosed(f"The engine of {self.name} was closed while the request ran."), events)
            deliver(events)
        if self._place is not None:
            self._place.leave()

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
            ("prediction", request.prediction.token_ids if request.prediction is not None else ()),
        ):
            if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
                bad = next(i for i in ids if not 0 <= i < vocab_size)
                raise InvalidRequest(param, f"{param} has token id {bad}; expected 0 to {vocab_size - 1}.")
        if request.score_from is not None and not 1 <= request.score_from <= num_prompt:
            raise InvalidRequest(
                "score_from", f"score_from is {request.score_from}; expected 1 to {num_prompt}, the prompt's length."
            )
        constraint = request.constraint
        if constraint is not None and constraint.grammar.vocab_size != vocab_size:
            raise InvalidRequest(
                "grammar",
                f"The grammar was compiled for {constraint.grammar.vocab_size} tokens; the model has {vocab_size}.",
            )
        max_tokens = sampling.max_tokens
        if num_prompt + (1 if max_tokens is None else max_tokens) > limit:
            pool = self.core.num_blocks * self.config.block_size
            why = (
                f"the KV pool has {self.core.num_blocks} blocks of {self.config.block_size}"
                if limit == pool
                else ("the model's context")
            )
            raise RequestTooLong(num_prompt, max_tokens, limit, why)
        return limit - num_prompt if max_tokens is None else max_tokens

    # On the engine's thread

    def has_work(self) -> bool:
        """Tell whether :meth:`step` would do anything."""
        return bool(self._inbox) or self.core.has_work

    def step(self) -> float:
        """Take what came in, do one step unless others go first, hand its events over.

        Returns
        -------
        Seconds until the next step may begin
        """
        with self._step_lock:
            events: Events = []
            if not self.core.has_work:
                self._busy_since_s = self.clock()
            self._take_inbox(events)
            wait_s = self._step_in_turn(events)
            for sink in deliver(events):
                self._abandon(sink)
        return wait_s

    def _step_in_turn(self, events: Events) -> float:
        place, core = self._place, self.core
        if place is None:
            core.step(events)
            return 0.0
        place.press(core.has_prompts)
        if place.wait_s(self.clock()) > 0.0:
            core.settle(events)  # what is done already need not wait
            place.rest(self.clock())
            return place.wait_s(self.clock())
        place.begin(self.clock())
        core.step(events)
        place.press(core.has_prompts or (core.has_work and core.last_device_s > _PRESSED * core.itl_target_s))
        if not core.has_work:
            place.rest(self.clock())
        return 0.0

    def idle(self) -> float | None:
        """Do the next chore, if there is one and the engine has been quiet.

        See :meth:`engine.step_loop.Steppable.idle`.
        """
        with self._step_lock:
            if self._chores is None:
                return None
            if self.has_work():
                return 0.0
            now_s = self.clock()
            wait_s = self.core.last_step_s + _QUIET_S - now_s
            if self._place is not None:
                wait_s = max(wait_s, self._place.wait_s(now_s))
            if wait_s <= 0.0:
                self._do_chore(self._chores)
        return max(wait_s, 0.0)

    def _do_chore(self, chores: Iterator[object]) -> None:
        self._busy_since_s = self.clock()  # who comes meanwhile has waited no longer than this
        if self._place is not None:
            self._place.begin(self.clock())
        try:
            with self.core.runner.on_stream():
                next(chores)
        except StopIteration:
            self._chores = None
        except Exception as cause:
            self._chores = None
            logger.warning(
                "%s: what waited for quiet moments is left undone (%s: %s)",
                self.name,
                type(cause).__name__,
                str(cause).partition("\n")[0],
            )
            device_faults.check(self.model.device, cause)
        finally:
            if self._place is not None:
                self._place.rest(self.clock())

    def _take_inbox(self, events: Events) -> None:
        while self._inbox:
            sequence, is_cancellation = self._inbox.popleft()
            if is_cancellation:
                self.core.cancel(sequence, events)
                continue
            with self._lock:
                self._num_queued -= 1
            self.core.add(sequence)

    def _abandon(self, sink: Sink) -> None:
        """Cancel what a closed event loop left behind; nobody is there to be told."""
        for sequence in list(self.core.live.values()):
            if sequence.sink is sink:
                self.core.cancel(sequence, [])


def _count(sequences: tuple[Sequence, ...], model: str) -> int:
    return sum(sequence.request.model == model for sequence in sequences)


def collect(sink: QueueSink, timeout_s: float | None = None) -> Result:
    """Wait for a request's whole answer; raises the error of one that ended with one."""
    chunks: list[TokenChunk] = []
    while True:
        event = sink.get(timeout_s)
        if isinstance(event, RequestEnding):
            return _result(chunks, event)
        chunks.append(event)


def _result(chunks: list[TokenChunk], ending: RequestEnding) -> Result:
    if ending.error is not None:
        raise ending.error
    return Result(
        tuple(token for chunk in chunks for token in chunk.token_ids),
        tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        ending,
    )
