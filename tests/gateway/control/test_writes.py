"""Changes of what is in force: ordered, all or nothing, refused when they come too late; on both databases."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import select

from gateway.control.audited_change import Audit
from gateway.control.control_state import CLOSED, ControlState, Quarantine
from gateway.control.control_writer import ControlWriter
from gateway.control.errors import Conflict, LeaseLost, UnknownVersion
from gateway.ids import uuid7
from gateway.store.control import ControlStore
from gateway.store.control_records import AuditEntry, RouterVersion
from gateway.store.leases import LeaseStore
from gateway.store.records import PolicyVersion
from gateway.store.store import Store
from gateway.store.tables import admin_audit, rollouts, router_versions

NOW = datetime.now(UTC)


def policy(version: str, name: str = "default") -> PolicyVersion:
    return PolicyVersion(name=name, version=version, created_at=NOW, body={"quality_floor": 0.9})


def router(version: str) -> RouterVersion:
    return RouterVersion(version=version, created_at=NOW)


def audit(action: str) -> Audit:
    return lambda before: AuditEntry(
        audit_id=uuid7(), created_at=NOW, action=action, subject="s", before=before.kill_switch.as_dict()
    )


async def state_of(store: Store) -> ControlState:
    return ControlState.decode(await ControlStore(store).rows())


async def rows(store: Store, table: Any) -> list[Any]:
    async with store.transaction() as connection:
        return list((await connection.execute(select(table))).mappings())


async def configured(store: Store, mark: str = "m1", version: str = "v1", router: str = "none") -> ControlWriter:
    writer = ControlWriter(ControlStore(store))
    await writer.apply_configuration({"default": (policy(version), mark)}, (router, None, b""))
    return writer


async def test_what_was_put_is_read_back(store: Store) -> None:
    writer = await configured(store)
    await writer.set_kill_switch(True, "fire", by="ada")
    state = await state_of(store)
    assert (state.kill_switch.on, state.kill_switch.reason) == (True, "fire")
    assert state.policies.active == {"default": "v1"}
    assert state.generation == await ControlStore(store).generation() == 2
    assert ControlState.decode({k: (v, state.versions[k]) for k, v in _values(state).items()}) == state


def _values(state: ControlState) -> dict[str, Any]:
    shown = state.as_dict()
    return {name: shown.get(name, {}) if name != "generation" else {} for name in state.versions}


async def test_concurrent_changes_are_ordered_and_none_is_lost(store: Store) -> None:
    writer = await configured(store)
    await asyncio.gather(*(writer.policies.put(policy("v1", f"p{n}"), by="x") for n in range(12)))
    state = await state_of(store)
    assert set(state.policies.active) == {"default", *(f"p{n}" for n in range(12))}
    assert state.generation == 13


async def test_the_second_of_two_editors_is_refused(store: Store) -> None:
    writer = await configured(store)
    await writer.policies.put(policy("v2"), by="ada", if_active="v1")
    with pytest.raises(Conflict, match="expected v1, found v2"):
        await writer.policies.put(policy("v3"), by="bob", if_active="v1", audit=audit("put"))
    assert (await state_of(store)).policies.active == {"default": "v2"}
    assert await rows(store, admin_audit) == []
    assert await store.get_policy_version("default", "v3") is None
    version = (await state_of(store)).versions["policies"]
    await writer.set_kill_switch(True, "", by="ada", expected_version=0)
    with pytest.raises(Conflict):
        await writer.set_kill_switch(False, "", by="bob", expected_version=0)
    assert (await state_of(store)).versions["policies"] == version


async def test_the_audit_entry_is_part_of_the_change(store: Store) -> None:
    writer = await configured(store)
    await writer.set_kill_switch(True, "fire", by="ada", audit=audit("kill"))
    assert [row["action"] for row in await rows(store, admin_audit)] == ["kill"]
    with pytest.raises(UnknownVersion):
        await writer.policies.activate("default", "never", by="ada", audit=audit("activate"))
    assert len(await rows(store, admin_audit)) == 1


async def test_an_edit_stays_until_the_configuration_itself_changes(store: Store) -> None:
    writer = await configured(store, "m1", "v1")
    await writer.policies.put(policy("edited"), by="ada")
    await configured(store, "m1", "v1")
    assert (await state_of(store)).policies.active == {"default": "edited"}
    await configured(store, "m2", "v2")
    assert (await state_of(store)).policies.active == {"default": "v2"}
    assert await store.get_policy_version("default", "edited") is not None


async def test_a_promoted_router_stays_until_the_configured_one_changes(store: Store) -> None:
    writer = await configured(store, router="r1")
    await writer.routers.add(router("r2"), b"bytes", by="x")
    await writer.routers.promote("r2", by="ada")
    await configured(store, router="r1")
    state = await state_of(store)
    assert (state.router.active, state.router.previous) == ("r2", ("r1",))
    await configured(store, router="r3")
    assert (await state_of(store)).router.active == "r3"


async def test_what_the_configuration_drops_goes_unless_it_was_edited(store: Store) -> None:
    writer = ControlWriter(ControlStore(store))
    config = {name: (_from_config(name), "m") for name in ("default", "kept", "edited", "dropped")}
    await writer.apply_configuration(config, ("none", None, b""))
    await writer.policies.put(policy("e", "edited"), by="ada")
    shorter = {name: config[name] for name in ("default", "kept")}
    await writer.apply_configuration(shorter, ("none", None, b""))
    assert (await state_of(store)).policies.active == {"default": "v1", "kept": "v1", "edited": "e"}


def _from_config(name: str) -> PolicyVersion:
    return PolicyVersion(name=name, version="v1", created_at=NOW, body={}, author="config")


async def test_the_status_of_routers_follows_what_serves(store: Store) -> None:
    writer = ControlWriter(ControlStore(store))
    for version in ("r1", "r2"):
        await writer.apply_configuration({}, (version, router(version), b"bytes"))
    found = {each.version: each.status for each in await writer.store.list_routers()}
    assert found == {"r1": "retired", "r2": "serving"}
    await writer.routers.promote("r1", by="ada")
    await writer.apply_configuration({}, ("r2", router("r2"), b"bytes"))
    found = {each.version: each.status for each in await writer.store.list_routers()}
    assert found == {"r1": "serving", "r2": "retired"}


async def test_the_default_policy_cannot_be_removed(store: Store) -> None:
    writer = await configured(store)
    with pytest.raises(Conflict):
        await writer.policies.remove("default", by="ada")
    await writer.policies.put(policy("v1", "other"), by="ada")
    await writer.policies.set_default("other", by="ada")
    await writer.policies.remove("default", by="ada")
    assert (await state_of(store)).policies.active == {"other": "v1"}


async def test_a_rollout_is_kept_with_its_history(store: Store) -> None:
    writer = await configured(store, router="r1")
    await writer.routers.add(router("r2"), b"bytes", by="x")
    await writer.routers.add(router("r3"), b"bytes", by="x")
    rollout_id = await writer.routers.start_rollout("r2", by="retrain", reason="better")
    with pytest.raises(Conflict):
        await writer.routers.start_rollout("r3", by="ada")
    canary = (await state_of(store)).router.canary
    assert canary is not None
    assert (canary.version, canary.stage, canary.share, canary.rollout_id) == ("r2", "shadow", 0.0, rollout_id)
    await writer.routers.move_rollout(_at(canary, "partial", 0.1), {"n": 1}, "ready", by="driver")
    assert (await state_of(store)).router.canary == _at(canary, "partial", 0.1)
    await writer.routers.move_rollout(_at(canary, "rolled_back", 0.0), {"n": 2}, "harm", by="driver")
    state = await state_of(store)
    assert (state.router.canary, state.router.active) == (None, "r1")
    (row,) = await rows(store, rollouts)
    assert [each["stage"] for each in row["history"]] == ["shadow", "partial", "rolled_back"]
    assert (row["status"], row["reason"]) == ("rolled_back", "harm")
    assert row["ended_at"] is not None
    statuses = {each["version"]: each["status"] for each in await rows(store, router_versions)}
    assert statuses == {"r2": "rolled_back", "r3": "candidate"}
    with pytest.raises(Conflict):
        await writer.routers.move_rollout(_at(canary, "partial", 0.5), {}, "late", by="driver")


async def test_a_better_router_takes_the_place_of_the_one_it_was_compared_with(store: Store) -> None:
    writer = await configured(store, router="r1")
    for version in ("r2", "r3"):
        await writer.routers.add(router(version), b"bytes", by="x")
    first = await writer.routers.start_rollout("r2", by="retrain")
    with pytest.raises(Conflict):
        await writer.routers.start_rollout("r3", by="retrain", supersedes="another")
    second = await writer.routers.start_rollout("r3", by="retrain", supersedes="r2", reason="cheaper")
    canary = (await state_of(store)).router.canary
    assert canary is not None
    assert (canary.version, canary.rollout_id) == ("r3", second)
    ended = {row["rollout_id"]: (row["status"], row["ended_at"] is None) for row in await rows(store, rollouts)}
    assert ended == {first: ("superseded", False), second: ("running", True)}


def _at(canary: Any, stage: str, share: float) -> Any:
    from dataclasses import replace

    return replace(canary, stage=stage, share=share)


async def test_roll_back_ends_the_rollout_then_goes_to_the_router_before(store: Store) -> None:
    writer = await configured(store, router="r1")
    for version in ("r2", "r3"):
        await writer.routers.add(router(version), b"bytes", by="x")
    await writer.routers.promote("r2", by="ada")
    await writer.routers.start_rollout("r3", by="ada")
    assert await writer.routers.roll_back(by="ada") == "r2"
    assert (await state_of(store)).router.canary is None
    assert await writer.routers.roll_back(by="ada") == "r1"
    with pytest.raises(Conflict):
        await writer.routers.roll_back(by="ada")


async def test_tightening_only_rises_until_it_is_released(store: Store) -> None:
    writer = await configured(store)
    assert await writer.quarantines.add("default", "r1", {1: 0.9, 2: CLOSED}, "doubt", by="monitor")
    assert not await writer.quarantines.add("default", "r1", {1: 0.8}, "less doubt", by="monitor")
    found = (await state_of(store)).quarantine("default", "r1")
    assert {tier: each.least for tier, each in found.items()} == {1: 0.9, 2: CLOSED}
    assert (await state_of(store)).quarantine("default", "r2") == {}
    await writer.quarantines.release("default", "r1", {1: None, 2: 0.95}, by="ada")
    found = (await state_of(store)).quarantine("default", "r1")
    assert {tier: each.least for tier, each in found.items()} == {2: 0.95}


async def test_one_retrain_is_asked_for_at_a_time(store: Store) -> None:
    writer = await configured(store)
    first = await writer.request_retrain("drift", "alarm")
    assert await writer.request_retrain("admin") == first


async def test_a_late_leader_changes_nothing(store: Store) -> None:
    writer = await configured(store)
    leases = LeaseStore(store)
    old = await leases.acquire("leader", "a", 0.0)
    assert old is not None
    await asyncio.sleep(0.01)
    new = await leases.acquire("leader", "b", 60)
    assert new is not None
    before = await state_of(store)
    with pytest.raises(LeaseLost):
        await writer.quarantines.add("default", None, {1: 0.9}, "late", by="monitor", lease=old)
    assert await state_of(store) == before
    assert await writer.quarantines.add("default", None, {1: 0.9}, "in time", by="monitor", lease=new)
    doubt = {"tenant:a": {1: Quarantine(CLOSED, "doubt", NOW.isoformat())}}
    with pytest.raises(LeaseLost):
        await writer.quarantines.set_groups("default", None, doubt, by="monitor", lease=old)
    await writer.quarantines.set_groups("default", None, doubt, by="monitor", lease=new)
    assert (await state_of(store)).group_quarantine("default", None) == doubt
    await writer.quarantines.release_policy("default", by="ada")
    state = await state_of(store)
    assert (state.quarantines, state.groups) == ({}, {})


async def test_a_late_leader_does_not_take_a_rollout_back(store: Store) -> None:
    writer, control = await configured(store), ControlStore(store)
    leases = LeaseStore(store)
    old = await leases.acquire("leader", "a", 0.0)
    new = await leases.acquire("leader", "b", 60)
    assert old is not None
    assert new is not None
    await writer.routers.add(router("r2"), b"bytes", by="x")
    rollout_id = await writer.routers.start_rollout("r2", by="ada")
    await control.save_rollout(rollout_id, {"n": 2}, NOW, new)
    await control.save_rollout(rollout_id, {"n": 1}, NOW, old)
    (row,) = await rows(store, rollouts)
    assert row["state"] == {"n": 2}


async def test_a_change_is_told_after_its_commit_and_not_without(store: Store) -> None:
    told: list[tuple[int, int]] = []

    async def tell(generation: int) -> None:
        told.append((generation, await ControlStore(store).generation()))

    writer = ControlWriter(ControlStore(store), tell)
    await writer.set_kill_switch(True, "", by="x")
    with pytest.raises(UnknownVersion):
        await writer.routers.promote("never", by="x")
    assert told == [(1, 1)]
