"""One leader at a time, by the database's clock, with tokens that only rise; on both databases."""

from __future__ import annotations

import asyncio
import sys
from datetime import datetime
from pathlib import Path

import pytest
from sqlalchemy import select

from gateway.control.leader import Leader
from gateway.store.control_records import Lease
from gateway.store.errors import StoreUnavailable
from gateway.store.leases import LeaseStore
from gateway.store.store import Store
from gateway.store.tables import leases as leases_table
from tests.gateway.control.waiting import until

ROOT = Path(__file__).parents[3]
# A process of a busy machine may be late for its renewal by seconds.
_TTL_S = 4.0


async def _expires_at(store: Store) -> datetime:
    async with store.transaction() as connection:
        found: datetime = (await connection.execute(select(leases_table.c.expires_at))).scalar_one()
        return found


async def test_one_of_many_gets_it(store: Store) -> None:
    leases = LeaseStore(store)
    got = await asyncio.gather(*(leases.acquire("leader", f"h{n}", 60) for n in range(10)))
    (lease,) = [each for each in got if each is not None]
    assert await leases.acquire("leader", "late", 60) is None
    assert await leases.acquire("another", "late", 60) is not None
    await leases.release(lease)
    after = await leases.acquire("leader", "late", 60)
    assert after is not None
    assert after.token == lease.token + 1


async def test_a_lost_lease_cannot_be_renewed(store: Store) -> None:
    leases = LeaseStore(store)
    old = await leases.acquire("leader", "a", 0.0)
    assert old is not None
    assert await leases.renew(old, 0.0) is not None, "nobody took it"
    await asyncio.sleep(0.01)
    new = await leases.acquire("leader", "b", 60)
    assert new is not None
    assert new.token > old.token
    assert await leases.renew(old, 60) is None
    await leases.release(old)
    assert await leases.renew(new, 60) is not None, "a stranger's release does nothing"


@pytest.mark.slow
async def test_a_killed_holder_is_followed(database_url: str, store: Store) -> None:
    program = (
        "import asyncio, sys\n"
        "from gateway.control.leader import Leader\n"
        "from gateway.config.store_section import StoreConfig\n"
        "from gateway.store.leases import LeaseStore\n"
        "from gateway.store.store import Store\n"
        "async def main():\n"
        "    async with Store(StoreConfig(url=sys.argv[1])) as store:\n"
        "        leader = Leader(LeaseStore(store), ttl_s=float(sys.argv[2]))\n"
        "        leader.start()\n"
        "        while leader.lease is None:\n"
        "            await asyncio.sleep(0.01)\n"
        "        print(leader.lease.token, flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, database_url, str(_TTL_S), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    token = int(await child.stdout.readline())
    leader = Leader(LeaseStore(store), ttl_s=_TTL_S)
    # Renewed again and again, it cannot be taken.
    ends = {await _expires_at(store)}
    while len(ends) < 3:
        assert not await leader.campaign()
        ends.add(await _expires_at(store))
        await asyncio.sleep(0.02)
    child.kill()
    await child.wait()
    for _ in range(600):
        if await leader.campaign():
            break
        await asyncio.sleep(0.05)
    assert leader.lease is not None
    assert leader.lease.token == token + 1
    await leader.close()


async def test_a_leader_stops_believing_before_others_may_begin(store: Store) -> None:
    """Its own clock may stand wherever it likes: only its pace counts, and it counts from before it asked."""
    now_s = [1e9]
    leader = Leader(LeaseStore(store), ttl_s=10.0, clock=lambda: now_s[0])

    def leads() -> bool:
        return leader.lease is not None

    assert not leads()
    assert await leader.campaign()
    now_s[0] += 9.99
    assert leads()
    now_s[0] += 0.02
    assert not leads()
    assert await leader.campaign(), "nobody took it meanwhile"
    await leader.close()
    assert await LeaseStore(store).acquire("leader", "next", 1) is not None


@pytest.mark.parametrize("ahead_s", [3600.0, 73 * 365.0 * 86_400], ids=["an hour", "until 2099"])
async def test_a_lease_of_a_clock_that_was_ahead_is_taken_over(
    store: Store, caplog: pytest.LogCaptureFixture, ahead_s: float
) -> None:
    """Nobody led again while such a row lay there, and no line said why (security review L6)."""
    leases = LeaseStore(store)
    old = await leases.acquire("leader", "ahead", 10.0)
    assert old is not None
    await leases.renew(old, ahead_s)
    leader = Leader(leases, ttl_s=10.0)
    assert await leader.campaign()
    assert leader.lease is not None
    assert leader.lease.token == old.token + 1
    (line,) = [each.getMessage() for each in caplog.records if each.name == "suffice.leases"]
    assert "of ahead" in line
    assert "clock that was ahead" in line
    assert await leases.renew(old, 10.0) is None, "the clock's own process holds it no more, should it live"
    await leader.close()


async def test_a_long_lease_of_others_is_no_clock_that_was_ahead(store: Store) -> None:
    leases = LeaseStore(store)
    for ttl_s, mine_s in ((300.0, 1.0), (3600.0, 3600.0)):
        held = await leases.acquire(f"for {ttl_s}", "them", ttl_s)
        assert held is not None
        assert await leases.acquire(f"for {ttl_s}", "us", mine_s) is None
        assert await leases.renew(held, ttl_s) is not None


class _Broken:
    """A database that went away after the lease was given."""

    def __init__(self, inner: LeaseStore) -> None:
        self._inner = inner
        self.is_gone = False

    async def acquire(self, name: str, holder: str, ttl_s: float) -> Lease | None:
        self._check()
        return await self._inner.acquire(name, holder, ttl_s)

    async def renew(self, lease: Lease, ttl_s: float) -> Lease | None:
        self._check()
        return await self._inner.renew(lease, ttl_s)

    async def release(self, lease: Lease) -> None:
        self._check()
        await self._inner.release(lease)

    def _check(self) -> None:
        if self.is_gone:
            raise StoreUnavailable("gone")


async def test_jobs_run_while_it_leads_and_survive_their_own_failures(store: Store) -> None:
    leases = _Broken(LeaseStore(store))
    leader = Leader(leases, ttl_s=0.6)
    tokens: list[int] = []

    async def job(lease: Lease) -> None:
        tokens.append(lease.token)
        raise RuntimeError("a job of somebody else's")

    leader.every(0.01, "job", job)
    leader.start()
    await until(lambda: len(tokens) >= 3)
    leases.is_gone = True
    await until(lambda: leader.lease is None)
    num_done = len(tokens)
    await asyncio.sleep(0.1)
    assert len(tokens) == num_done, "without the database nobody leads"
    leases.is_gone = False
    await until(lambda: len(tokens) > num_done)
    await leader.close()
    assert set(tokens) == {1}
