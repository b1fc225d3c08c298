"""From the log to a router that may serve: read, fit, judge, and only then, in one transaction, publish.

Nothing that serves is touched before the end, so a run may fail or be killed at any point. A finished run leaves
a router version with its evaluation; where that says "better", a rollout that begins in shadow.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, update

from classifier.errors import TrainingError
from classifier.router import ArtifactRouter
from gateway.control.control_writer import ControlWriter
from gateway.control.errors import Conflict
from gateway.control.leader import make_holder
from gateway.control.router_set import describe
from gateway.ids import uuid7
from gateway.learn.candidate import Candidate, fit_candidate, held_out_metrics
from gateway.learn.candidate_evaluation import MIN_ROWS, RouterComparison, RouterContender, compare
from gateway.learn.decision_replay import Estimates
from gateway.learn.drift_caution import (
    JudgedCandidate,
    confidence_per_chain,
    inherited_prices,
    least_cautious,
    without_stale,
)
from gateway.learn.errors import NothingToLearn, RetrainRefused
from gateway.learn.feature_sources import sources_of
from gateway.learn.holdout_split import split_rows
from gateway.learn.learning_table import LearningTable
from gateway.learn.prompt_reader import with_requests
from gateway.learn.retrain_snapshot import RetrainSnapshot, read_snapshot
from gateway.learn.run_store import LEASE, RunStore
from gateway.learn.table_reader import TableSpec, read_table
from gateway.models.loader import complete_policies
from gateway.store.control import ControlStore
from gateway.store.control_records import Lease, RouterVersion
from gateway.store.errors import StoreError
from gateway.store.leases import LeaseStore
from gateway.store.store import Store
from gateway.store.tables import evaluations, retrain_runs, router_versions
from policies.policy import Policy
from policies.pricing import price_usd
from policies.promotion import PromotionRule, PromotionVerdict

if TYPE_CHECKING:
    from gateway.config.settings import Settings

_log = logging.getLogger("suffice.learn")

Report = Callable[[str, float], None]
"""Told the stage and the part of the whole that is done, 0..1."""

Now = Callable[[], datetime]

_BY = "retrain"
_URGENT = frozenset({"drift", "floor", "monitor"})
_STATEMENT_TIMEOUT_S = 600.0
_VALUE_FACTOR = 20


@dataclass(frozen=True, slots=True)
class RetrainRequest:
    """Holds the request for a retrain.

    Parameters
    ----------
    trigger : ``weekly``, ``drift``, ``admin`` or ``cli``
    reason : in words
    run_id : a requested run to take; None makes one
    dry_run : judge, and write nothing at all
    seed : of folds and trees
    """

    trigger: str = "cli"
    reason: str = ""
    run_id: str | None = None
    dry_run: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RetrainOutcome:
    """Says how a run ended; ``status`` is ``kept`` or ``promoted``, for a dry run what it would have been."""

    status: str
    reason: str
    run_id: str | None = None
    router_version: str | None = None
    evaluation: Mapping[str, Any] | None = None
    card: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class _RetrainResult:
    """Holds a judged candidate; ``supersedes`` is the canary router that it is better than as well."""

    candidate: Candidate
    comparison: RouterComparison
    card: Mapping[str, Any]
    supersedes: str | None = None


async def retrain(
    settings: Settings,
    wish: RetrainRequest,
    report: Report = lambda stage, done: None,
    *,
    now: Now = lambda: datetime.now(UTC),
) -> RetrainOutcome:
    """Make a candidate from the log and judge it; promote it when the evidence says so. ``now`` ends the window.

    Raises
    ------
    RetrainRefused
        Another retrain is under way, or nothing routes that could be improved.
    StoreError, ClassifierError
    """
    config = replace(settings.database, write_timeout_s=_STATEMENT_TIMEOUT_S)
    async with Store(config) as store:
        if wish.dry_run:
            try:
                return _outcome(await _work(settings, store, wish, report, now()), None)
            except NothingToLearn as error:
                return RetrainOutcome("kept", str(error))
        async with _held(store, settings.learning.lease_s) as lease:
            runs = RunStore(store, now)
            await runs.mark_abandoned(datetime.now(UTC), settings.learning.lease_s)
            run_id = await runs.begin(wish.run_id, wish.trigger, wish.reason, lease.holder)
            try:
                return await _run(settings, store, wish, run_id, lease, report, now)
            except NothingToLearn as error:
                await runs.end(run_id, "kept", stage="done", progress=1.0, error=str(error))
                return RetrainOutcome("kept", str(error), run_id)
            except BaseException as error:
                await asyncio.shield(runs.end(run_id, "failed", error=f"{type(error).__name__}: {error}"[:2000]))
                raise


async def _run(
    settings: Settings, store: Store, wish: RetrainRequest, run_id: str, lease: Lease, report: Report, now: Now
) -> RetrainOutcome:
    runs, noted, ended = RunStore(store, now), ("start", 0.0), threading.Event()

    def note(stage: str, done: float) -> None:
        nonlocal noted
        if ended.is_set():  # asked from the thread that fits, which no cancelling reaches
            raise RetrainRefused("The run has ended.")
        noted = (stage, done)
        report(stage, done)

    async def beat() -> None:
        """Renew the lease and write down how far the run is."""
        while True:
            await runs.note(run_id, *noted)
            await asyncio.sleep(settings.learning.lease_s / 4)
            if await LeaseStore(store).renew(lease, settings.learning.lease_s) is None:
                raise RetrainRefused("Another process took over the retraining.")

    beating = asyncio.create_task(beat())
    working = asyncio.create_task(_work(settings, store, wish, note, now()))
    try:
        await asyncio.wait({beating, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            beating.result()  # raises what ended the heartbeat
        result = working.result()
    finally:
        ended.set()
        for task in (beating, working):
            task.cancel()
        await asyncio.gather(beating, working, return_exceptions=True)
    await _publish(store, result, run_id, lease, now())
    return await _promote(store, result, runs, run_id, now)


async def _work(
    settings: Settings, store: Store, wish: RetrainRequest, report: Report, now: datetime
) -> _RetrainResult:
    """Everything that changes nothing."""
    scene = await read_snapshot(settings, store, now)
    config = settings.learning
    spec = TableSpec(
        len(settings.ladder),
        scene.serving.num_components,
        scene.versions,
        now - timedelta(days=config.window_days),
        now,
        config.max_checked_rows,
        config.max_unchecked_rows,
        scene.serving.reads_tools,
    )
    report("read the log", 0.0)
    table = await read_table(store, spec, lambda done: report("read the log", 0.35 * done))
    if settings.log.prompts == "full":
        table = await with_requests(store, table)
    return await asyncio.to_thread(_fit_and_judge, settings, scene, table, wish, report)


@dataclass(frozen=True, slots=True)
class _FittedCandidate:
    """A candidate, the rows it learnt from, and the rows to judge it on."""

    candidate: Candidate
    train: LearningTable
    judge: LearningTable
    protocol: str


def _fit_and_judge(
    settings: Settings, scene: RetrainSnapshot, table: LearningTable, wish: RetrainRequest, report: Report
) -> _RetrainResult:
    fitted = _fit(settings, scene, table, wish, report)
    report("judge", 0.8)
    result = _judge(settings, scene, fitted)
    report("publish", 0.95)
    return result


def _fit(
    settings: Settings, scene: RetrainSnapshot, table: LearningTable, wish: RetrainRequest, report: Report
) -> _FittedCandidate:
    config = settings.learning
    num_labels = table.checked().num_labels if len(table) else 0
    if num_labels < config.min_labels:
        raise NothingToLearn(
            f"{num_labels} checked answers since {config.window_days:g} days can be learnt from "
            f"({table.num_other} more belong to other routers, {table.num_unread} rows have no features); "
            f"{config.min_labels} are needed."
        )
    # While any tier is quarantined every retrain is judged on what came since, whatever it was asked for by.
    since = scene.quarantined_since
    is_urgent = since is not None or wish.trigger in _URGENT
    if since is not None:
        table = table.weighted_since(since.timestamp())
    parts = split_rows(table, config.judge_share, is_urgent=is_urgent, is_cut=since is not None)
    train, judge = table.take(parts.train), table.take(parts.judge)
    train = train if since is None else without_stale(train, since)
    if (num_framed := int((train.sampling_weight > 0).sum())) < MIN_ROWS:
        raise NothingToLearn(f"{num_framed} requests since the doubt began say too little; {MIN_ROWS} are needed.")
    try:
        candidate = fit_candidate(
            train,
            judge,
            scene.serving,
            settings.ladder,
            sources=sources_of(config),
            seed=wish.seed,
            window=_window(table, parts.protocol),
            step=report,
        )
    except TrainingError as error:
        raise NothingToLearn(str(error)) from error
    return _FittedCandidate(candidate, train, candidate.judged_rows(judge), parts.protocol)


def _judge(settings: Settings, scene: RetrainSnapshot, fitted: _FittedCandidate) -> _RetrainResult:
    judge = fitted.judge
    rule = _rule(settings, scene, judge)
    if scene.quarantined_since is not None:
        rule = replace(rule, confidence=confidence_per_chain(rule.confidence))
    theirs = replace(_contender(scene.serving, scene, judge), quarantine=scene.quarantine)
    theirs = theirs.decided_by(judge, settings.ladder, scene.default)

    def judged(ours: RouterContender, theirs: RouterContender = theirs) -> RouterComparison:
        return compare(judge, ours, theirs, settings.ladder, scene.default, rule)

    tried = _tried(fitted.candidate, judge, scene, judged)
    ours, comparison, supersedes = tried.contender, tried.comparison, scene.behind
    if scene.canary is not None and comparison.is_better:
        # Some of these rows taught the canary router, none the candidate: a tie is the canary's.
        over = judged(ours, _contender(scene.canary, scene, judge))
        comparison.body["over_rollout"] = over.body
        is_over = over.is_better or (scene.behind is not None and over.judgement.verdict is not PromotionVerdict.KEEP)
        supersedes = scene.canary.version if is_over else None
    estimates = {"candidate": ours.estimates.good, "serving": theirs.estimates.good}
    common = {"held_out": held_out_metrics(judge, fitted.train, estimates), "protocol": fitted.protocol}
    comparison.body.update(common)
    card = {**describe(ArtifactRouter(tried.candidate.artifact)), **common}
    return _RetrainResult(tried.candidate, comparison, card, supersedes)


def _tried(
    candidate: Candidate,
    judge: LearningTable,
    scene: RetrainSnapshot,
    judged: Callable[[RouterContender], RouterComparison],
) -> JudgedCandidate:
    """Return the candidate as it was judged: as it is, or after a drift with as little caution as it is better with."""

    def complete(router: ArtifactRouter) -> Mapping[str, Policy]:
        return complete_policies(scene.policies, router)

    ours = RouterContender(candidate.estimates(judge), complete(ArtifactRouter(candidate.artifact)))
    if scene.quarantined_since is None:
        return JudgedCandidate(candidate, ours, judged(ours))
    prices = inherited_prices(candidate.artifact.metadata["decision"], scene.serving.artifact)
    return least_cautious(candidate, ours, judged, complete, prices, scene.quarantined_since)


def _contender(router: ArtifactRouter, scene: RetrainSnapshot, table: LearningTable) -> RouterContender:
    return RouterContender(Estimates(*router.revise(table.views)), complete_policies(scene.policies, router))


def _window(table: LearningTable, protocol: str) -> str:
    first, last = (datetime.fromtimestamp(table.created_s[i], UTC).isoformat("T", "minutes") for i in (0, -1))
    return f"{table.num_requests} requests of the log from {first} to {last}; {protocol}"


def _rule(settings: Settings, scene: RetrainSnapshot, table: LearningTable) -> PromotionRule:
    """States what counts as better.

    A point of quality is worth what is configured, else what the policy or its router says, else a multiple of what the
    top tier costs more.
    """
    config = settings.learning
    policy = complete_policies(scene.policies, scene.serving)[scene.default]
    value = config.quality_value_usd if config.quality_value_usd is not None else policy.quality_value_usd
    if value is None:
        num_in, num_out = int(table.prompt_tokens.mean()), int(table.completion_tokens.mean())
        costs = [price_usd(tier, num_in, num_out) for tier in settings.ladder]
        value = _VALUE_FACTOR * (costs[-1] - min(costs))
    return PromotionRule(
        float(value), config.confidence, config.max_quality_loss, min_effective_rows=config.min_effective_rows
    )


@asynccontextmanager
async def _held(store: Store, lease_s: float) -> AsyncIterator[Lease]:
    """The one retrain at a time."""
    leases = LeaseStore(store)
    lease = await leases.acquire(LEASE, make_holder(), lease_s)
    if lease is None:
        raise RetrainRefused("Another retrain is under way.")
    try:
        yield lease
    finally:
        with suppress(StoreError):  # it runs out by itself
            await asyncio.shield(leases.release(lease))


async def _publish(store: Store, result: _RetrainResult, run_id: str, lease: Lease, now: datetime) -> None:
    """Router, evaluation and what the run says of them, together or not at all; refused if the lease was lost."""
    artifact, judged = result.candidate.artifact, result.comparison
    content = artifact.as_bytes()
    evaluation_id = uuid7()
    entry = RouterVersion(
        version=artifact.version,
        created_at=now,
        card=result.card,
        parent=str(artifact.metadata["parent"]),
        origin="retrain",
        status="candidate" if judged.is_better else "rejected",
        note=judged.judgement.reason,
    )
    values = {name: getattr(entry, name) for name in entry.__slots__}
    body = judged.body | {"run_id": run_id}
    async with ControlWriter(ControlStore(store), clock=lambda: now).changes.change(_BY, lease=lease) as change:
        router = change.transaction.insert(router_versions).values(**values, artifact=content)
        await change.execute(router.on_conflict_do_nothing())
        await change.execute(
            insert(evaluations).values(
                evaluation_id=evaluation_id, created_at=now, kind="offpolicy", subject=artifact.version, body=body
            )
        )
        ended: dict[str, Any] = {"router_version": artifact.version, "evaluation_id": evaluation_id}
        if not judged.is_better:
            ended |= {"status": "kept", "stage": "done", "progress": 1.0, "finished_at": now}
            ended["error"] = judged.judgement.reason
        await change.execute(update(retrain_runs).where(retrain_runs.c.run_id == run_id).values(**ended))


async def _promote(store: Store, result: _RetrainResult, runs: RunStore, run_id: str, now: Now) -> RetrainOutcome:
    """Begin the rollout of a better router; one under way that is neither worse nor behind keeps it as a candidate."""
    if not result.comparison.is_better:
        return _outcome(result, run_id)
    version, reason = result.candidate.artifact.version, result.comparison.judgement.reason
    status = "promoted"
    try:
        writer = ControlWriter(ControlStore(store), clock=now)
        await writer.routers.start_rollout(version, by=_BY, reason=reason, supersedes=result.supersedes)
    except Conflict as conflict:
        status, reason = "kept", f"{reason} It waits as a candidate: {conflict.found} is in the way."
    error = None if status == "promoted" else reason
    await runs.end(run_id, status, stage="done", progress=1.0, error=error)
    return replace(_outcome(result, run_id), status=status, reason=reason)


def _outcome(result: _RetrainResult, run_id: str | None) -> RetrainOutcome:
    judged = result.comparison
    return RetrainOutcome(
        "promoted" if judged.is_better else "kept",
        judged.judgement.reason,
        run_id,
        result.candidate.artifact.version,
        judged.body,
        result.card,
    )
