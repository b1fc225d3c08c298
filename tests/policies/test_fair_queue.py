"""Sharing places between tenants and keys, beside a naive model: nobody starves, and books come out even."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies.fair_queue import Claim, FairQueue

TENANTS = st.sampled_from(["a", "b", "c", "d"])
KEYS = st.sampled_from(["1", "2"])
NUM_PLACES = 4


class Places(RuleBasedStateMachine):
    """Few places, any order of arrivals, ends and withdrawals (security review M8)."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(num_ranks=2)
        self.waiting: list[Claim] = []
        self.running: list[Claim] = []

    @rule(tenant=TENANTS, key=KEYS, size=st.integers(1, NUM_PLACES), rank=st.integers(0, 1))
    def come(self, tenant: str, key: str, size: int, rank: int) -> None:
        claim = Claim(tenant, key, size, rank)
        self.queue.push(claim)
        self.waiting.append(claim)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.running))
        self.running.remove(claim)
        self.queue.stop(claim)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(claim)
        assert self.queue.remove(claim)
        assert not self.queue.remove(claim)

    @rule()
    def give_out(self) -> None:
        while True:
            room = NUM_PLACES - self.queue.held
            held = Counter[str]()
            for each in self.running:
                held[each.tenant] += each.size
            claim = self.queue.take_next(room) if room > 0 else None
            if claim is None:
                break
            rank = min(each.rank for each in self.waiting)
            rivals = {each.tenant for each in self.waiting if each.rank == rank}
            assert claim.rank == rank, "a lower class overtook a higher one"
            assert held[claim.tenant] == min(held[each] for each in rivals), "a tenant that holds more went first"
            own = [
                each for each in self.waiting if (each.tenant, each.key, each.rank) == (claim.tenant, claim.key, rank)
            ]
            assert claim is own[0], "a key's own requests keep their order"
            self.waiting.remove(claim)
            self.running.append(claim)
        if self.waiting and self.queue.held < NUM_PLACES:
            assert self.queue.holds_room, "somebody waits beside a free place that is not kept for anybody"

    @rule(tenant=TENANTS, key=KEYS, rank=st.integers(0, 1))
    def ask_for_a_victim(self, tenant: str, key: str, rank: int) -> None:
        victim = self.queue.victim_for(Claim(tenant, key, 1, rank))
        if victim is None:
            assert all(each.rank <= rank for each in self.waiting), "a lower class was spared"
            return
        assert victim in self.waiting
        assert victim.rank >= rank, "a higher class gave way to a lower one"
        own = [
            each
            for each in self.waiting
            if (each.tenant, each.key, each.rank) == (victim.tenant, victim.key, victim.rank)
        ]
        assert victim is own[-1], "the newest goes"
        if victim.rank == rank and victim.tenant != tenant:
            assert self.load(victim.tenant) > self.load(tenant) + 1, "a modest tenant gave way to a greedy one"

    def load(self, tenant: str) -> int:
        return sum(each.size for each in (*self.waiting, *self.running) if each.tenant == tenant)

    @invariant()
    def books_agree(self) -> None:
        queue = self.queue
        assert queue.num_waiting == len(self.waiting)
        assert queue.num_running == len(self.running)
        assert queue.wanted == sum(each.size for each in self.waiting)
        assert queue.held == sum(each.size for each in self.running)
        assert set(queue.waiting()) == set(self.waiting)
        for tenant in "abcd":
            assert queue.wanted_by(tenant) == sum(each.size for each in self.waiting if each.tenant == tenant)
            assert queue.load_of(tenant) == self.load(tenant)
            for key in "12":
                theirs = [each.size for each in self.waiting if (each.tenant, each.key) == (tenant, key)]
                assert queue.waiting_of(tenant, key) == sum(theirs)
        assert queue.is_idle == (not self.waiting and not self.running)


TestPlaces = Places.TestCase


def serve(queue: FairQueue, running: list[Claim], durations: dict[str, int], num_steps: int) -> Counter[str]:
    """Hold each place for its tenant's number of steps; counts the place-steps of each tenant."""
    used, ends = Counter[str](), {id(claim): durations[claim.tenant] for claim in running}
    for _ in range(num_steps):
        while (claim := queue.take_next(NUM_PLACES - queue.held)) is not None:
            running.append(claim)
            ends[id(claim)] = durations[claim.tenant]
        for claim in list(running):
            used[claim.tenant] += 1
            ends[id(claim)] -= 1
            if not ends[id(claim)]:
                running.remove(claim)
                queue.stop(claim)
                queue.push(Claim(claim.tenant, claim.key))
    return used


@given(st.dictionaries(TENANTS, st.tuples(st.integers(1, 30), st.integers(1, 7)), min_size=1))
def test_backlogged_tenants_get_the_same_number_of_places(greed: dict[str, tuple[int, int]]) -> None:
    """Whatever each asks for and however long its requests take: a tenant with k of n shares gets k / n of the time."""
    queue = FairQueue()
    for tenant, (num_waiting, _) in greed.items():
        for _ in range(num_waiting + NUM_PLACES):
            queue.push(Claim(tenant, "key"))
    durations = {tenant: duration for tenant, (_, duration) in greed.items()}
    num_steps = 400
    used = serve(queue, [], durations, num_steps)
    share = num_steps * NUM_PLACES / len(greed)
    # Places do not divide evenly by tenants at each step, and nobody is interrupted.
    slack = max(durations.values()) * NUM_PLACES
    even = num_steps * (NUM_PLACES // len(greed))
    for tenant in greed:
        assert used[tenant] >= even - slack
        if NUM_PLACES % len(greed) == 0:
            assert abs(used[tenant] - share) <= slack


def test_turns_go_round_among_more_tenants_than_places() -> None:
    queue, order = FairQueue(), []
    names = [f"tenant {number}" for number in range(7)]
    for name in names:
        for _ in range(20 if name == names[0] else 5):
            queue.push(Claim(name, "key"))
    for _ in range(35):
        claim = queue.take_next(1)
        assert claim is not None
        order.append(claim.tenant)
        queue.stop(claim)
    for name in names:
        places = [place for place, each in enumerate(order) if each == name]
        assert len(places) == 5
        assert all(later - earlier <= len(names) for earlier, later in pairwise(places)), "a turn was missed"


def test_a_tenant_counts_on_an_even_share_and_half_of_what_it_holds_beyond() -> None:
    queue = FairQueue()
    for _ in range(6):
        queue.start(Claim("greedy", "1"))
    assert queue.share_of("greedy", 8) == 8, "alone it may have all"
    assert queue.share_of("new", 8) == 4
    queue.push(Claim("modest", "1"))
    assert queue.share_of("greedy", 8) == 4 + 1
    assert queue.share_of("modest", 8) == 4
    assert queue.share_of("new", 9) == 3


def test_keys_of_one_tenant_share_what_it_has() -> None:
    queue = FairQueue()
    for _ in range(10):
        queue.push(Claim("a", "greedy"))
    queue.push(Claim("a", "modest"))
    first, second = queue.take_next(2), queue.take_next(1)
    assert first is not None
    assert second is not None
    assert {first.key, second.key} == {"greedy", "modest"}


def test_a_key_that_holds_less_of_its_tenants_places_is_next() -> None:
    """Whoever waited first."""
    queue = FairQueue()
    for key in ("greedy", "greedy", "modest"):
        queue.push(Claim("a", key))
        assert queue.take_next(9) is not None
    for key in ("greedy", "modest"):
        queue.push(Claim("a", key))
    found = queue.take_next(9)
    assert found is not None
    assert found.key == "modest"


def test_what_may_not_start_is_passed_over_and_keeps_its_turn() -> None:
    queue = FairQueue()
    held_back, other = Claim("a", "1"), Claim("b", "1")
    queue.push(held_back)
    queue.push(other)
    assert queue.take_next(1, lambda claim: claim is not held_back) is other
    queue.stop(other)
    assert queue.take_next(1) is held_back


@pytest.mark.parametrize("room", [1, 2])
def test_a_large_claim_keeps_places_free_for_itself(room: int) -> None:
    queue = FairQueue()
    running = Claim("a", "1")
    queue.start(running)
    large, small = Claim("b", "1", size=3), Claim("c", "1")
    queue.push(large)
    queue.push(small)
    assert queue.take_next(room) is None
    assert queue.holds_room
    queue.stop(running)
    assert queue.take_next(3) is large
    assert not queue.holds_room


def test_a_full_queue_gives_way_from_the_greediest_of_the_lowest_class() -> None:
    """A modest tenant finds a place in a queue that a greedy one has filled (security review M8)."""
    queue = FairQueue(num_ranks=2)
    greedy = [Claim("greedy", "1", rank=0) for _ in range(5)]
    background = [Claim("modest", "1", rank=1), Claim("greedy", "2", rank=1), Claim("greedy", "2", rank=1)]
    for claim in (*greedy, *background):
        queue.push(claim)
    assert queue.victim_for(Claim("third", "1")) is background[2]
    assert queue.victim_for(Claim("third", "1", rank=1)) is background[2]
    assert queue.victim_for(Claim("greedy", "3")) is background[2], "live before background, also of one tenant"
    for claim in background:
        queue.remove(claim)
    assert queue.victim_for(Claim("third", "1")) is greedy[-1]
    assert queue.victim_for(Claim("third", "1", rank=1)) is None
    assert queue.victim_for(Claim("greedy", "1")) is None
    assert queue.victim_for(Claim("greedy", "3")) is greedy[-1], "and so between its keys"
