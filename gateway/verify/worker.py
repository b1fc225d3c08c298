"""The worker: takes jobs from the queue when live traffic and the budget let it, and finishes each of them once.

It may die at any moment: its lease runs out and another worker takes the job. It may be slow: its result then counts
for nothing. It may be in the way: it gives the job back as if it had not been tried.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import count
from typing import Literal

from backends.errors import BackendError, BackendOverloaded
from gateway.access.spending_lease import SpendingHold, SpendingLease
from gateway.config.sections import VerificationConfig
from gateway.outcomes.answer_grading import matches_reference
from gateway.store.errors import StoreError
from gateway.store.feedback import FeedbackBook, GoldLabel
from gateway.store.records import CALLS_MARK, VerificationJob
from gateway.store.verifications import NOTHING, CheckResult, Claim, QueueState, Spent, VerificationQueue
from gateway.verify.answer_checker import AnswerChecker, CheckMethod, SpendMeter
from gateway.verify.check_budget import CheckBudget, CheckLedger
from gateway.verify.check_sampler import CheckSampler
from gateway.verify.errors import NothingToGoBy
from gateway.verify.live_load import LiveLoad
from gateway.verify.metrics import VerificationMetrics
from policies.errors import OutsideRegions

_log = logging.getLogger("suffice.verify")

Now = Callable[[], datetime]

_HOUR, _DAY = timedelta(hours=1), timedelta(days=1)
# How often the queue is glanced at, and after how many glances swept and the spending summed anew: a sum over an hour
# of requests is not for every few seconds, and what this process spends meanwhile it adds itself.
_GLANCE_EVERY_S = 5.0
_GLANCES_PER_LOOK = 12
_YIELD_POLL_S = 0.05
_BACKOFF_S = 10.0
_MAX_RETRY_S = 600.0
_UNAFFORDABLE_S = 60.0
# Weight of the newest check in the running mean of what one costs.
_NEWEST = 0.2
# The sampler's throttle falls faster than it rises, so that a queue once grown drains.
_FALL, _RISE, _LEAST_THROTTLE = 0.7, 1.1, 0.01


class VerificationWorker:
    """Background tasks of one process.

    Parameters
    ----------
    config : the settings
    queue : the jobs
    book : what callers reported
    checker : does one
    live : how busy live traffic is
    metrics : counts
    sampler : slowed down while checks are behind; None in a worker without a gateway
    lease : covers calls to priced remote models; None where there are none
    keep_texts : leave texts of finished jobs where they are
    now : the wall clock
    """

    def __init__(
        self,
        config: VerificationConfig,
        queue: VerificationQueue,
        book: FeedbackBook,
        checker: AnswerChecker,
        live: LiveLoad,
        metrics: VerificationMetrics,
        *,
        sampler: CheckSampler | None = None,
        lease: SpendingLease | None = None,
        keep_texts: bool = False,
        now: Now = lambda: datetime.now(UTC),
    ) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self.metrics = metrics
        self._config = config
        self._queue = queue
        self._book = book
        self._checker = checker
        self._live = live
        self._sampler = sampler
        self._lease = lease
        self._keep_texts = keep_texts
        self._now = now
        self._budget = CheckBudget(config)
        self._ledger = CheckLedger()
        self._state = QueueState()
        self._expected: dict[tuple[CheckMethod, int], Spent] = {}
        self._methods: tuple[CheckMethod, ...] = ("generate", "score") if config.method == "auto" else (config.method,)
        self._has_looked = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, *, works: bool) -> None:
        """Begin to watch the queue, and where this process ``works``, to empty it."""
        num_loops = self._config.concurrency if works else 0
        loops = [self._look_forever(), *(self._work_forever() for _ in range(num_loops))]
        self._tasks = [asyncio.create_task(each, name="suffice-verify") for each in loops]

    async def close(self) -> None:
        """Give back what is under way, and stop. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- looking

    async def _look_forever(self) -> None:
        for num_glances in count():
            try:
                if num_glances % _GLANCES_PER_LOOK == 0:
                    await self.look()
                else:
                    await self._glance()
            except StoreError as error:
                _log.warning("the queue of checks cannot be read: %s", error)
                await asyncio.sleep(_BACKOFF_S)
            except Exception:
                _log.exception("looking at the queue of checks failed; it is tried again")
                await asyncio.sleep(_BACKOFF_S)
            await asyncio.sleep(_GLANCE_EVERY_S)

    async def look(self) -> None:
        """Sweep out what is hopeless, read the queue and the spending, and slow the sampler if checks are behind."""
        now = self._now()
        config = self._config
        expired, failed = await self._queue.sweep(now, max_age_s=config.max_age_s, max_attempts=config.max_attempts)
        self.metrics.endings["expired"] += expired
        self.metrics.endings["failed"] += failed
        self._ledger = CheckLedger(
            await self._queue.spent_since(now - _HOUR),
            await self._queue.spent_since(now - _DAY),
            await self._queue.served_since(now - _HOUR),
        )
        self.metrics.ledger = self._ledger
        await self._glance()
        self._has_looked.set()

    async def _glance(self) -> None:
        """Read how much waits and for how long."""
        now = self._now()
        self._state = self.metrics.state = await self._queue.state()
        oldest_s = 0.0 if self._state.oldest_at is None else (now - self._state.oldest_at).total_seconds()
        self.metrics.oldest_s = oldest_s
        self._throttle(oldest_s)

    def _throttle(self, oldest_s: float) -> None:
        """Lower every chance alike while the oldest job is overdue: the sample stays random, only smaller."""
        if self._sampler is None:
            return
        change = _FALL if oldest_s > self._config.overdue_s else _RISE
        self._sampler.throttle = min(max(self._sampler.throttle * change, _LEAST_THROTTLE), 1.0)
        self.metrics.throttle = self._sampler.throttle

    # ---- working

    async def _work_forever(self) -> None:
        await self._has_looked.wait()
        while True:
            try:
                worked = await self.work_once()
            except StoreError as error:
                _log.warning("the queue of checks cannot be used: %s", error)
                await asyncio.sleep(_BACKOFF_S)
                continue
            except Exception:
                # Whatever is wrong with one job or one look, the others are still to be done.
                _log.exception("the worker stumbled; it goes on")
                await asyncio.sleep(_BACKOFF_S)
                continue
            if not worked:
                await asyncio.sleep(self._config.poll_s)

    async def work_once(self) -> bool:
        """Do one job if there is one and it may begin now; whether there was."""
        oldest_at = self._state.oldest_at
        if self._state.num_queued + self._state.num_running == 0 and not await self._has_work():
            return False
        is_overdue = oldest_at is not None and (self._now() - oldest_at).total_seconds() > self._config.overdue_s
        if not self._live.may_begin(is_overdue=is_overdue) or self._is_spent():
            return False
        config = self._config
        claim = await self._queue.claim(
            self.name, self._now(), lease_s=config.lease_s, max_attempts=config.max_attempts
        )
        if claim is None:
            self._state = QueueState()
            return False
        await self._do(claim)
        return True

    async def _has_work(self) -> bool:
        """Read before claiming: an idle worker must not take the write lock again and again."""
        self._state = self.metrics.state = await self._queue.state()
        return self._state.num_queued + self._state.num_running > 0

    def _is_spent(self) -> bool:
        """Whether not even the cheapest kind of check is within the budget; one never done yet may cost nothing."""
        is_known = {how for how, _ in self._expected}.issuperset(self._methods)
        cheapest = min(self._expected.values(), key=lambda each: each.cost_usd) if is_known else NOTHING
        return not self._budget.allows(self._ledger, cheapest)

    def _affordable(self, job: VerificationJob) -> CheckMethod | None:
        """Return the first way to do a check that the budget allows; None when it allows none.

        Where reading would do, a second answer is written only while what waits can still be read afterwards: ten
        verdicts by reading tell more than one by writing.
        """
        ways = self._ways(job)
        reading = self._expected_of("score", job).cost_usd
        for how in ways:
            expected = self._expected_of(how, job)
            if how == "generate" and "score" in ways:
                expected += Spent(reading * self._state.num_queued)
            if self._budget.allows(self._ledger, expected):
                return how
        return None

    def _expected_of(self, how: CheckMethod, job: VerificationJob) -> Spent:
        return self._expected.get((how, job.against_tier), NOTHING)

    def _ways(self, job: VerificationJob) -> tuple[CheckMethod, ...]:
        """Return how this job may be done, best first. Downward the lower tier must be asked: nothing is to be read."""
        if job.direction == "down":
            return ("generate",)
        if self._config.method == "auto" and not self._checker.can_only_read(job):
            return ("generate",)
        return self._methods

    async def _do(self, claim: Claim) -> None:
        """One try of one job, to whatever ending."""
        meter = SpendMeter()
        how = self._affordable(claim.job)
        if how is None:
            # Out of the way for a while: others behind it may be cheaper.
            later = self._now() + timedelta(seconds=_UNAFFORDABLE_S)
            await self._queue.release(claim, NOTHING, at=later)
            self.metrics.endings["unaffordable"] += 1
            return
        hold = None if self._lease is None else SpendingHold(self._lease)
        work = asyncio.create_task(self._checker.check(claim.job, how, meter, hold), name="suffice-verify-check")
        self._live.num_checks += 1
        ending = "yielded"
        try:
            ending = await self._watch(claim, work)
        finally:
            # Also when this worker is being closed: the model is let go, and the job is somebody else's at once.
            self._live.num_checks -= 1
            if ending != "ended":
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            self._note_spent(meter.spent)
            if ending == "yielded":
                self.metrics.endings["yielded"] += 1
                await self._queue.release(claim, meter.spent)
        if ending == "ended":
            await self._settle(claim, how, work, meter.spent)
        elif ending == "lost":
            self.metrics.endings["lost"] += 1
        if hold is not None:
            # Only here: what was raised before says that the database does not hold what the check cost.
            hold.settle()

    async def _watch(self, claim: Claim, work: asyncio.Task[CheckResult]) -> Literal["ended", "yielded", "lost"]:
        """Wait for the check, hold its lease, and say why not to wait any longer."""
        clock = asyncio.get_running_loop().time
        renew_at = clock() + self._config.lease_s / 3
        while True:
            done, _ = await asyncio.wait({work}, timeout=_YIELD_POLL_S)
            if done:
                return "ended"
            if self._live.must_yield():
                return "yielded"
            if clock() < renew_at:
                continue
            renew_at = clock() + self._config.lease_s / 3
            try:
                if not await self._queue.renew(claim, self._now(), lease_s=self._config.lease_s):
                    return "lost"
            except StoreError as error:
                # Whether it is still ours is asked again with the result.
                _log.warning("the lease of check %s was not renewed: %s", claim.job.verification_id, error)

    async def _settle(self, claim: Claim, how: CheckMethod, work: asyncio.Task[CheckResult], spent: Spent) -> None:
        """Store how a check ended."""
        identity = claim.job.verification_id
        try:
            result = replace(work.result(), spent=spent)
        except (NothingToGoBy, OutsideRegions, ValueError) as error:
            await self._queue.fail(claim, str(error), spent, self._now())
            self.metrics.endings["failed"] += 1
            _log.warning("check %s cannot be done: %s", identity, error)
        except BackendError as error:
            await self._try_later(claim, error, spent, may_help=error.retryable)
        except StoreError:
            raise
        except Exception as error:
            _log.exception("check %s broke", identity)
            await self._try_later(claim, error, spent, may_help=True)
        else:
            if await self._queue.complete(claim, result, self._now(), keep_texts=self._keep_texts):
                self.metrics.note_verdict(claim.job, result)
                self._learn_cost((how, claim.job.against_tier), spent)
                await self._note_gold(claim, result)
            else:
                self.metrics.endings["lost"] += 1

    async def _try_later(self, claim: Claim, error: Exception, spent: Spent, *, may_help: bool) -> None:
        text = f"{type(error).__name__}: {error}"
        if not may_help or claim.num_attempts >= self._config.max_attempts:
            await self._queue.fail(claim, text, spent, self._now())
            self.metrics.endings["failed"] += 1
            return
        wait_s = min(self._config.retry_base_s * 2 ** (claim.num_attempts - 1), _MAX_RETRY_S)
        if isinstance(error, BackendOverloaded):
            wait_s = max(wait_s, error.retry_after_s or 0.0)
        await self._queue.retry(claim, text, spent, self._now() + timedelta(seconds=wait_s))
        self.metrics.endings["retried"] += 1

    async def _note_gold(self, claim: Claim, result: CheckResult) -> None:
        """Compare both answers with what callers have reported as right; afterwards their texts may be gone."""
        job = claim.job
        references = [each.reference for each in await self._book.of_request(job.request_id) if each.reference]
        if not references:
            return
        answers = {job.tier: job.answer}
        if result.other_answer is not None:
            answers[job.against_tier] = result.other_answer
        await self._book.add_gold(
            GoldLabel(
                request_id=job.request_id,
                tier=tier,
                source="reference",
                label=matches_reference(references[-1], text),
                created_at=self._now(),
                note="compared when checked",
            )
            for tier, text in answers.items()
            if not text.startswith(CALLS_MARK)
        )

    def _learn_cost(self, kind: tuple[CheckMethod, int], spent: Spent) -> None:
        """The first check of a kind, by method and tier asked, says what the next will cost, until more have."""
        expected = self._expected.get(kind, spent)
        newest = Decimal(repr(_NEWEST))
        self._expected[kind] = Spent(
            expected.cost_usd + newest * (spent.cost_usd - expected.cost_usd),
            expected.compute_s + _NEWEST * (spent.compute_s - expected.compute_s),
        )

    def _note_spent(self, spent: Spent) -> None:
        self._ledger = self.metrics.ledger = self._ledger.plus(spent)
        self.metrics.note_spent(spent)
