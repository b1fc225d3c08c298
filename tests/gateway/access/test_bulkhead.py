"""When a bulkhead turns away: by how long its places are held, who asks, and the memory of the engines behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backends.protocol import Load
from gateway.access.bulkhead import Bulkhead
from policies.fair_queue import Claim


def held(bulkhead: Bulkhead, tenant: str, size: int = 1) -> None:
    bulkhead.queue.start(Claim(tenant, "key", size))


def waits(bulkhead: Bulkhead, tenant: str, size: int = 1) -> None:
    bulkhead.queue.push(Claim(tenant, "key", size))


def test_a_wait_is_what_is_wanted_by_what_is_held() -> None:
    bulkhead = Bulkhead(4)
    bulkhead.held_time.ended(6.0, 0.0, was_full=True)
    assert bulkhead.would_wait_s(1, 0.0) == 6.0, "nothing is held: as though one place were"
    held(bulkhead, "a", 4)
    waits(bulkhead, "b", 3)
    assert (bulkhead.would_wait_s(0, 0.0), bulkhead.would_wait_s(5, 0.0)) == (4.5, 12.0)
    assert not bulkhead.is_backlogged(5, 12.0, 100, 0.0)
    assert bulkhead.is_backlogged(5, 11.9, 100, 0.0)


def test_one_round_of_the_places_is_waited_for_however_long_it_is() -> None:
    bulkhead = Bulkhead(4)
    held(bulkhead, "a", 4)
    bulkhead.held_time.ended(60.0, 0.0, was_full=True)
    assert bulkhead.longest_wait_s(5.0, 0.0) == 60.0
    assert bulkhead.longest_wait_s(90.0, 0.0) == 90.0
    assert not bulkhead.is_backlogged(4, 5.0, 100, 0.0)
    assert bulkhead.is_backlogged(5, 5.0, 100, 0.0)


@pytest.mark.parametrize(
    ("num_places", "max_running", "most"), [(1, 100, 32), (16, 100, 32), (20, 100, 40), (100, 20, 40)]
)
def test_a_burst_before_anything_has_ended_is_two_rounds_or_thirty_two(
    num_places: int, max_running: int, most: int
) -> None:
    bulkhead = Bulkhead(num_places)
    held(bulkhead, "a", num_places)
    waits(bulkhead, "b", most - 1)
    assert not bulkhead.is_backlogged(1, 3600.0, max_running, 0.0)
    assert bulkhead.is_backlogged(2, 3600.0, max_running, 0.0)
    bulkhead.held_time.ended(0.1, 0.0, was_full=True)
    assert not bulkhead.is_backlogged(2, 3600.0, max_running, 0.0), "what is measured counts"


def test_a_tenants_own_queue_counts_at_its_share() -> None:
    bulkhead = Bulkhead(8)
    held(bulkhead, "a", 6)
    held(bulkhead, "b", 2)
    assert not bulkhead.is_backlogged_for("b", 100, 5.0, 0.0), "it has no queue"
    waits(bulkhead, "b", 10)
    assert not bulkhead.is_backlogged_for("b", 100, 5.0, 0.0), "nothing is known of how long it would be"
    bulkhead.held_time.ended(2.0, 0.0, was_full=True)
    # An even share of the eight places is four, and ten wait: two places more would make six seconds.
    assert not bulkhead.is_backlogged_for("b", 2, 6.0, 0.0)
    assert bulkhead.is_backlogged_for("b", 3, 6.0, 0.0)


def test_the_greediest_leaves_one_place_to_who_asked_lately_and_wants_less() -> None:
    bulkhead = Bulkhead(8)
    held(bulkhead, "greedy", 3)
    held(bulkhead, "modest", 1)
    assert bulkhead.num_kept_free("greedy", 8, 0.0) == 0, "nobody else asked"
    bulkhead.note_asked("modest", 0.0)
    bulkhead.note_asked("greedy", 0.0)
    assert bulkhead.num_kept_free("greedy", 8, 9.9) == 1
    assert bulkhead.num_kept_free("greedy", 8, 10.0) == 0, "that was long ago"
    assert [bulkhead.num_kept_free("greedy", places, 0.0) for places in (3, 4)] == [0, 1]
    assert bulkhead.num_kept_free("modest", 8, 0.0) == 0
    waits(bulkhead, "modest", 2)
    assert bulkhead.num_kept_free("greedy", 8, 0.0) == 0, "what it waits for counts, and now they are equal"
    waits(bulkhead, "greedy")
    held(bulkhead, "as greedy", 4)
    bulkhead.note_asked("as greedy", 0.0)
    assert bulkhead.num_kept_free("greedy", 8, 0.0) == 1, "an equal is not greedier"
    bulkhead.note_asked("greediest", 0.0)
    held(bulkhead, "greediest", 5)
    assert bulkhead.num_kept_free("greedy", 8, 0.0) == 0, "another holds more"
    assert bulkhead.num_kept_free("greediest", 8, 0.0) == 1


def test_the_last_sixty_four_tenants_that_asked_are_remembered() -> None:
    bulkhead = Bulkhead(8)
    held(bulkhead, "greedy", 2)
    for other in ("first", "second", *map(str, range(61)), "first", "last"):
        bulkhead.note_asked(other, 0.0 if other == "second" else -100.0)
    assert bulkhead.num_kept_free("greedy", 8, 0.0) == 1
    bulkhead.note_asked("one more", -100.0)
    assert bulkhead.num_kept_free("greedy", 8, 0.0) == 0, "the one that asked longest ago is forgotten"


def test_memory_is_short_where_an_engine_with_a_queue_has_less_than_a_tenth() -> None:
    load = Load(waiting=1, kv_free_fraction=0.09, has_kv_memory=True)
    found = [load, Load()]
    bulkhead = Bulkhead(4, [lambda: found[0], lambda: found[1]])
    assert not bulkhead.is_short_of_memory, "nothing runs, so nothing would end"
    held(bulkhead, "a")
    assert bulkhead.is_short_of_memory
    for enough in (replace(load, waiting=0), replace(load, kv_free_fraction=0.1)):
        found[0] = enough
        assert not bulkhead.is_short_of_memory
    assert not Bulkhead(4).is_short_of_memory
