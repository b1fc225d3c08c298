"""A router is learnt from the log on both databases, serves only when it is better, and otherwise changes nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from sqlalchemy import select, update

from classifier.router import ArtifactRouter
from classifier.types import RouterRequest
from gateway.config.settings import Settings
from gateway.control.control_state import CLOSED, ControlState
from gateway.control.control_writer import ControlWriter
from gateway.control.errors import LeaseLost
from gateway.control.router_loader import read_router
from gateway.control.router_set import recovering_since
from gateway.learn.drift_caution import CHAINS
from gateway.learn.errors import RetrainRefused
from gateway.learn.retrain import RetrainRequest, retrain
from gateway.learn.retrain_process import portable, retrain_in_child
from gateway.learn.retrain_schedule import RetrainSchedule
from gateway.learn.run_store import LEASE, RetrainRun, RunStore
from gateway.store.control import ControlStore
from gateway.store.control_records import Lease
from gateway.store.leases import LeaseStore
from gateway.store.store import Store
from gateway.store.tables import evaluations, leases, retrain_runs, router_versions
from tests.gateway.learn.world import CLEAR_CUT, base_router, draw_prompts, put_in_force, write_log

MakeSettings = Callable[..., Settings]
ALL = ("easy", "hard", "new")


async def filled(settings: Settings, count: int, families: tuple[str, ...] = ALL) -> None:
    """A database in which the base router serves and has served."""
    router = base_router()
    async with Store(settings.database) as store:
        await put_in_force(store, settings, router)
        await write_log(store, settings, router, draw_prompts(random.Random(1), count, families))


async def runs_in(store: Store) -> list[RetrainRun]:
    """Every run of a database, newest first."""
    async with store.transaction() as connection:
        found = await connection.execute(select(retrain_runs).order_by(retrain_runs.c.run_id.desc()))
        return [RetrainRun(**row) for row in found.mappings()]


async def state_of(store: Store) -> ControlState:
    return ControlState.decode(await ControlStore(store).rows())


@pytest.mark.slow
async def test_a_family_that_looked_foreign_comes_down_and_the_rollout_begins(world_settings: MakeSettings) -> None:
    settings = world_settings(**CLEAR_CUT)
    await filled(settings, 1500)
    stages: list[str] = []
    outcome = await retrain(settings, RetrainRequest(trigger="drift"), lambda stage, done: stages.append(stage))
    assert outcome.status == "promoted", outcome.reason
    assert outcome.evaluation is not None
    assert outcome.evaluation["candidate"]["shares"][0] > outcome.evaluation["serving"]["shares"][0] + 0.15
    assert outcome.evaluation["floor"]["is_held"]
    assert list(dict.fromkeys(stages)) == ["read the log", "fit", "derive thresholds", "judge", "publish"]
    async with Store(settings.database) as store:
        state = await state_of(store)
        assert state.router.active == base_router().version  # nothing serves differently yet
        assert state.router.canary is not None
        assert state.router.canary.version == outcome.router_version
        assert state.router.canary.stage == "shadow"
        (run,) = await runs_in(store)
        assert (run.status, run.router_version, run.progress) == ("promoted", outcome.router_version, 1.0)
        content = await ControlStore(store).router_bytes(str(outcome.router_version))
        entry = await ControlStore(store).get_router(str(outcome.router_version))
        async with store.transaction() as connection:
            (judged,) = (await connection.execute(select(evaluations))).mappings()
    assert entry is not None
    assert (entry.origin, entry.parent, entry.card["base"]) == ("retrain", base_router().version, base_router().version)
    assert judged["subject"] == outcome.router_version
    assert {"length", "base_rate", "candidate", "serving"} <= set(judged["body"]["held_out"][0])
    assert content is not None
    learnt = read_router(str(outcome.router_version), content)
    new = [RouterRequest((("user", each.text),)) for each in draw_prompts(random.Random(9), 100, ("new",))]
    before, after = base_router().predict(new), learnt.predict(new)
    assert np.mean([each.novelty for each in before]) > 0.995
    assert np.mean([each.novelty < 0.995 for each in after]) > 0.8
    assert np.mean([each.tiers[0].p_as_good for each in after]) > 0.9


@pytest.mark.slow
async def test_after_a_drift_caution_is_given_up_as_far_as_the_log_carries_and_is_remembered(
    world_settings: MakeSettings,
) -> None:
    settings = world_settings()
    await filled(settings, 1500)
    drift_at = datetime.now(UTC) - timedelta(days=2)
    async with Store(settings.database) as store:
        writer = ControlWriter(ControlStore(store), clock=lambda: drift_at)
        await writer.quarantines.add(settings.policy.name, base_router().version, {1: CLOSED}, "drift", by="monitor")
    outcome = await retrain(settings, RetrainRequest(trigger="weekly"))
    assert outcome.status == "promoted", outcome.reason
    assert outcome.evaluation is not None
    assert outcome.card is not None
    assert outcome.evaluation["serving"]["shares"] == [0.0, 1.0], "as it serves, with the doubt about it"
    assert outcome.evaluation["protocol"].startswith("checked requests since the doubt")
    assert outcome.evaluation["floor"]["is_held"]
    assert outcome.card["caution"] in {factor for chain in CHAINS for factor in chain}
    assert outcome.card["drift_at"] == drift_at.isoformat()
    async with Store(settings.database) as store:
        content = await ControlStore(store).router_bytes(str(outcome.router_version))
        assert content is not None
        learnt = read_router(str(outcome.router_version), content)
    assert recovering_since(learnt, datetime.now(UTC)) == drift_at


@pytest.mark.slow
async def test_nothing_to_gain_keeps_the_serving_router(world_settings: MakeSettings) -> None:
    settings = world_settings()
    await filled(settings, 700, ("easy", "hard"))
    outcome = await retrain(settings, RetrainRequest(trigger="weekly"))
    assert outcome.status == "kept"
    async with Store(settings.database) as store:
        state = await state_of(store)
        assert (state.router.active, state.router.canary) == (base_router().version, None)
        entry = await ControlStore(store).get_router(str(outcome.router_version))
        assert entry is not None
        assert (entry.status, entry.note) == ("rejected", outcome.reason)


async def test_too_few_checks_are_said(world_settings: MakeSettings) -> None:
    settings = world_settings()
    await filled(settings, 60)
    outcome = await retrain(settings, RetrainRequest())
    assert outcome.status == "kept"
    assert "checked answers" in outcome.reason
    async with Store(settings.database) as store:
        (run,) = await runs_in(store)
        assert (run.status, run.error) == ("kept", outcome.reason)


async def test_a_dry_run_writes_nothing(world_settings: MakeSettings) -> None:
    settings = world_settings()
    await filled(settings, 500)
    async with Store(settings.database) as store:
        before = await state_of(store)
        outcome = await retrain(settings, RetrainRequest(dry_run=True))
        assert outcome.evaluation is not None
        assert await state_of(store) == before
        assert await runs_in(store) == []
        assert len(await ControlStore(store).list_routers()) == 1


async def test_without_a_router_there_is_nothing_to_improve(world_settings: MakeSettings) -> None:
    settings = world_settings(router__artifact="none")
    with pytest.raises(RetrainRefused, match="bootstrap"):
        await retrain(settings, RetrainRequest())


async def test_one_at_a_time(world_settings: MakeSettings) -> None:
    settings = world_settings()
    await filled(settings, 60)
    async with Store(settings.database) as store:
        lease = await LeaseStore(store).acquire(LEASE, "another", 60.0)
        assert lease is not None
        with pytest.raises(RetrainRefused, match="under way"):
            await retrain(settings, RetrainRequest())
        assert await runs_in(store) == []


@pytest.mark.slow
async def test_a_process_that_lost_its_lease_publishes_nothing(world_settings: MakeSettings) -> None:
    settings = world_settings()
    await filled(settings, 500)
    thief: list[Lease | None] = []

    def steal(stage: str, done: float) -> None:
        if stage == "publish":
            thief.append(asyncio.run_coroutine_threadsafe(take(), loop).result())

    async def take() -> Lease | None:
        async with Store(settings.database) as store:
            async with store.transaction() as connection:
                ran_out = {"expires_at": datetime.now(UTC) - timedelta(seconds=1)}
                await connection.execute(update(leases).where(leases.c.name == LEASE).values(**ran_out))
            return await LeaseStore(store).acquire(LEASE, "thief", 60.0)

    loop = asyncio.get_running_loop()
    with pytest.raises((LeaseLost, RetrainRefused)):  # as it publishes, or from a heartbeat just before
        await retrain(settings, RetrainRequest(), steal)
    assert thief[0] is not None
    async with Store(settings.database) as store:
        assert len(await ControlStore(store).list_routers()) == 1
        assert (await state_of(store)).router.canary is None


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.5, 1.5, 3.0, 4.5])
async def test_kill_9_leaves_no_half_promoted_router(world_settings: MakeSettings, after_s: float) -> None:
    settings = world_settings(learning__lease_s=0.5)
    await filled(settings, 500)
    async with Store(settings.database) as store:
        run_id = await ControlWriter(ControlStore(store)).request_retrain("drift", "test")
        child = asyncio.create_task(retrain_in_child(settings, run_id, "drift"))
        await asyncio.sleep(after_s)
        for pid in children_of(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        status = await child
        await asyncio.sleep(0.8)
        marked = await RunStore(store).mark_abandoned(datetime.now(UTC))
        run = await RunStore(store).get(run_id)
        assert run is not None
        state = await state_of(store)
        assert state.router.active == base_router().version
        if status == 0:  # it was quicker than the kill
            assert run.status in ("kept", "promoted")
        else:
            # Killed after its end was written, and before it was gone, it has ended.
            assert run.status in ("abandoned", "requested", "kept", "promoted")
            assert (run_id in marked) == (run.status == "abandoned")
        async with store.transaction() as connection:
            found = (await connection.execute(select(router_versions.c.version, router_versions.c.status))).all()
            judged = set((await connection.execute(select(evaluations.c.subject))).scalars())
        learnt = {version: status for version, status in found if version != base_router().version}
        assert set(learnt) == judged
        serving = {state.router.canary.version} if state.router.canary else set()
        assert serving <= set(learnt)
        # Another run finds everything in order.
        again = await retrain(settings, RetrainRequest(trigger="drift"))
        assert again.status in ("kept", "promoted")


def children_of(pid: int) -> list[int]:
    import psutil

    return [
        each.pid
        for each in psutil.Process(pid).children()
        if "gateway.learn.retrain_process" in " ".join(each.cmdline())
    ]


@pytest.mark.slow
async def test_the_leader_retrains_by_the_week_and_when_asked(world_settings: MakeSettings) -> None:
    settings = world_settings(learning__every_days=7, learning__min_labels=40)
    await filled(settings, 300)
    now = datetime.now(UTC)
    async with Store(settings.database) as store:
        writer = ControlWriter(ControlStore(store))
        schedule = RetrainSchedule(settings, store, writer, clock=lambda: now)
        lease = Lease(name="leader", holder="me", token=1, expires_at=now + timedelta(hours=1))
        await schedule.look(lease)
        assert await runs_in(store) == []  # not due yet
        now += timedelta(days=8)
        await schedule.look(lease)
        (run,) = await runs_in(store)
        assert run.trigger == "weekly"
        assert schedule._child is not None
        assert await schedule._child == 0
        run = await RunStore(store).get(run.run_id)  # type: ignore[assignment]
        assert run.status in ("kept", "promoted"), run.error
        asked = await writer.request_retrain("admin", "by hand")
        await schedule.look(lease)
        assert await schedule._child == 0
        by_hand = await RunStore(store).get(asked)
        assert by_hand is not None
        assert by_hand.status in ("kept", "promoted")
        await schedule.close()


async def test_a_dead_process_is_noticed(world_settings: MakeSettings) -> None:
    settings = world_settings()
    async with Store(settings.database) as store:
        runs = RunStore(store)
        lease = await LeaseStore(store).acquire(LEASE, "dead", 600)
        assert lease is not None
        run_id = await runs.begin(None, "cli", "", "dead")
        late = timedelta(milliseconds=1)
        assert await runs.mark_abandoned(lease.expires_at - late) == []
        assert await runs.mark_abandoned(lease.expires_at + late) == [run_id]
        assert await runs.mark_abandoned(lease.expires_at + late) == []
        with pytest.raises(RetrainRefused):
            await runs.begin(run_id, "cli", "", "me")


@pytest.mark.slow
async def test_the_next_candidate_rests_on_the_base_not_on_layers(world_settings: MakeSettings) -> None:
    settings = world_settings()
    await filled(settings, 1500)
    first = await retrain(settings, RetrainRequest(trigger="drift"))
    async with Store(settings.database) as store:
        writer = ControlWriter(ControlStore(store))
        await writer.routers.promote(str(first.router_version), by="test")
        content = await ControlStore(store).router_bytes(str(first.router_version))
        assert content is not None
        serving = read_router(str(first.router_version), content)
        assert isinstance(serving, ArtifactRouter)
        await write_log(store, settings, serving, draw_prompts(random.Random(3), 400, ALL), seed=5)
        second = await retrain(settings, RetrainRequest(trigger="weekly", seed=1))
        entry = await ControlStore(store).get_router(str(second.router_version))
    assert entry is not None
    assert entry.card["base"] == base_router().version
    assert entry.parent == first.router_version
    assert entry.card["adjustment"]["num_requests"] == 1900  # rows of both routers are rows of the base


def test_settings_travel_whole(world_settings: MakeSettings) -> None:
    from gateway.config.settings import load_settings

    settings = world_settings(learning__max_quality_loss=0.02)
    told = portable(settings)
    again = load_settings(told["config_file"], environ={}, overrides=told["overrides"])
    assert again.learning == settings.learning
    assert again.database == settings.database
    assert dataclasses.asdict(again.router) == dataclasses.asdict(settings.router)
