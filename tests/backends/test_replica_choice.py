"""Replicas are chosen by least outstanding work, and attempts follow their rules, beside naive models of both."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backends.config import BreakerConfig, RetryConfig
from backends.errors import (
    BackendError,
    BackendFailure,
    BackendOverloaded,
    BackendTimeout,
    BackendUnavailable,
    ContextLengthExceeded,
    RequestRejected,
)
from backends.remote.attempt_plan import AttemptPlan, PlannedAttempt
from backends.remote.breaker import Breaker, BreakerState
from backends.remote.replicas import Replica, ReplicaLease, ReplicaSet

BREAKER = BreakerConfig(failure_threshold=2, open_s=4.0, max_open_s=16.0)
RETRY = RetryConfig(max_attempts=4, base_s=0.5, max_s=3.0)


def make_set(count: int, max_outstanding: int = 3) -> ReplicaSet:
    return ReplicaSet.of([f"http://r{index}/v1/" for index in range(count)], BREAKER, max_outstanding)


def trip(replica: Replica, now_s: float = 0.0) -> None:
    for _ in range(BREAKER.failure_threshold):
        replica.breaker.fail(replica.breaker.begin(now_s), now_s)


# --- which replica ---------------------------------------------------------------------------------------------------


class ReplicaSetMachine(RuleBasedStateMachine):
    """Requests come, make tokens, end well, badly or abandoned, while time passes and servers ask for rest."""

    def __init__(self) -> None:
        super().__init__()
        self.set = make_set(3)
        self.now_s = 0.0
        self.running: list[tuple[ReplicaLease, list[float]]] = []

    def model_work(self, replica: Replica) -> float:
        return sum(work[0] for lease, work in self.running if lease.replica is replica)

    @rule(seconds=st.integers(1, 20))
    def pass_time(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(index=st.integers(0, 2), seconds=st.integers(1, 10))
    def rest(self, index: int, seconds: int) -> None:
        replica = self.set.replicas[index]
        before = replica.resting_until
        replica.rest(self.now_s + seconds)
        assert replica.resting_until == max(before, self.now_s + seconds)

    @rule(work=st.integers(1, 100))
    def begin(self, work: int) -> None:
        free = [each for each in self.set.replicas if each.can_take(self.now_s, 3)]
        chosen = self.set.choose(self.now_s)
        if not free:
            assert chosen is None
            return
        assert chosen in free
        assert chosen.work == min(each.work for each in free)
        self.running.append((ReplicaLease(chosen, self.now_s, float(work)), [float(work)]))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 60))
    def make_tokens(self, data: st.DataObject, num_tokens: int) -> None:
        lease, work = data.draw(st.sampled_from(self.running))
        lease.progress(num_tokens)
        work[0] = max(0.0, work[0] - num_tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), result=st.sampled_from(["succeed", "fail", "abandon"]))
    def end(self, data: st.DataObject, result: str) -> None:
        lease, _ = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        with lease:
            if result == "succeed":
                lease.succeed()
            elif result == "fail":
                lease.fail(self.now_s)

    @invariant()
    def the_books_are_those_of_what_runs(self) -> None:
        for replica in self.set.replicas:
            mine = [lease for lease, _ in self.running if lease.replica is replica]
            assert replica.num_outstanding == len(mine) <= 3
            assert replica.work == pytest.approx(self.model_work(replica))
        assert self.set.num_outstanding == len(self.running)

    @invariant()
    def a_wait_is_bounded_and_ends_in_a_free_replica(self) -> None:
        wait_s = self.set.wait_s(self.now_s)
        assert 0 <= wait_s <= 16
        assert (wait_s == 0) == any(each.wait_s(self.now_s) == 0 for each in self.set.replicas)


TestReplicaSet = ReplicaSetMachine.TestCase


def test_idle_replicas_take_turns() -> None:
    replicas = make_set(3)
    counts = Counter(chosen.url for _ in range(30) if (chosen := replicas.choose(0.0)) is not None)
    assert counts == {f"http://r{index}/v1": 10 for index in range(3)}


def test_the_one_to_avoid_is_not_chosen_even_when_alone() -> None:
    replicas = make_set(2)
    first, second = replicas.replicas
    assert all(replicas.choose(0.0, avoid=[first]) is second for _ in range(4))
    assert replicas.choose(0.0, avoid=[first, second]) is None


def test_an_open_breaker_a_rest_and_a_full_replica_are_passed_over() -> None:
    replicas = make_set(4, max_outstanding=1)
    broken, resting, full, free = replicas.replicas
    trip(broken)
    resting.rest(9.0)
    ReplicaLease(full, 0.0, 1.0)
    # Work that is left weighs less than not being able to take any.
    free.work = 1e6
    assert all(replicas.choose(0.0) is free for _ in range(8))
    assert (broken.wait_s(0.0), resting.wait_s(0.0), full.wait_s(0.0)) == (4.0, 9.0, 0.0)


def test_a_half_open_breaker_is_closed_by_the_first_token_not_by_the_last() -> None:
    (replica,) = make_set(1).replicas
    trip(replica)
    lease = ReplicaLease(replica, 4.0, 100.0)
    assert replica.breaker.state(4.0) is BreakerState.HALF_OPEN
    assert not replica.can_take(4.0, 3)
    lease.progress(1)
    assert replica.breaker.state(4.0) is BreakerState.CLOSED
    assert replica.can_take(4.0, 3)


def test_a_health_check_closes_an_open_breaker_but_cannot_open_it_further() -> None:
    (replica,) = make_set(1).replicas
    trip(replica)
    with ReplicaLease(replica, 1.0, 0.0) as lease:
        lease.fail(1.0)
    assert replica.wait_s(1.0) == 3.0
    with ReplicaLease(replica, 1.0, 0.0) as lease:
        lease.succeed()
    assert replica.breaker.state(1.0) is BreakerState.CLOSED


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=20), st.lists(st.integers(0, 1000), max_size=20))
def test_nothing_is_left_of_the_work_when_all_has_ended(works: list[float], tokens: list[int]) -> None:
    (replica,) = make_set(1, max_outstanding=100).replicas
    leases = [ReplicaLease(replica, 0.0, work) for work in works]
    for lease, num_tokens in zip(leases, tokens, strict=False):
        lease.progress(num_tokens)
        assert replica.work >= -1e-6
    for lease in leases:
        lease.__exit__(None, None, None)
    assert (replica.num_outstanding, replica.work) == (0, 0.0)


# --- attempts --------------------------------------------------------------------------------------------------------


def make_plan(
    replicas: ReplicaSet, config: RetryConfig = RETRY, seed: int = 0, max_rest_s: float = 16.0
) -> AttemptPlan:
    return AttemptPlan(replicas, config, Random(seed), "far", max_rest_s)


RETRYABLE = st.sampled_from(
    [
        BackendFailure("died"),
        BackendTimeout("silent"),
        BackendUnavailable("away"),
        BackendUnavailable("away", retry_after_s=2.0),
        BackendOverloaded("busy", retry_after_s=1.0),
        BackendOverloaded("busy", retry_after_s=3600.0),
    ]
)


@given(st.integers(1, 4), st.integers(1, 6), st.lists(RETRYABLE, min_size=8, max_size=8), st.integers())
def test_attempts_of_one_request(count: int, max_attempts: int, errors: list[BackendError], seed: int) -> None:
    """Every replica once before any twice, no silent one twice, never more than allowed, no wait beyond the cap."""
    replicas = make_set(count)
    config = RetryConfig(max_attempts=max_attempts, base_s=0.5, max_s=3.0)
    plan = make_plan(replicas, config, seed)
    now_s, tried, silent = 0.0, list[Replica](), list[Replica]()
    step = plan.first(now_s)
    for error in errors:
        assert 0.0 <= step.wait_s <= config.max_s
        assert step.replica not in silent
        if step.replica in tried:
            untried = [each for each in replicas.replicas if each not in tried]
            assert not any(each.can_take(now_s, 3) for each in untried)
        else:
            assert step.wait_s == 0.0
        now_s += step.wait_s
        tried.append(step.replica)
        if isinstance(error, BackendTimeout):
            silent.append(step.replica)
        try:
            step = plan.after(error, step.replica, now_s)
        except type(error):
            break
    assert len(tried) <= max_attempts


@pytest.mark.parametrize(
    "error", [RequestRejected("no", status=400), ContextLengthExceeded(9, 8)], ids=lambda each: type(each).__name__
)
def test_the_callers_mistake_ends_the_attempts(error: BackendError) -> None:
    plan = make_plan(make_set(3))
    with pytest.raises(type(error)):
        plan.after(error, plan.first(0.0).replica, 0.0)


def test_retry_after_is_waited_for_told_or_bounded() -> None:
    replicas = make_set(1)
    plan = make_plan(replicas)
    replica = plan.first(0.0).replica
    assert plan.after(BackendUnavailable("x", retry_after_s=2.5), replica, 0.0) == PlannedAttempt(replica, 2.5)
    # Longer than max_s: whoever asked is told.
    with pytest.raises(BackendOverloaded) as caught:
        plan.after(BackendOverloaded("x", retry_after_s=5.0), replica, 10.0)
    assert caught.value.retry_after_s == 5.0
    # Others ask sooner: one answer's word is believed for a second, the second one's for two (security review L9).
    assert replica.resting_until == 12.0
    # A server that names a year by mistake is asked again when the longest rest is over.
    for now_s in (20.0, 40.0, 60.0):
        with pytest.raises(BackendOverloaded):
            make_plan(replicas).after(BackendOverloaded("x", retry_after_s=3e7), replica, now_s)
    assert replica.resting_until == 76.0
    assert replicas.choose(75.9) is None
    assert replicas.choose(76.0) is replica


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1e9), st.booleans()), min_size=1, max_size=30))
def test_a_server_rests_no_longer_than_it_has_earned(answers: list[tuple[float, float, bool]]) -> None:
    """(security review L9)"""
    (replica,) = make_set(1).replicas
    now_s, num_asked = 0.0, 0
    for pause_s, asked_s, is_answered in answers:
        now_s += pause_s
        if is_answered:
            with ReplicaLease(replica, now_s, 1.0) as lease:
                lease.succeed()
            num_asked = 0
        num_asked += 1
        before = replica.resting_until
        replica.rest_as_asked(now_s, asked_s, 16.0)
        assert replica.resting_until <= max(before, now_s + min(asked_s, 16.0, 2.0 ** (num_asked - 1)))


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=60), st.integers(1, 5))
def test_a_breaker_opens_by_requests_and_not_by_their_tries(attempts: list[tuple[int, bool]], threshold: int) -> None:
    """One bad request must not close a server to everybody (fault review, open decision)."""
    breaker = Breaker(BreakerConfig(failure_threshold=threshold, open_s=4.0, max_open_s=16.0))
    failed = set[int]()
    for key, is_good in attempts:
        ticket = breaker.begin(0.0)
        if is_good:
            breaker.succeed(ticket)
            failed.clear()
        else:
            breaker.fail(ticket, 0.0, key)
            failed.add(key)
        assert (breaker.state(0.0) is BreakerState.OPEN) == (len(failed) >= threshold)
        if len(failed) >= threshold:
            return


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0.0, 40.0)), max_size=60), st.integers(1, 4))
def test_a_breaker_opens_by_callers_where_others_were_served(
    attempts: list[tuple[str, bool, float]], threshold: int
) -> None:
    breaker = Breaker(BreakerConfig(failure_threshold=threshold, open_s=4.0, max_open_s=16.0))
    served, failed, now_s = dict[str, float](), list[str](), 0.0
    for request, (caller, is_good, pause_s) in enumerate(attempts):
        now_s += pause_s
        ticket = breaker.begin(now_s)
        if is_good:
            breaker.succeed(ticket, now_s, caller)
            served[caller] = now_s
            failed.clear()
        else:
            breaker.fail(ticket, now_s, request, caller)
            failed.append(caller)
        others = [other for other, at_s in served.items() if other not in failed and now_s - at_s < 60.0]
        is_open = len(failed) >= threshold and (len(set(failed)) > 1 or not others)
        assert (breaker.state(now_s) is BreakerState.OPEN) == is_open
        if is_open:
            return


def test_with_nobody_to_ask_the_reason_and_the_wait_are_told() -> None:
    replicas = make_set(2, max_outstanding=1)
    for replica in replicas.replicas:
        ReplicaLease(replica, 0.0, 1.0)
    with pytest.raises(BackendOverloaded, match="'far' has 1 requests in flight") as full:
        make_plan(replicas).first(0.0)
    assert full.value.retry_after_s == 1.0
    broken = make_set(2)
    trip(broken.replicas[0], 0.0)
    trip(broken.replicas[1], 1.0)
    with pytest.raises(BackendUnavailable, match=r"No replica of 'far' answers; next try in 3\.0 s") as down:
        make_plan(broken).first(1.0)
    assert (type(down.value), down.value.retry_after_s) == (BackendUnavailable, 3.0)


def test_a_planned_replica_that_broke_meanwhile_is_replaced_or_its_error_told() -> None:
    replicas = make_set(2)
    plan = make_plan(replicas)
    first = plan.first(0.0)
    assert plan.claim(first, 0.0) is first.replica
    other = next(each for each in replicas.replicas if each is not first.replica)
    trip(first.replica)
    assert plan.claim(first, 0.0) is other
    trip(other)
    with pytest.raises(BackendUnavailable):
        plan.claim(first, 0.0)
    failure = BackendFailure("the last word")
    with pytest.raises(BackendFailure, match="the last word"):
        plan.after(failure, other, 0.0)
    with pytest.raises(BackendFailure, match="the last word"):
        plan.claim(first, 0.0)


@given(st.integers(0, 1000))
def test_of_replicas_that_all_failed_the_one_that_is_free_first_is_tried_again(seed: int) -> None:
    replicas = make_set(3)
    plan = make_plan(replicas, RetryConfig(max_attempts=10, base_s=0.5, max_s=3.0), seed)
    waits = {}
    step = plan.first(0.0)
    for seconds in (2.9, 1.1, 2.0):
        waits[step.replica.url] = seconds
        step = plan.after(BackendUnavailable("x", retry_after_s=seconds), step.replica, 0.0)
    assert waits[step.replica.url] == 1.1
    assert step.wait_s >= 1.1
