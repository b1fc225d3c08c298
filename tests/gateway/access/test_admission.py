"""Admission control beside a model: places, bulkheads, limits, fairness, the length of the queue, drain."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.protocol import Load, Priority
from backends.testing import EchoBackend
from gateway.access.admission import Admission
from gateway.access.authenticator import Caller
from gateway.access.bulkhead import Bulkhead, PlaceClaim, make_bulkheads
from gateway.access.key_limits import KeyLimits
from gateway.errors import Draining, QueueFull

LONG_S = 1000.0

operations = st.lists(st.sampled_from(["live", "background", "leave", "cancel"]), max_size=40)


@given(operations, st.integers(1, 3), st.integers(0, 4))
async def test_places_are_bounded_and_live_goes_first(steps: list[str], max_running: int, max_waiting: int) -> None:
    admission = Admission(max_running, max_waiting, LONG_S)
    running: list[asyncio.Task[PlaceClaim]] = []
    waiting: dict[str, list[asyncio.Task[PlaceClaim]]] = {"live": [], "background": []}

    async def settle() -> None:
        for _ in range(4):
            await asyncio.sleep(0)
        for queue in waiting.values():
            for task in [task for task in queue if task.done()]:
                queue.remove(task)
                if not task.cancelled() and task.exception() is None:
                    running.append(task)

    for step in steps:
        if step in waiting:
            waiting[step].append(asyncio.create_task(admission.enter(Priority(step))))
        elif step == "leave" and running:
            had_live = bool(waiting["live"])
            background = list(waiting["background"])
            admission.leave(running.pop().result())
            await settle()
            if had_live:
                assert waiting["background"] == background, "background work overtook a live request"
        elif step == "cancel" and (queue := waiting["live"] or waiting["background"]):
            queue[0].cancel()
        await settle()
        assert admission.num_running == len(running) <= max_running
        assert admission.num_waiting == len(waiting["live"]) + len(waiting["background"]) <= max_waiting
        if admission.num_waiting:
            assert admission.num_running == max_running, "someone waits beside a free place"
    for queue in waiting.values():
        for task in queue:
            task.cancel()
    await asyncio.gather(*waiting["live"], *waiting["background"], return_exceptions=True)
    assert admission.num_waiting == 0
    for task in running:
        admission.leave(task.result())
    assert admission.is_idle


async def test_a_live_request_takes_the_place_of_the_newest_background_one_in_the_queue() -> None:
    admission = Admission(1, 1, LONG_S)
    place = await admission.enter(Priority.LIVE)
    background = asyncio.create_task(admission.enter(Priority.BACKGROUND))
    await asyncio.sleep(0)
    live = asyncio.create_task(admission.enter(Priority.LIVE))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await background
    with pytest.raises(QueueFull):
        await admission.enter(Priority.BACKGROUND)
    with pytest.raises(QueueFull):
        await admission.enter(Priority.LIVE)
    admission.leave(place)
    admission.leave(await live)
    assert admission.is_idle


async def test_draining_sends_the_waiting_away_and_waits_for_the_running() -> None:
    admission = Admission(1, 5, LONG_S)
    place = await admission.enter(Priority.LIVE)
    waiting = asyncio.create_task(admission.enter(Priority.LIVE))
    await asyncio.sleep(0)
    assert not await admission.drain(0.01)
    with pytest.raises(Draining):
        await waiting
    with pytest.raises(Draining):
        await admission.enter(Priority.LIVE)
    admission.leave(place)
    assert await admission.drain(1.0)
    assert admission.is_idle


A, B = Caller("a", "key of a"), Caller("b", "key of b")


class Clock:
    """Seconds that the test lets pass."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def ask(entering: Awaitable[PlaceClaim]) -> asyncio.Task[PlaceClaim]:
    """Begin to enter, as far as it goes by itself."""
    task = asyncio.ensure_future(entering)
    for _ in range(3):
        await asyncio.sleep(0)
    return task


def is_waiting(task: asyncio.Task[PlaceClaim]) -> bool:
    return not task.done()


async def hold_each(admission: Admission, clock: Clock, held_s: float, num: int) -> None:
    """Let requests pass one after another, with somebody behind each: the bulkhead is full all the time."""
    place = await admission.enter(Priority.LIVE)
    for _ in range(num):
        following = await ask(admission.enter(Priority.LIVE))
        clock.now_s += held_s
        admission.leave(place)
        place = await following
    clock.now_s += held_s
    admission.leave(place)


async def test_the_queue_is_bounded_by_the_seconds_that_it_takes() -> None:
    """Not by requests alone, which say nothing of the wait (fault review S2)."""
    clock = Clock()
    admission = Admission(1, 1000, 8.0, clock=clock)
    await hold_each(admission, clock, held_s=2.0, num=10)
    place = await admission.enter(Priority.LIVE)
    waiting = [await ask(admission.enter(Priority.LIVE)) for _ in range(20)]
    accepted = [task for task in waiting if is_waiting(task)]
    assert len(accepted) == 4, "8 s at 2 s each"
    refused = next(task for task in waiting if task.done())
    error = refused.exception()
    assert isinstance(error, QueueFull)
    assert error.retry_after_s == pytest.approx(10.0), "when the queue and this one would have been served"
    with pytest.raises(QueueFull):
        admission.check()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    admission.leave(place)
    assert admission.is_idle


async def test_before_anything_has_ended_little_may_wait() -> None:
    """At a cold start nobody knows how long requests take."""
    admission = Admission(20, 1000, LONG_S, clock=Clock())
    places = [await admission.enter(Priority.LIVE) for _ in range(20)]
    waiting = [await ask(admission.enter(Priority.LIVE)) for _ in range(60)]
    assert sum(map(is_waiting, waiting)) == 40, "twice the places"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for place in places:
        admission.leave(place)


async def test_long_answers_may_wait_for_one_round_of_the_places() -> None:
    """Which at most doubles the time they take."""
    clock = Clock()
    bulkhead = Bulkhead(3)
    bulkhead.held_time.ended(60.0, clock(), was_full=True)
    admission = Admission(None, 1000, 5.0, bulkheads={"model": bulkhead}, clock=clock)
    places = [await admission.enter(Priority.LIVE, A, "model") for _ in range(3)]
    waiting = [await ask(admission.enter(Priority.LIVE, A, "model")) for _ in range(9)]
    assert sum(map(is_waiting, waiting)) == 3
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for place in places:
        admission.leave(place)


async def test_a_silence_longer_than_usual_shortens_the_queue() -> None:
    """Long requests are noticed before they end."""
    clock = Clock()
    admission = Admission(1, 1000, 8.0, clock=clock)
    await hold_each(admission, clock, held_s=0.1, num=10)
    place = await admission.enter(Priority.LIVE)
    first = await ask(admission.enter(Priority.LIVE))
    clock.now_s += 30.0
    with pytest.raises(QueueFull):
        await admission.enter(Priority.LIVE)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    admission.leave(place)


async def test_who_has_waited_far_too_long_is_sent_away() -> None:
    """The queue looked short when it came, and turned out otherwise."""
    clock = Clock()
    bulkhead = Bulkhead(1)
    bulkhead.held_time.ended(0.001, clock(), was_full=True)
    admission = Admission(None, 10, 0.01, bulkheads={"model": bulkhead}, clock=clock)
    place = await admission.enter(Priority.LIVE, A, "model")
    with pytest.raises(QueueFull):
        await admission.enter(Priority.LIVE, A, "model")
    admission.leave(place)
    assert admission.is_idle


async def test_a_modest_tenant_goes_next_and_finds_room_in_a_full_queue() -> None:
    """One key may hold all places and the whole queue no longer (security review M8)."""
    admission = Admission(2, 3, LONG_S)
    places = [await admission.enter(Priority.LIVE, A) for _ in range(2)]
    greedy = [await ask(admission.enter(Priority.LIVE, A)) for _ in range(3)]
    with pytest.raises(QueueFull):
        await admission.enter(Priority.LIVE, A)
    admission.check(B)
    with pytest.raises(QueueFull):
        admission.check(A)
    modest = await ask(admission.enter(Priority.LIVE, B))
    assert is_waiting(modest)
    with pytest.raises(QueueFull):
        await greedy.pop()
    admission.leave(places.pop())
    assert (await modest).tenant == "b"
    assert all(map(is_waiting, greedy))
    admission.leave(modest.result())
    admission.leave(places.pop())
    for task in greedy:
        admission.leave(await task)
    assert admission.is_idle


async def test_a_place_is_kept_free_for_the_modest_while_they_are_about() -> None:
    """Whoever has its share leaves one place; alone, or among others as greedy, it may have all (fault review S2)."""
    clock = Clock()
    admission = Admission(4, 100, LONG_S, clock=clock)

    async def leave(place: PlaceClaim) -> None:
        admission.leave(place)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    places = [await admission.enter(Priority.LIVE, A) for _ in range(4)]
    modest = await ask(admission.enter(Priority.LIVE, B))
    greedy = [await ask(admission.enter(Priority.LIVE, A)) for _ in range(4)]
    await leave(places.pop())
    await leave(await modest)
    assert all(map(is_waiting, greedy)), "one place stays free"
    second = await ask(admission.enter(Priority.LIVE, B))
    assert not is_waiting(second), "and is there at once"
    third = await ask(admission.enter(Priority.LIVE, B))
    await leave(places.pop())
    assert [is_waiting(third), *map(is_waiting, greedy)] == [False, True, True, True, True]
    await leave(places.pop())
    assert all(map(is_waiting, greedy)), "two of three are the others', and they want no more"
    others = [await ask(admission.enter(Priority.LIVE, B)) for _ in range(4)]
    assert [is_waiting(each) for each in others] == [False, True, True, True]
    await leave(third.result())
    assert sum(map(is_waiting, greedy)) == 3, "nobody is modest now"
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await leave(second.result())
    await leave(others[0].result())
    clock.now_s += 11.0
    await leave(places.pop())
    assert not any(map(is_waiting, greedy)), "nobody modest has asked lately"
    for task in greedy:
        admission.leave(task.result())
    assert admission.is_idle


@pytest.mark.parametrize(
    ("max_running", "held", "is_kept"),
    [
        (None, ["one"] * 3, True),
        (None, ["one"] * 2 + ["other"] * 4, False),
        (4, ["one"] * 2 + ["other"], True),
        (4, ["other"] * 2, False),
    ],
)
async def test_the_last_place_is_kept_of_a_bulkhead_and_of_all(
    max_running: int | None, held: list[str], is_kept: bool
) -> None:
    bulkheads = {"one": Bulkhead(4), "other": Bulkhead(4)}
    admission = Admission(max_running, 100, LONG_S, bulkheads=bulkheads, clock=Clock())
    admission.leave(await admission.enter(Priority.LIVE, B, "one"))
    places = [await admission.enter(Priority.LIVE, A, each) for each in held]
    greedy = await ask(admission.enter(Priority.LIVE, A, "one"))
    assert is_waiting(greedy) is is_kept
    modest = await ask(admission.enter(Priority.LIVE, B, "one"))
    assert not is_waiting(modest)
    for place in (*places, modest.result()):
        admission.leave(place)
    admission.leave(await greedy)
    assert admission.is_idle


async def test_how_long_a_place_is_held_is_measured_only_while_somebody_wants_it() -> None:
    clock = Clock()
    admission = Admission(4, 100, LONG_S, clock=clock)
    held_time = admission._other.held_time
    admission.leave(await admission.enter(Priority.LIVE, A))
    assert not held_time.is_measured, "places were free"
    places = [await admission.enter(Priority.LIVE, A) for _ in range(3)]
    admission.leave(await admission.enter(Priority.LIVE, B))
    clock.now_s += 5.0
    waiting = await ask(admission.enter(Priority.LIVE, A))
    assert is_waiting(waiting), "for a place that is kept free for another"
    clock.now_s += 100.0
    assert held_time.expect_s(clock()) == 100.0, "since somebody waits"
    admission.leave(places.pop())
    assert held_time.is_measured
    for place in (*places, await waiting):
        admission.leave(place)
    assert admission.is_idle


async def test_a_tenant_is_let_in_for_the_share_that_others_leave_it() -> None:
    """Its own queue is as long as it is served in time; by the whole bulkhead's rate it would wait in vain."""
    clock = Clock()
    bulkhead = Bulkhead(8)
    bulkhead.held_time.ended(1.0, clock(), was_full=True)
    admission = Admission(None, 1000, 5.0, bulkheads={"model": bulkhead}, clock=clock)
    places = [await admission.enter(Priority.LIVE, B, "model") for _ in range(6)]
    places += [await admission.enter(Priority.LIVE, A, "model") for _ in range(2)]
    waiting = [await ask(admission.enter(Priority.LIVE, A, "model")) for _ in range(40)]
    assert sum(map(is_waiting, waiting)) == 20, "an even share of the places, for 5 s"
    other_key = await ask(admission.enter(Priority.LIVE, Caller("a", "modest key of a"), "model"))
    assert is_waiting(other_key), "a greedier key of the same tenant gives way"
    assert sum(map(is_waiting, waiting)) == 19
    waiting.append(other_key)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for place in places:
        admission.leave(place)
    assert admission.is_idle


async def test_nobody_gives_way_to_a_request_that_would_wait_too_long_all_the_same() -> None:
    """A short queue makes no room in a long one, though all of them together are full."""
    clock = Clock()
    long, short = Bulkhead(1), Bulkhead(1)
    long.held_time.ended(1.0, clock(), was_full=True)
    admission = Admission(None, 3, 2.0, bulkheads={"long": long, "short": short}, clock=clock)
    places = [await admission.enter(Priority.LIVE, A, model) for model in ("long", "short")]
    waiting = [await ask(admission.enter(Priority.LIVE, A, model)) for model in ("long", "long", "short")]
    with pytest.raises(QueueFull):
        await admission.enter(Priority.LIVE, A, "long")
    assert all(map(is_waiting, waiting))
    modest = await ask(admission.enter(Priority.LIVE, B, "short"))
    assert is_waiting(modest), "in number it is the greediest that makes room, wherever that waits"
    assert [is_waiting(task) for task in waiting] == [True, True, False]
    for task in (*waiting, modest):
        task.cancel()
    await asyncio.gather(*waiting, modest, return_exceptions=True)
    for place in places:
        admission.leave(place)
    assert admission.is_idle


@pytest.mark.parametrize(
    ("limits", "other"),
    [
        (KeyLimits(max_concurrency=1), Caller("a", "another key of a")),
        (KeyLimits(max_tenant_concurrency=1), Caller("b", "a key of b")),
    ],
    ids=["key", "tenant"],
)
async def test_a_key_has_no_more_at_once_than_it_may_and_holds_up_nobody(limits: KeyLimits, other: Caller) -> None:
    """(security review M8)."""
    admission = Admission(4, 10, LONG_S, bulkheads={name: Bulkhead(4) for name in ("small", "large")})
    caller = Caller("a", "key of a", limits)
    place = await admission.enter(Priority.LIVE, caller, "small")
    second = await ask(admission.enter(Priority.LIVE, caller, "large"))
    assert is_waiting(second), "the limit is one over all models"
    admission.leave(await admission.enter(Priority.LIVE, other, "large"))
    assert is_waiting(second)
    admission.leave(place)
    admission.leave(await second)
    assert admission.is_idle


async def test_a_key_waits_for_itself_no_longer_than_for_others() -> None:
    clock = Clock()
    admission = Admission(4, 1000, 5.0, clock=clock)
    caller = Caller("a", "key", KeyLimits(max_concurrency=1))
    admission._other.held_time.ended(2.0, clock(), was_full=True)
    place = await admission.enter(Priority.LIVE, caller)
    waiting = [await ask(admission.enter(Priority.LIVE, caller)) for _ in range(9)]
    assert sum(map(is_waiting, waiting)) == 2
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    admission.leave(place)


async def test_one_may_always_wait_for_a_keys_only_place() -> None:
    """However long its requests take: a key that asks for two at once is not told that it asks too often."""
    clock = Clock()
    admission = Admission(4, 1000, 5.0, clock=clock)
    caller = Caller("a", "key", KeyLimits(max_concurrency=1))
    admission._other.held_time.ended(60.0, clock(), was_full=True)
    place = await admission.enter(Priority.LIVE, caller)
    first = await ask(admission.enter(Priority.LIVE, caller))
    second = await ask(admission.enter(Priority.LIVE, caller))
    assert is_waiting(first)
    assert not is_waiting(second)
    with pytest.raises(QueueFull):
        await second
    admission.leave(place)
    admission.leave(await first)


async def test_a_full_bulkhead_holds_up_nobody_who_wants_another() -> None:
    admission = Admission(None, 10, LONG_S, bulkheads={"hung": Bulkhead(1), "sound": Bulkhead(2)})
    assert admission.max_running == 3
    hung = await admission.enter(Priority.LIVE, A, "hung")
    behind = await ask(admission.enter(Priority.LIVE, A, "hung"))
    sound = [await admission.enter(Priority.LIVE, A, "sound") for _ in range(2)]
    assert is_waiting(behind)
    for place in (*sound, hung):
        admission.leave(place)
    admission.leave(await behind)
    assert admission.is_idle


async def test_many_answers_take_as_many_places() -> None:
    admission = Admission(None, 10, LONG_S, bulkheads={"model": Bulkhead(4)})
    one = await admission.enter(Priority.LIVE, A, "model")
    four = await ask(admission.enter(Priority.LIVE, A, "model", size=16))
    small = await ask(admission.enter(Priority.LIVE, A, "model"))
    assert is_waiting(four)
    assert is_waiting(small), "it would pass for ever who needs more"
    admission.leave(one)
    admission.leave(await four)
    admission.leave(await small)
    assert admission.is_idle


class Engine:
    """Says what an engine would of itself."""

    def __init__(self) -> None:
        self.load = Load(max_running=8, has_kv_memory=True)

    def read(self) -> Load:
        return self.load


async def test_who_would_wait_for_memory_inside_an_engine_waits_before_it() -> None:
    """There it can be turned away, and its turn is fair (fault review S2)."""
    engine = Engine()
    admission = Admission(None, 10, LONG_S, bulkheads={"model": Bulkhead(8, [engine.read])})
    place = await admission.enter(Priority.LIVE, A, "model")
    engine.load = Load(running=1, waiting=1, kv_free_fraction=0.01)
    second = await ask(admission.enter(Priority.LIVE, A, "model"))
    assert is_waiting(second)
    # Nobody leaves; the engine is looked at again by itself.
    engine.load = Load(running=2, kv_free_fraction=0.5)
    async with asyncio.timeout(60):
        admission.leave(await second)
    engine.load = Load(running=1, waiting=5, kv_free_fraction=0.0)
    admission.leave(place)
    admission.leave(await admission.enter(Priority.LIVE, A, "model"))
    assert admission.is_idle


class Sized(EchoBackend):
    """Says how much it takes at once, and where it computes."""

    def __init__(self, model_id: str, load: Load) -> None:
        super().__init__(model_id)
        self._load = load

    def load(self) -> Load:
        return self._load


def test_models_that_share_a_device_share_its_places() -> None:
    found = make_bulkheads(
        {
            "one": Sized("one", Load(max_running=8, computed_by="cpu")),
            "two": Sized("two", Load(max_running=6, computed_by="cpu")),
            "remote": Sized("remote", Load(max_running=100)),
            "echo": Sized("echo", Load()),
        }
    )
    assert found["one"] is found["two"]
    assert len(set(found.values())) == 3
    assert [found[name].num_places for name in ("one", "remote", "echo")] == [6, 100, 256]
