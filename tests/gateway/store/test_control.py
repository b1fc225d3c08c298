"""The control tables: changes are numbered and whole, a lost lease writes nothing, listings are newest first."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import insert

from gateway.ids import uuid7
from gateway.store.control import ControlStore, ControlTransaction
from gateway.store.control_records import Alert, RolloutRow, RouterVersion, ShadowDecision
from gateway.store.leases import LeaseStore
from gateway.store.store import Store
from gateway.store.tables import alerts, rollouts, router_versions
from tests.gateway.records import NOW

HOUR = timedelta(hours=1)


@pytest.fixture
def control(store: Store) -> ControlStore:
    return ControlStore(store)


async def test_changes_are_numbered_and_rows_carry_their_own_versions(control: ControlStore) -> None:
    assert (await control.generation(), await control.rows()) == (0, {})
    for number in (1, 2):
        async with control.change(NOW) as change:
            assert (change.generation, change.now) == (number, NOW)
            await change.put("active", {"policy": number}, "me")
            assert (await change.rows())["active"] == ({"policy": number}, number)
    async with control.change(NOW) as change:
        await change.put("kill_switch", {"on": True}, "me")
    rows = await control.rows()
    assert await control.generation() == 3
    assert rows == {"active": ({"policy": 2}, 2), "kill_switch": ({"on": True}, 1), "generation": ({}, 3)}


async def test_a_change_that_fails_leaves_nothing(control: ControlStore) -> None:
    async def fail() -> None:
        async with control.change(NOW) as change:
            await change.put("active", {}, "me")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    assert (await control.generation(), await control.rows()) == (0, {})


async def test_a_lost_lease_writes_nothing(store: Store, control: ControlStore) -> None:
    leases = LeaseStore(store)
    mine = await leases.acquire("leader", "a", 60)
    assert mine is not None
    row = RolloutRow(
        rollout_id="o",
        router_version="r",
        baseline_version="",
        status="running",
        stage="shadow",
        share=0.0,
        state={"step": -1},
        started_at=NOW,
        updated_at=NOW,
    )
    async with store.transaction() as connection:
        await connection.execute(insert(rollouts).values(**asdict(row)))
    await control.put_quietly("monitor", {"at": 1}, "a", NOW, mine)
    await control.save_rollout("o", {"step": 0}, NOW + HOUR, mine)
    assert await control.generation() == 0, "no server is told"
    for stranger in (replace(mine, token=mine.token + 1), replace(mine, holder="b"), replace(mine, name="other")):
        async with control.change(NOW) as change:
            assert (await change.holds(mine), await change.holds(stranger)) == (True, False)
        await control.put_quietly("monitor", {"at": 2}, "b", NOW, stranger)
        await control.save_rollout("o", {"step": 9}, NOW + 2 * HOUR, stranger)
    assert (await control.rows())["monitor"] == ({"at": 1}, 1)
    assert await control.get_rollout("o") == replace(row, state={"step": 0}, updated_at=NOW + HOUR)


async def test_writes_under_one_lease_do_not_wait_for_each_other(store: Store) -> None:
    lease = await LeaseStore(store).acquire("leader", "a", 60)
    assert lease is not None
    async with store.transaction() as one, store.transaction() as other:
        found = [await ControlTransaction(each, store.dialect, 1, NOW).holds(lease) for each in (one, other)]
    assert found == [True, True]


async def test_listings_are_bounded(store: Store, control: ControlStore) -> None:
    alert: dict[str, Any] = {"created_at": NOW, "kind": "", "severity": "", "subject": "", "body": {}}
    router: dict[str, Any] = {"created_at": NOW, "artifact": b"", "card": {}}
    router |= dict.fromkeys(("parent", "origin", "status", "note"), "")
    rollout: dict[str, Any] = {"started_at": NOW, "updated_at": NOW, "share": 0.0, "state": {}, "history": []}
    rollout |= dict.fromkeys(("router_version", "baseline_version", "status", "stage", "reason"), "")
    async with store.transaction() as connection:
        await connection.execute(insert(alerts), [alert | {"alert_id": uuid7()} for _ in range(102)])
        await connection.execute(insert(router_versions), [router | {"version": uuid7()} for _ in range(102)])
        await connection.execute(insert(rollouts), [rollout | {"rollout_id": uuid7()} for _ in range(52)])
    listed = [await control.list_alerts(), await control.list_routers(), await control.list_rollouts()]
    assert [len(each) for each in listed] == [100, 100, 50]


async def test_routers_and_rollouts_are_listed_newest_first(store: Store, control: ControlStore) -> None:
    routers = [RouterVersion(version=f"r{age}", created_at=NOW - age * HOUR, card={"age": age}) for age in range(3)]
    shared: dict[str, Any] = {"router_version": "r0", "baseline_version": "", "status": "", "stage": "", "share": 0.1}
    shared |= {"state": {}, "updated_at": NOW, "history": ({"stage": "shadow"},)}
    found = [RolloutRow(rollout_id=f"o{age}", started_at=NOW - age * HOUR, **shared) for age in range(3)]
    async with store.transaction() as connection:
        for place in (1, 0, 2):
            values = asdict(routers[place]) | {"artifact": b"npz%d" % place}
            await connection.execute(insert(router_versions).values(**values))
            await connection.execute(insert(rollouts).values(**asdict(found[place])))
    assert (await control.list_routers(), await control.list_routers(2)) == (routers, routers[:2])
    assert (await control.list_rollouts(), await control.list_rollouts(1)) == (found, found[:1])
    assert (await control.get_router("r1"), await control.router_bytes("r1")) == (routers[1], b"npz1")
    assert await control.get_rollout("o2") == found[2]
    for nothing in (control.get_router, control.router_bytes, control.get_rollout):
        assert await nothing("nobody") is None


async def test_shadow_decisions_count_once_a_request_and_by_where_they_would_have_gone(control: ControlStore) -> None:
    moves = [(2, 1), (2, 1), (2, 2), (1, 2), (2, 1)]
    decisions = [
        ShadowDecision(
            request_id=uuid7(),
            router_version="r",
            created_at=NOW + place * HOUR,
            policy_name="p",
            tier=tier,
            shadow_tier=shadow_tier,
            sufficiency=((1, 0.5, 0.25),),
            novelty=0.0,
        )
        for place, (tier, shadow_tier) in enumerate(moves)
    ]
    await control.add_shadow_decisions(decisions)
    await control.add_shadow_decisions(decisions)
    await control.add_shadow_decisions([replace(decisions[0], router_version="other")])
    assert await control.count_shadow_decisions("r", NOW) == (5, 1, 3)
    assert await control.count_shadow_decisions("r", NOW + HOUR) == (4, 1, 2)
    assert await control.count_shadow_decisions("nobody", NOW) == (0, 0, 0)
    assert await control.forget_shadow_decisions(NOW + HOUR) == 2
    assert await control.count_shadow_decisions("r", NOW) == (4, 1, 2)


async def test_an_alert_of_a_kind_and_subject_is_open_once(control: ControlStore) -> None:
    first = Alert(alert_id=uuid7(), created_at=NOW, kind="drift", severity="page", subject="p", body={"tier": 1})
    others = [replace(first, alert_id=uuid7(), kind="floor"), replace(first, alert_id=uuid7(), subject="q")]
    assert await control.raise_alert(first)
    assert not await control.raise_alert(replace(first, alert_id=uuid7()))
    assert [await control.raise_alert(each) for each in others] == [True, True]
    assert await control.resolve_alerts("drift", "p", NOW + HOUR) == 1
    assert await control.resolve_alerts("drift", "p", NOW + HOUR) == 0
    again = replace(first, alert_id=uuid7(), created_at=NOW + HOUR)
    assert await control.raise_alert(again), "the one before is closed"
    newest_first = [again, *others[::-1], replace(first, resolved_at=NOW + HOUR)]
    assert await control.list_alerts() == newest_first
    assert await control.list_alerts(only_open=True) == newest_first[:3]
    assert await control.list_alerts(limit=1) == newest_first[:1]
