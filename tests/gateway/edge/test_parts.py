"""Small parts alone: ids, headers, merging, distributions, the watchdog."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answering.stream_merge import merge
from gateway.edge.gate import read_head
from gateway.edge.json_body import parse_object
from gateway.edge.watchdog import FIRST_LOOK_S, DisconnectSignal, Watchdog
from gateway.errors import BodyTooSlow, ClientGone, ClientStalled, DeadlineExceeded, InvalidRequest, MalformedBody
from gateway.ids import is_uuid, uuid7
from gateway.observe.metrics import ANSWER_S, Distribution


def test_ids_are_uuids_of_version_7_that_sort_by_time() -> None:
    moments = [1, 999_999, 1_000_000, 1_500_000, 10**18, 10**18 + 250, 10**18 + 1_000_000]
    ids = [uuid7(time_ns=lambda moment=moment: moment) for moment in moments]  # type: ignore[misc]
    assert ids == sorted(ids)
    for each in ids:
        assert is_uuid(each)
        assert each[14] == "7"
        assert each[19] in "89ab"
    assert len({uuid7() for _ in range(1000)}) == 1000


@given(st.text(max_size=40))
def test_nothing_else_is_taken_for_an_id(text: str) -> None:
    import uuid

    try:
        expected = str(uuid.UUID(text)) == text
    except ValueError:
        expected = False
    assert is_uuid(text) == expected


@pytest.mark.parametrize(
    ("given_value", "kept"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", True),
        ("00-00000000000000000000000000000000-b7ad6b7169203331-01", False),
        ("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", False),
        ("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", False),
        ("00-0AF7651916CD43DD8448EB211C80319C-B7AD6B7169203331-01", False),
        ("x" * 5000, False),
        ("", False),
    ],
)
def test_only_a_sound_trace_context_is_kept(given_value: str, kept: bool) -> None:
    assert read_head({"headers": [(b"traceparent", given_value.encode())]}).traceparent == (
        given_value if kept else None
    )


def test_a_header_of_ours_has_a_known_name_and_a_bounded_value() -> None:
    assert read_head({"headers": [(b"x-suffice-min-tier", b" 2 ")]}).suffice == {"min_tier": "2"}
    for headers in ([(b"x-suffice-session-id", b"x" * 600)], [(b"x-suffice-nothing", b"1")]):
        with pytest.raises(InvalidRequest):
            read_head({"headers": headers})
    assert read_head({"headers": [(b"accept", b"a"), (b"accept", b"b")]}).suffice == {}


@given(st.integers(0, 12), st.integers(4, 10), st.sampled_from(["list", "dict"]))
def test_nesting_is_counted_to_the_level(depth: int, limit: int, kind: str) -> None:
    opening, closing = (b"[", b"]") if kind == "list" else (b'{"a":', b"}")
    body = b'{"x":' + opening * depth + b"1" + closing * depth + b', "y": "' + b"{[" * 50 + b'"}'
    if depth + 1 > limit:
        with pytest.raises(MalformedBody):
            parse_object(body, limit)
    else:
        assert "x" in parse_object(body, limit)


async def numbers(count: int, closed: list[int], fail_at: int | None = None) -> AsyncGenerator[int, None]:
    try:
        for number in range(count):
            if number == fail_at:
                raise KeyError(number)
            yield number
            await asyncio.sleep(0)
    finally:
        closed.append(count)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=5))
async def test_merging_loses_nothing_and_keeps_each_streams_order(counts: list[int]) -> None:
    closed: list[int] = []
    seen: dict[int, list[int]] = {place: [] for place in range(len(counts))}
    async for place, number in merge([numbers(count, closed) for count in counts]):
        seen[place].append(number)
    assert [seen[place] for place in range(len(counts))] == [list(range(count)) for count in counts]
    assert sorted(closed) == sorted(counts)


async def test_one_failing_stream_closes_the_others() -> None:
    closed: list[int] = []
    with pytest.raises(KeyError):
        async for _ in merge([numbers(1000, closed), numbers(5, closed, fail_at=2)]):
            pass
    assert sorted(closed) == [5, 1000]


@given(st.lists(st.floats(0, 1000), max_size=50))
def test_a_distribution_counts_each_value_once(values: list[float]) -> None:
    distribution = Distribution(ANSWER_S)
    for value in values:
        distribution.observe(value)
    buckets = distribution.cumulative()
    assert buckets[-1] == ("+Inf", len(values))
    for bound, count in buckets[:-1]:
        assert count == sum(value <= float(bound) for value in values)
    assert distribution.total == pytest.approx(sum(values))


class Connection:
    """A receive() whose end the test decides."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, object]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def hold(connection: Connection, *, timeout_s: float = 600, stall_timeout_s: float = 600) -> None:
    """A request that would go on for long, its client slow to take what is sent."""
    with Watchdog(connection.receive, timeout_s=timeout_s, stall_timeout_s=stall_timeout_s).answering() as watchdog:
        watchdog.waiting()
        await asyncio.sleep(600)


async def test_the_watchdog_tells_why_it_cut() -> None:
    connection = Connection()
    asyncio.get_running_loop().call_later(0.02, connection.gone.set)
    with pytest.raises(ClientGone):
        await hold(connection)
    with pytest.raises(DeadlineExceeded):
        await hold(Connection(), timeout_s=0.03)
    with pytest.raises(ClientStalled):
        await hold(Connection(), stall_timeout_s=0.03)


async def hold_beside(disconnect: DisconnectSignal, *, timeout_s: float = 600) -> None:
    """A request that would go on for long, on a connection that tells of its end."""
    with Watchdog(Connection().receive, timeout_s=timeout_s, stall_timeout_s=600, disconnect=disconnect).answering():
        assert len(asyncio.all_tasks()) == 1
        await asyncio.sleep(FIRST_LOOK_S * 2)
        assert len(asyncio.all_tasks()) == 1
        await asyncio.sleep(600)


async def test_a_request_lives_from_its_first_byte() -> None:
    """The time of its body counts, and so does each silence of it (fault review S7)."""
    watchdog = Watchdog(Connection().receive, timeout_s=1000, stall_timeout_s=0.1)
    watchdog._begun_s -= 1000
    with pytest.raises(DeadlineExceeded), watchdog.answering():
        await asyncio.sleep(5)


async def test_a_body_must_be_whole_in_time_however_lively_its_client_is() -> None:
    """(fault review S7)."""
    watchdog = Watchdog(Connection().receive, timeout_s=1000, stall_timeout_s=0.5, body_timeout_s=0.2)

    async def drip() -> None:
        with watchdog.reading():
            while True:
                await asyncio.sleep(0.01)
                watchdog.waiting()

    with pytest.raises(BodyTooSlow, match="not whole"):
        await drip()
    watchdog.close()


async def test_a_connection_that_tells_of_its_end_needs_no_task() -> None:
    disconnect = DisconnectSignal()
    asyncio.get_running_loop().call_later(0.02, disconnect.tell)
    with pytest.raises(ClientGone):
        await hold_beside(disconnect)
    with pytest.raises(ClientGone):
        await hold_beside(disconnect)
    assert disconnect.listener is None
    with pytest.raises(DeadlineExceeded):
        await hold_beside(DisconnectSignal(), timeout_s=0.03)


async def test_the_watchdog_leaves_no_trace() -> None:
    connection = Connection()
    with Watchdog(connection.receive, timeout_s=600, stall_timeout_s=600).answering() as watchdog:
        await asyncio.sleep(FIRST_LOOK_S * 2)
        watchdog.let_go()
        connection.gone.set()
        await asyncio.sleep(0.01)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert len(asyncio.all_tasks()) == 1


async def test_a_cancellation_from_outside_stays_one() -> None:
    async def work() -> None:
        with Watchdog(Connection().receive, timeout_s=600, stall_timeout_s=600).answering():
            await asyncio.sleep(600)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_key_may_come_as_x_api_key_and_authorization_counts_first() -> None:
    bare = (b"x-api-key", b"sk-suffice-a")
    assert read_head({"headers": [bare]}).authorization == "Bearer sk-suffice-a"
    assert read_head({"headers": [bare, (b"authorization", b"Bearer b")]}).authorization == "Bearer b"
    assert read_head({"headers": [(b"x-api-key", b"")]}).authorization is None
    with pytest.raises(InvalidRequest, match="x-api-key"):
        read_head({"headers": [bare, (b"x-api-key", b"another")]})
