"""The parts of the remote backend that do no I/O: stop strings, the breaker, the waits."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backends.config import BreakerConfig, RetryConfig
from backends.remote.breaker import Breaker, BreakerState
from backends.remote.retry import full_jitter_s, parse_retry_after_s
from backends.remote.stop_cutter import StopCutter


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


# --- stop strings ---------------------------------------------------------------------------------------------------

FEW = st.text("ab", max_size=12)


@given(FEW, st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 12)))
def test_text_is_cut_at_the_first_stop_string_wherever_it_is_split(
    text: str, stops: list[str], places: list[int]
) -> None:
    cutter = StopCutter(stops)
    pieces = [piece.decode() for piece in cut(text.encode(), places)]
    shown = "".join(cutter.feed(piece) for piece in pieces) + cutter.flush()
    ends = [text.index(stop) for stop in stops if stop in text]
    assert cutter.is_stopped == bool(ends)
    assert (cutter.found in stops and text.startswith(shown + cutter.found)) if ends else cutter.found is None
    # Reading piece by piece, the stop string that is complete first wins; it may begin later than a longer one.
    first_end = min((text.index(stop) + len(stop) for stop in stops if stop in text), default=len(text))
    assert len(shown) <= first_end
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    if not ends:
        assert shown == text


def test_no_more_is_held_back_than_may_begin_a_stop_string() -> None:
    cutter = StopCutter(["END", "\n\n"])
    assert [cutter.feed(piece) for piece in ("a E", "N", "x\n", "b")] == ["a ", "", "ENx", "\nb"]


# --- breaker ---------------------------------------------------------------------------------------------------------


class BreakerMachine(RuleBasedStateMachine):
    """Any order of attempts, results, late results and passing time."""

    def __init__(self) -> None:
        super().__init__()
        self.config = BreakerConfig(failure_threshold=2, open_s=4.0, max_open_s=10.0)
        self.breaker = Breaker(self.config)
        self.now_s = 0.0
        self.running: list[tuple[int, BreakerState]] = []
        self.failures_in_a_row = 0

    # Whole seconds: sums are exact, so limits can be compared without a tolerance.
    @rule(seconds=st.integers(1, 12))
    def pass_time(self, seconds: int) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.breaker.can_attempt(self.now_s))
    @rule()
    def begin(self) -> None:
        state = self.breaker.state(self.now_s)
        self.running.append((self.breaker.begin(self.now_s), state))
        if state is BreakerState.HALF_OPEN:
            assert not self.breaker.can_attempt(self.now_s), "one probe at a time"

    @precondition(lambda self: self.running)
    @rule(data=st.data(), result=st.sampled_from(["succeed", "fail", "abandon"]))
    def finish(self, data: st.DataObject, result: str) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        ticket, began_in = self.running.pop(index)
        before = self.breaker.state(self.now_s)
        if result == "succeed":
            self.breaker.succeed(ticket)
            assert self.breaker.state(self.now_s) in (before, BreakerState.CLOSED)
        elif result == "fail":
            self.breaker.fail(ticket, self.now_s)
            assert self.breaker.state(self.now_s) in (before, BreakerState.OPEN)
        else:
            self.breaker.abandon(ticket)
            assert self.breaker.state(self.now_s) is before
        if began_in is BreakerState.CLOSED and before is not BreakerState.CLOSED:
            assert self.breaker.state(self.now_s) is before, "a result from before the trip changes nothing"

    @invariant()
    def open_means_no_attempts_for_a_bounded_time(self) -> None:
        state = self.breaker.state(self.now_s)
        if state is BreakerState.OPEN:
            assert not self.breaker.can_attempt(self.now_s)
            assert 0 < self.breaker.wait_s(self.now_s) <= self.config.max_open_s
        if state is BreakerState.CLOSED:
            assert self.breaker.can_attempt(self.now_s)

    def teardown(self) -> None:
        # Never stuck: once nothing runs and the longest wait has passed, the replica is tried again.
        for ticket, _ in self.running:
            self.breaker.abandon(ticket)
        assert self.breaker.can_attempt(self.now_s + self.config.max_open_s)


TestBreaker = BreakerMachine.TestCase


def test_a_breaker_opens_probes_and_waits_longer_each_time() -> None:
    breaker = Breaker(BreakerConfig(failure_threshold=2, open_s=4.0, max_open_s=10.0))
    for _ in range(2):
        breaker.fail(breaker.begin(0.0), 0.0)
    assert (breaker.state(3.9), breaker.state(4.0)) == (BreakerState.OPEN, BreakerState.HALF_OPEN)
    breaker.fail(breaker.begin(4.0), 4.0)
    assert (breaker.wait_s(4.0), breaker.state(12.0)) == (8.0, BreakerState.HALF_OPEN)
    breaker.fail(breaker.begin(12.0), 12.0)
    assert breaker.wait_s(12.0) == 10.0
    breaker.succeed(breaker.begin(22.0))
    assert breaker.state(22.0) is BreakerState.CLOSED


def test_success_between_failures_keeps_it_closed() -> None:
    breaker = Breaker(BreakerConfig(failure_threshold=2))
    for _ in range(10):
        breaker.fail(breaker.begin(0.0), 0.0)
        breaker.succeed(breaker.begin(0.0))
    assert breaker.state(0.0) is BreakerState.CLOSED


# --- waits -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 1000), st.floats(0, 5), st.floats(0, 60), st.integers())
def test_a_wait_lies_under_its_cap(num_failed: int, base_s: float, max_s: float, seed: int) -> None:
    config = RetryConfig(base_s=base_s, max_s=max_s)
    assert 0 <= full_jitter_s(num_failed, config, Random(seed)) <= min(max_s, base_s * 2.0 ** min(num_failed - 1, 30))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), ("3", 3.0), ("0.5", 0.5), ("-1", None), ("nan", None), ("soon", None), ("", None)],
)
def test_retry_after_in_seconds(value: str | None, expected: float | None) -> None:
    assert parse_retry_after_s(value) == expected


def test_retry_after_as_a_date() -> None:
    now = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
    assert parse_retry_after_s("Thu, 01 Jan 2026 12:00:30 GMT", now) == 30.0
    assert parse_retry_after_s("Thu, 01 Jan 2026 11:00:00 GMT", now) == 0.0
