"""What the monitor reads equals the definition of each reading over the rows, whatever lies in the log."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, insert, update

from classifier.types import TierSufficiency
from gateway.ids import uuid7
from gateway.store.monitoring import CheckedRow, Decided, DrawnCount, Learnable, MonitorReader, Traffic
from gateway.store.records import RequestRecord, VerificationJob
from gateway.store.store import Store
from gateway.store.tables import gold_labels, retrain_runs, shadow_decisions, verifications
from policies.judge_correction import GoldCounts
from policies.sampling import FAULTY
from tests.gateway.control.checks import Check, put_checks
from tests.gateway.records import NOW, make_record

MINUTE = timedelta(minutes=1)


@dataclass(frozen=True)
class LogRow:
    """A request, the check of it as its columns say, and the tier that the router "new" would have chosen."""

    record: RequestRecord
    check: dict[str, Any]
    shadow_tier: int | None

    @property
    def is_done(self) -> bool:
        return bool(self.check) and self.check["status"] == "done"

    @property
    def cheap_tier(self) -> int:
        return int(self.check["tier" if self.check["direction"] == "up" else "against_tier"])

    def checked(self) -> CheckedRow:
        """Return the definition of a checked row."""
        record, check, is_up = self.record, self.check, self.check["direction"] == "up"
        p_good = check["p_good"] if check["p_good"] is not None else float(check["verdict"] or 0)
        estimates = {each.tier: each.p_as_good for each in record.sufficiency}
        follows = record.turn_id is not None and is_up
        return CheckedRow(
            verification_id=check["verification_id"],
            request_id=record.request_id,
            created_at=record.created_at,
            finished_at=check["finished_at"],
            is_up=is_up,
            tier=self.cheap_tier,
            inclusion=check["inclusion_probability"],
            tenant=record.tenant,
            domain=record.domain,
            policy_name=record.policy_name,
            policy_version=record.policy_version,
            router_version=record.router_version,
            loss=1.0 - p_good,
            verdict=check["verdict"] if check["verdict"] is not None else float(p_good >= 0.5),
            p_as_good=record.confidence if follows else estimates.get(self.cheap_tier),
            is_quarantine_check=record.reason == "tightened",
            dear_tier=check["against_tier"] if is_up else check["tier"],
            is_known=check["stratum"] == FAULTY,
            turn_id=record.turn_id,
        )


def a_row(rng: random.Random, number: int, turn_id: str | None) -> LogRow:
    tier = rng.choice([1, 2, 3])
    record = make_record(
        created_at=NOW + number * MINUTE,
        tenant=rng.choice(["a", "b"]),
        domain=rng.choice(["", "law"]),
        policy_name=rng.choice(["p", "q"]),
        policy_version="1",
        router_version=rng.choice(["old", "new"]),
        decided_tier=rng.choice([None, tier, tier]),
        final_tier=tier,
        reason=rng.choice(["sufficient", "novel", "tightened"]),
        sufficiency=tuple(TierSufficiency(t, 0.5, 0.1 * t) for t in rng.sample([1, 2, 3], 2)),
        confidence=0.77,
        verify_probability=rng.choice([None, 0.0, 0.5]),
        turn_id=turn_id,
    )
    shadow_tier = rng.choice([None, 1, 2, 3])
    if rng.random() < 0.2:
        return LogRow(record, {}, shadow_tier)
    status = rng.choice(["done", "done", "done", "queued", "failed"])
    check = {
        "verification_id": uuid7(),
        "direction": "down" if tier == 3 else "up",
        "tier": tier,
        "against_tier": rng.choice([1, 2]) if tier == 3 else 3,
        "inclusion_probability": rng.choice([0.25, 0.5]),
        "stratum": rng.choice(["", "", FAULTY]),
        "status": status,
        "finished_at": None if status == "queued" else NOW + rng.randrange(40) * MINUTE,
        "p_good": rng.choice([None, 0.0, 0.25, 0.5, 0.75, 1.0]),
        "verdict": rng.choice([None, 0, 1]),
    }
    return LogRow(record, check, shadow_tier)


async def filled(store: Store, seed: int, num_rows: int = 60) -> list[LogRow]:
    """Put rows into the log; some are steps of the turn that an earlier one began."""
    rng, rows, begun = random.Random(seed), list[LogRow](), list[str]()
    for number in range(num_rows):
        turn_id = rng.choice(begun) if begun and rng.random() < 0.4 else None
        rows.append(a_row(rng, number, turn_id))
        if turn_id is None:
            begun.append(rows[-1].record.request_id)
    await asyncio.gather(*(store.record(row.record, _job(row)) for row in rows))
    changed = ("status", "finished_at", "p_good", "verdict")
    async with store.transaction() as connection:
        for row in rows:
            if row.check:
                wanted = update(verifications).where(verifications.c.request_id == row.record.request_id)
                await connection.execute(wanted.values({name: row.check[name] for name in changed}))
            if row.shadow_tier is not None:
                values = {"request_id": row.record.request_id, "router_version": "new", "created_at": NOW}
                values |= {"policy_name": "p", "tier": 1, "shadow_tier": row.shadow_tier, "sufficiency": []}
                await connection.execute(insert(shadow_decisions).values(**values, novelty=0.0))
    return rows


def _job(row: LogRow) -> VerificationJob | None:
    if not row.check:
        return None
    names = ("verification_id", "direction", "tier", "against_tier", "inclusion_probability", "stratum")
    shared = ("request_id", "created_at", "tenant", "domain", "policy_name", "policy_version", "router_version")
    values = {name: row.check[name] for name in names} | {name: getattr(row.record, name) for name in shared}
    return VerificationJob(**values, turn_id=row.record.turn_id, prompt="{}", answer="")


def by_end(row: LogRow) -> tuple[datetime, str]:
    return row.check["finished_at"], row.check["verification_id"]


SINCE = [NOW - MINUTE, NOW + 17 * MINUTE, NOW + 100 * MINUTE]


async def test_checks_are_read_by_their_ends(store: Store) -> None:
    rows, reader = await filled(store, 1), MonitorReader(store)
    done = sorted((row for row in rows if row.is_done), key=by_end)
    for since in SINCE:
        begun = [row for row in done if row.record.turn_id is None and row.check["finished_at"] >= since]
        found = [each async for each in reader.checked(finished_since=since, limit=1000)]
        assert found == [row.checked() for row in begun]
        assert [each async for each in reader.checked(finished_since=since, limit=3)] == found[:3]
        newest = await reader.newest_checked(created_since=since, limit=1000)
        assert newest == [row.checked() for row in done if row.record.created_at >= since]
        assert await reader.newest_checked(created_since=since, limit=5) == newest[-5:]


async def test_what_a_router_on_trial_is_worth_is_read_of_its_own_and_of_shadowed_answers(store: Store) -> None:
    rows, reader = await filled(store, 4, 80), MonitorReader(store)

    def tells(row: LogRow) -> bool:
        if row.record.router_version == "new":
            return row.check["direction"] == "up"
        return row.shadow_tier == row.cheap_tier

    done = sorted((row for row in rows if row.is_done and row.record.turn_id is None), key=by_end)
    assert any(tells(row) and row.shadow_tier is None for row in done), "its own answers have no shadow"
    for since in SINCE:
        expected = [row.checked() for row in done if row.check["finished_at"] >= since and tells(row)]
        found = [each async for each in reader.tried("new", finished_since=since, limit=1000)]
        assert found == expected
        assert [each async for each in reader.tried("new", finished_since=since, limit=2)] == expected[:2]


async def test_drawn_turns_are_counted_once(store: Store) -> None:
    rows, reader = await filled(store, 3), MonitorReader(store)
    for since in SINCE:
        drawn, done = defaultdict(set), defaultdict(set)
        for row in rows:
            record, check = row.record, row.check
            if check and check["stratum"] != FAULTY and record.created_at >= since:
                key = (record.policy_name, "1", record.router_version, check["tier"]), check["direction"] == "up"
                drawn[key].add(record.turn_id or record.request_id)
                done[key] |= {record.turn_id or record.request_id} if row.is_done else set()
        assert await reader.drawn(since) == {key: DrawnCount(len(drawn[key]), len(done[key])) for key in drawn}


async def test_traffic_is_what_could_be_drawn(store: Store) -> None:
    rows, reader = await filled(store, 7), MonitorReader(store)
    for since in SINCE:
        chances = defaultdict[Any, list[float]](list)
        for record in (row.record for row in rows):
            if record.created_at >= since and record.turn_id is None and record.verify_probability is not None:
                key = record.policy_name, "1", record.router_version, record.final_tier
                for name in (None, record.tenant):
                    chances[name, key].append(record.verify_probability)
        expected = {
            place: Traffic(sum(p > 0 for p in found), found.count(0.0), min((p for p in found if p > 0), default=1.0))
            for place, found in chances.items()
        }
        assert await reader.traffic(since) == {key: each for (name, key), each in expected.items() if name is None}
        of_a = {(name, key): each for (name, key), each in expected.items() if name == "a"}
        assert await reader.traffic_of("tenant", ["a"], since) == of_a


async def test_nothing_is_made_of_what_was_never_logged(store: Store) -> None:
    reader = MonitorReader(store)
    assert (await reader.traffic(NOW), await reader.drawn(NOW), await reader.by_turn([])) == ({}, {}, [])
    assert (Traffic(), DrawnCount()) == (Traffic(0, 0, 1.0), DrawnCount(0, 0))


async def test_one_turn_is_one_row(store: Store) -> None:
    """It is weighed by its one draw, and a step that is faulty for certain counts whether that came or not."""
    rows, reader = await filled(store, 4), MonitorReader(store)
    checked = [row.checked() for row in rows if row.is_done]
    found = await reader.by_turn(checked)
    groups = defaultdict(list)
    for each in checked:
        groups[each.turn_id or each.request_id, each.is_up, each.tier, each.dear_tier].append(each)
    assert [each.request_id for each in found] == [key[0] for key in groups]
    for outcome, (key, of_turn) in zip(found, groups.items(), strict=True):
        steps = [row for row in rows if row.record.turn_id == key[0] and row.record.verify_probability is not None]
        if not steps and len(of_turn) == 1:
            assert outcome == of_turn[0]
            continue
        drawn, known = [r for r in of_turn if not r.is_known], [r for r in of_turn if r.is_known]
        num_steps = max(1 + len(steps), len(of_turn))
        certain = sum(r.loss for r in known) / num_steps
        inclusion = drawn[0].inclusion if drawn else 1.0
        by_draw = sum(r.loss for r in drawn) / len(drawn) * (num_steps - len(known)) / num_steps if drawn else 0.0
        assert outcome.loss == pytest.approx(by_draw + inclusion * certain)
        assert (outcome.inclusion, outcome.is_known, outcome.turn_id) == (inclusion, not drawn, None)
        assert outcome.finished_at == max(r.finished_at for r in of_turn)
        assert 0.0 <= outcome.verdict <= 1.0
        began = next((r for r in of_turn if r.turn_id is None), min(of_turn, key=lambda r: r.request_id))
        assert (outcome.verification_id, outcome.p_as_good) == (began.verification_id, began.p_as_good)


async def test_a_share_of_a_turns_steps_was_good_enough(store: Store) -> None:
    """Three of four checked steps would have done, and that is the turn's verdict."""
    (row,) = [row.checked() for row in await filled(store, 4) if row.is_done][:1]
    start = replace(row, is_known=False, turn_id=None, inclusion=0.5, verdict=0)
    steps = [replace(start, verification_id=uuid7(), request_id=uuid7(), turn_id=row.request_id) for _ in range(3)]
    (found,) = await MonitorReader(store).by_turn([start, *(replace(step, verdict=1) for step in steps)])
    assert found.verdict == 0.75


async def test_retrains_learn_from_what_is_new_and_wait_for_one_another(store: Store) -> None:
    rows, reader = await filled(store, 5), MonitorReader(store)
    begun = [row for row in rows if row.is_done and row.record.turn_id is None]
    since, ended = NOW + 20 * MINUTE, NOW + 15 * MINUTE
    run = {"created_at": NOW, "trigger": "schedule", "stage": "", "progress": 0.0, "holder": ""}

    async def expect(first: datetime, ended_at: datetime | None) -> None:
        for is_foreign in (False, True):
            mine = [row for row in begun if row.record.created_at >= first]
            mine = [row for row in mine if row.record.reason == "novel" or not is_foreign]
            new = [row for row in mine if ended_at is None or row.check["finished_at"] > ended_at]
            assert await reader.learnable(first, is_foreign=is_foreign) == Learnable(len(new), len(mine))

    async def put_run(status: str, finished_at: datetime | None) -> None:
        async with store.transaction() as connection:
            values = run | {"run_id": uuid7(), "status": status, "finished_at": finished_at}
            await connection.execute(insert(retrain_runs).values(values))

    await expect(NOW, None)
    await expect(since, None)
    await put_run("done", ended - 5 * MINUTE)
    await put_run("failed", ended)
    await expect(NOW, ended)
    await expect(since, ended)
    for status in ("requested", "running"):
        await put_run(status, None)
        assert await reader.learnable(NOW) is None
        async with store.transaction() as connection:
            await connection.execute(delete(retrain_runs).where(retrain_runs.c.status == status))
    await expect(NOW, ended)


async def test_decisions_are_read_on_from_a_request(store: Store) -> None:
    reader = MonitorReader(store)
    assert await reader.last_request_id() == ""
    rows = await filled(store, 6)
    records = sorted((row.record for row in rows), key=lambda record: record.request_id)
    assert await reader.last_request_id() == records[-1].request_id
    after, before, reasons = records[10].request_id, NOW + 40 * MINUTE, ("sufficient", "tightened")
    expected = [
        Decided(each.request_id, each.tenant, each.decided_tier)
        for each in records[11:]
        if each.created_at < before and each.reason in reasons and each.decided_tier is not None
    ]
    assert await reader.decisions(after_id=after, before=before, reasons=reasons, limit=100) == expected
    assert await reader.decisions(after_id=after, before=before, reasons=reasons, limit=2) == expected[:2]


async def test_the_graders_errors_are_known_from_so_many_of_each_kind_and_summed_anew_when_labels_come(
    store: Store,
) -> None:
    reader = MonitorReader(store)
    # (verdict of the grader, truth): three faults, of which it saw two; two sound answers, of which it flagged one.
    pairs = [(0.0, 0.0), (0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)]
    await put_checks(store, [Check(p_good, gold=gold) for p_good, gold in pairs], policy=("p", "1"))
    assert await reader.gold(2) == GoldCounts(2, 3, 1, 2)
    assert await reader.gold(3) is None
    await put_checks(store, [Check(1.0, gold=1.0)], policy=("p", "1"))
    assert await reader.gold(3) == GoldCounts(2, 3, 1, 3)
    assert await reader.gold(4) is None
    async with store.transaction() as connection:
        await connection.execute(delete(gold_labels))
    assert await reader.gold(0) == GoldCounts(0, 0, 0, 0)
