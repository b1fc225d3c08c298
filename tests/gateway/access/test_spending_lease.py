"""The spending lease beside a counting model: whatever happens, what is under way is covered by what is durable."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sqlalchemy import select

from gateway.access.spending_lease import SpendingHold, SpendingLease
from gateway.store.control import ControlStore
from gateway.store.errors import StoreUnavailable
from gateway.store.spending_leases import SpendingLeaseRow, SpendingLeaseStore
from gateway.store.store import Store
from gateway.store.tables import spending_leases

MODELS = {"far": 1}
AMOUNTS = st.integers(1, 50_000_000)


class Disk:
    """A database of one row that takes, loses or half takes writes, when it is told to."""

    def __init__(self) -> None:
        self.row: SpendingLeaseRow | None = None
        self.outcome = "kept"
        self.gate = asyncio.Event()
        self.gate.set()

    async def put(self, row: SpendingLeaseRow, ttl_s: float) -> None:
        await self._write(row)

    async def end(self, lease_id: str) -> None:
        await self._write(None)

    async def _write(self, row: SpendingLeaseRow | None) -> None:
        await self.gate.wait()
        outcome = self.outcome
        if outcome != "refused":
            self.row = row
        await asyncio.sleep(0)
        if outcome != "kept":
            raise StoreUnavailable(outcome)

    @property
    def amount(self) -> int:
        return 0 if self.row is None else self.row.amount_nano_usd


@dataclass(eq=False)
class Call:
    """What is under way in the model. ``is_reported``: a report that took the lease away counted it."""

    hold: SpendingHold
    amount: int
    is_reported: bool = False


class LeaseMachine(RuleBasedStateMachine):
    """Calls begin and end, the database fails in every way, the process sleeps and is reported, or stops in order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now_s = 0.0
        self.calls: list[Call] = []
        self.waiting: set[asyncio.Task[None]] = set()
        self.disk = Disk()
        self._start()

    def _start(self) -> None:
        self.lease = SpendingLease(self.disk, "server", MODELS, renew_s=10.0, clock=lambda: self.now_s)

    def _spin(self, turns: int = 12) -> None:
        async def spin() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
                # The call begins in the turn that covers it; that turn's state is looked at too.
                self.is_covered()

        self.loop.run_until_complete(spin())

    async def _call(self, amount: int) -> None:
        hold = SpendingHold(self.lease)
        try:
            await hold.cover(amount)
        except StoreUnavailable:
            assert hold.held_nano_usd == 0
            return
        self.calls.append(Call(hold, amount))

    @rule(amount=AMOUNTS, turns=st.integers(0, 12))
    def begin(self, amount: int, turns: int) -> None:
        task = self.loop.create_task(self._call(amount))
        self.waiting.add(task)
        task.add_done_callback(self.waiting.discard)
        self._spin(turns)

    @rule(amounts=st.lists(AMOUNTS, min_size=2, max_size=4), hangs=st.booleans())
    def begin_beside_a_write(self, amounts: list[int], hangs: bool) -> None:
        """One call after the other, the database perhaps still at work on what the first one needs."""
        if hangs:
            self.disk.gate.clear()
        for amount in amounts:
            self.begin(amount, 3)

    @rule(place=st.integers(0, 100))
    def settle(self, place: int) -> None:
        if self.calls:
            self.calls.pop(place % len(self.calls)).hold.settle()

    @rule(place=st.integers(0, 100))
    def give_up_waiting(self, place: int) -> None:
        if self.waiting:
            sorted(self.waiting, key=id)[place % len(self.waiting)].cancel()
            self._spin()

    @rule(outcome=st.sampled_from(["kept", "kept", "refused", "kept and not told"]))
    def database_does(self, outcome: str) -> None:
        self.disk.outcome = outcome

    @rule()
    def database_hangs(self) -> None:
        self.disk.gate.clear()

    @rule()
    def database_goes_on(self) -> None:
        self.disk.gate.set()
        self._spin()

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(turns=st.integers(0, 12))
    def tick(self, turns: int) -> None:
        async def tick() -> None:
            with suppress(StoreUnavailable):
                await self.lease.tick()

        task = self.loop.create_task(tick())
        self.waiting.add(task)
        task.add_done_callback(self.waiting.discard)
        self._spin(turns)

    @rule()
    def is_reported_while_it_sleeps(self) -> None:
        """Another server finds the lease run out; whatever is under way was named by the sum it reports."""
        self.now_s += 31.0
        if self.disk.row is None:
            return
        unreported = [each for each in self.calls if not each.is_reported]
        assert sum(each.amount for each in unreported) <= self.disk.amount
        for each in unreported:
            each.is_reported = True
        self.disk.row = None

    @rule()
    def is_killed_and_started_again(self) -> None:
        """What is under way is spent without a row: the next start must name as much at least."""
        self.is_covered()
        self._forget()
        self.disk.row = None
        self._start()

    @rule()
    def stops_in_order(self) -> None:
        self.disk.gate.set()
        self.disk.outcome = "kept"
        self._spin(40)
        self.loop.run_until_complete(self.lease.close())
        if not self.calls:
            assert self.disk.row is None, "nothing is left to report"
        self.is_covered()
        self._forget()
        self.disk.row = None
        self._start()

    def _forget(self) -> None:
        self.calls.clear()
        for task in list(self.waiting):
            task.cancel()
        self.disk.gate.set()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(self.lease.close())

    @invariant()
    def is_covered(self) -> None:
        assert sum(each.amount for each in self.calls if not each.is_reported) <= self.disk.amount

    @invariant()
    def what_is_held_is_what_is_under_way(self) -> None:
        assert self.lease.held_nano_usd == sum(each.amount for each in self.calls)

    def teardown(self) -> None:
        self._forget()
        for _ in range(5):
            self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


LeaseMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSpendingLease = LeaseMachine.TestCase


def make_lease(store: Store, now_s: list[float]) -> SpendingLease:
    return SpendingLease(SpendingLeaseStore(store), "server", MODELS, clock=lambda: now_s[0])


@contextmanager
def counting_writes(lease: SpendingLease, expected: int) -> Iterator[None]:
    before = lease.num_writes
    yield
    assert lease.num_writes - before == expected


async def test_calls_share_a_few_writes_and_an_idle_lease_ends(store: Store) -> None:
    lease = make_lease(store, [0.0])
    holds = [SpendingHold(lease) for _ in range(500)]
    with counting_writes(lease, 1):
        await asyncio.gather(*(each.cover(1_000_000) for each in holds))
    for each in holds:
        each.settle()
    with counting_writes(lease, 0):
        for each in holds:
            await each.cover(1_000_000)
            each.settle()
    await lease.tick()
    await lease.tick()
    assert lease.amount_nano_usd == 0
    with counting_writes(lease, 0):
        await lease.tick()
    assert await SpendingLeaseStore(store).report(30.0, is_only_server=True) == []


async def test_a_living_servers_lease_is_not_reported_and_a_frozen_one_comes_back(store: Store) -> None:
    rows, now_s = SpendingLeaseStore(store), [0.0]
    lease, other = make_lease(store, now_s), make_lease(store, now_s)
    hold = SpendingHold(lease)
    await hold.cover(70_000_000)
    await SpendingHold(other).cover(1)
    assert await rows.report(30.0, is_only_server=False) == []
    # Frozen for as long as the lease runs and longer: another server reports it, once.
    frozen = await only_row(store, 140_000_000)
    await rows.put(frozen, -1.0)
    (reported,) = await rows.report(30.0, is_only_server=False)
    assert reported.amount_nano_usd >= 70_000_000
    assert await rows.report(30.0, is_only_server=False) == []
    now_s[0] += 60.0
    assert not lease.try_hold(1), "what was durable is so no more"
    await SpendingHold(lease).cover(1)
    assert (await only_row(store, 140_000_002)).lease_id == frozen.lease_id
    alerts = [each for each in await ControlStore(store).list_alerts() if each.kind == "spending"]
    assert len(alerts) == 1
    assert alerts[0].body["amount_usd"] == "0.14"


async def test_a_lease_covers_nothing_from_the_moment_it_ends() -> None:
    now_s = 100.0
    lease = SpendingLease(Disk(), "server", MODELS, renew_s=10.0, clock=lambda: now_s)
    await lease.hold(1)
    now_s = 129.9
    assert lease.try_hold(1)
    now_s = 130.0
    assert not lease.try_hold(1), "another server may report it from now on"
    assert lease.held_nano_usd == 2
    await lease.tick()
    now_s = 159.9
    assert lease.try_hold(9_999_998)
    assert not lease.try_hold(1), "a cent is the least that is written, and it is held"
    now_s = 160.0
    lease.give_back(10_000_000)
    assert not lease.try_hold(1), "renewed for as long again"


async def test_an_amount_far_beyond_what_was_held_lately_is_lowered() -> None:
    """Else one dear call would be reported at every later death of the process."""
    disk = Disk()
    lease = SpendingLease(disk, "server", MODELS)
    large, small = SpendingHold(lease), SpendingHold(lease)
    await large.cover(400_000_000)
    await small.cover(100_000_000)
    assert disk.amount == lease.amount_nano_usd == 800_000_000, "room for as much again"
    large.settle()
    await lease.tick()
    assert disk.amount == 800_000_000, "it was held until now"
    await lease.tick()
    assert disk.amount == 200_000_000
    small.settle()


async def only_row(store: Store, amount_nano_usd: int) -> SpendingLeaseRow:
    """The row of this amount."""
    wanted = select(spending_leases).where(spending_leases.c.amount_nano_usd == amount_nano_usd)
    async with store.transaction() as connection:
        row = (await connection.execute(wanted)).mappings().one()
    return SpendingLeaseRow(**{name: row[name] for name in SpendingLeaseRow.__slots__})


async def test_rows_that_were_lost_are_left_to_be_reported_at_a_stop_in_order(store: Store) -> None:
    lease = make_lease(store, [0.0])
    lost, recorded = SpendingHold(lease), SpendingHold(lease)
    await lost.cover(3)
    await recorded.cover(4)
    recorded.settle()
    await lease.close()
    (reported,) = await SpendingLeaseStore(store).report(30.0, is_only_server=False)
    assert reported.amount_nano_usd == 3


async def test_nothing_is_covered_by_an_amount_that_is_being_lowered() -> None:
    disk = Disk()
    lease = SpendingLease(disk, "server", MODELS)
    large, small, next_large = SpendingHold(lease), SpendingHold(lease), SpendingHold(lease)
    await large.cover(1_000_000_000)
    await small.cover(10_000_000)
    large.settle()
    await lease.tick()
    disk.gate.clear()
    lowering = asyncio.create_task(lease.tick())
    await asyncio.sleep(0)
    assert not lease.try_hold(1_000_000_000), "the write under way says less"
    covering = asyncio.create_task(next_large.cover(1_000_000_000))
    disk.gate.set()
    await lowering
    await covering
    assert disk.amount >= 1_010_000_000
    next_large.settle()
    small.settle()
    await lease.close()
    assert disk.row is None
