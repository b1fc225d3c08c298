"""Every prompt to every tier, through the protocol that serves: bounded, resumable, one ending each."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from backends.errors import BackendError, BackendOverloaded, ContextLengthExceeded, RequestRejected
from backends.protocol import (
    Backend,
    Finished,
    FinishReason,
    GenerateRequest,
    Priority,
    SamplingParams,
    TokenDelta,
    ToolCallDelta,
    join_calls,
)
from classifier.confidence import AnswerSignals
from gateway.outcomes.answer_log import AnswerLog, RecordedAnswer
from gateway.outcomes.errors import CollectionError
from gateway.outcomes.prompt_file import PromptRow

Progress = Callable[[int, int, int], None]
"""Told (tier, answers so far, answers wanted)."""

_MAX_ATTEMPTS = 4
_FIRST_WAIT_S = 0.5
# So many answers in a row that a tier could not give mean that the tier is broken, not the prompts.
_GIVE_UP_AFTER = 20


@dataclasses.dataclass(frozen=True, slots=True)
class CollectOptions:
    """Says how prompts are run.

    Parameters
    ----------
    max_tokens : longest answer, thinking included
    concurrency : requests at a tier at once
    temperature, seed : sampling; greedy by default, so that a second run agrees with the first
    """

    max_tokens: int = 512
    concurrency: int = 16
    temperature: float = 0.0
    seed: int = 0


async def collect(
    rows: Sequence[PromptRow],
    tiers: Mapping[int, Backend],
    log: AnswerLog,
    options: CollectOptions,
    progress: Progress | None = None,
) -> None:
    """Ask every tier what it has not answered yet; tiers one after another, prompts of a tier at once.

    Parameters
    ----------
    rows : the prompts
    tiers : number -> started backend
    log : answers of earlier runs, and where new ones go

    Raises
    ------
    CollectionError
        A tier failed many prompts in a row.
    """
    for number, backend in tiers.items():
        wanted = [row for row in rows if (row.key, number) not in log.answers]
        done = len(rows) - len(wanted)
        if progress:
            progress(number, done, len(rows))
        await _TierRun(number, backend, log, options, progress, len(rows), done).run(wanted)


class _TierRun:
    """One tier's share of the work: a few workers over one queue."""

    def __init__(
        self,
        tier: int,
        backend: Backend,
        log: AnswerLog,
        options: CollectOptions,
        progress: Progress | None,
        total: int,
        done: int,
    ) -> None:
        self._tier, self._backend, self._log, self._options = tier, backend, log, options
        self._progress, self._total, self._done = progress, total, done
        self._failed_in_row = 0

    async def run(self, rows: Sequence[PromptRow]) -> None:
        pending = iter(rows)

        async def work() -> None:
            for row in pending:  # one iterator shared by all workers: each row goes to one of them
                await self._answer(row)

        workers = min(self._options.concurrency, len(rows))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(work())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures

    async def _answer(self, row: PromptRow) -> None:
        if row.needs_tools and "tools" not in self._backend.capabilities:
            self._settle(_refused(row, self._tier, "the model calls no tools"))
            return
        wait_s = _FIRST_WAIT_S
        problem: BackendError | str = ""
        for _ in range(_MAX_ATTEMPTS):
            try:
                answer = await self._ask(row)
            except (ContextLengthExceeded, RequestRejected) as error:
                answer = _refused(row, self._tier, error)
            except BackendError as error:
                problem = error
                if not error.retryable:
                    break
                wait_s = max(wait_s, (error.retry_after_s or 0.0) if isinstance(error, BackendOverloaded) else 0.0)
                await asyncio.sleep(wait_s)
                wait_s *= 2
                continue
            if answer is not None:
                self._settle(answer)
                return
            problem = "the generation ended with an error"
        self._fail(problem)

    async def _ask(self, row: PromptRow) -> RecordedAnswer | None:
        """Return the answer, or None where generation broke off."""
        started = time.perf_counter()
        request = GenerateRequest(
            request_id=f"bootstrap-{row.key}-{self._tier}",
            messages=row.messages,
            sampling=SamplingParams(
                temperature=self._options.temperature,
                seed=self._options.seed,
                max_tokens=self._options.max_tokens,
                logprobs=0 if "logprobs" in self._backend.capabilities else None,
            ),
            priority=Priority.BACKGROUND,
            tools=row.tools,
            tool_choice=row.tool_choice,
        )
        text: list[str] = []
        calls: list[ToolCallDelta] = []
        logprobs: list[float] = []
        ending: Finished | None = None
        async for event in self._backend.generate(request):
            if isinstance(event, TokenDelta):
                text.append(event.text)
                calls += event.tool_calls
                logprobs += [each.logprob for each in event.logprobs]
            else:
                ending = event
        if ending is None or ending.reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            return None
        signals = AnswerSignals.of(logprobs)
        return RecordedAnswer(
            row.key,
            self._tier,
            "".join(text),
            ending.reason.value,
            ending.usage.prompt_tokens,
            ending.usage.completion_tokens,
            ending.compute_s if ending.compute_measured else None,
            time.perf_counter() - started,
            signals.num_tokens,
            signals.total_logprob,
            signals.least_logprob,
            tuple([(each.call_id, each.name, each.arguments) for each in join_calls(calls)]),
        )

    def _settle(self, answer: RecordedAnswer) -> None:
        self._failed_in_row = 0
        self._log.add(answer)
        self._done += 1
        if self._progress:
            self._progress(self._tier, self._done, self._total)

    def _fail(self, problem: BackendError | str) -> None:
        """Leave the row unanswered: it counts as unknown and is asked again by the next run."""
        self._failed_in_row += 1
        if self._failed_in_row >= _GIVE_UP_AFTER:
            raise CollectionError(
                f"Tier {self._tier} ({self._backend.model_id}) failed {self._failed_in_row} prompts in a row, the last "
                f"with: {problem}. What was answered is kept; run the same command again to go on."
            )


def _refused(row: PromptRow, tier: int, why: object) -> RecordedAnswer:
    """Return that the tier cannot take this prompt at all: that is an answer about it, and a wrong one."""
    return RecordedAnswer(row.key, tier, f"[refused: {why}]", FinishReason.ERROR.value)
