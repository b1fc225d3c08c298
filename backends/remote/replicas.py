"""Chooses among the servers behind one model: which takes the next request, and which is left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from backends.config import BreakerConfig
from backends.remote.breaker import Breaker, BreakerState

_FIRST_REST_S = 1.0


@dataclass(slots=True, eq=False)
class Replica:
    """Holds one server and what is known of it.

    ``work`` is in expected output tokens; ``resting_until`` on our clock. ``is_refusing`` says that it refused our key
    last time: it answers, so its breaker stays closed, but one that takes the key is asked first.
    """

    url: str
    breaker: Breaker
    num_outstanding: int = 0
    work: float = 0.0
    resting_until: float = 0.0
    is_refusing: bool = False
    num_rests: int = 0

    def can_take(self, now_s: float, max_outstanding: int) -> bool:
        """Return whether a request may go here now."""
        return (
            self.num_outstanding < max_outstanding and now_s >= self.resting_until and self.breaker.can_attempt(now_s)
        )

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until a request may go here, as far as known; 0 when only a free place is missing."""
        return max(self.breaker.wait_s(now_s), self.resting_until - now_s, 0.0)

    def rest(self, until_s: float) -> None:
        """Leave the server alone until then."""
        self.resting_until = max(self.resting_until, until_s)

    def rest_as_asked(self, now_s: float, asked_s: float, most_s: float) -> None:
        """Leave the server alone as it asked with Retry-After, but not for long on the word of one answer.

        A second at first, twice as long each time that it asks again after a rest, up to ``most_s``; what it asks while
        it rests is of the same moment.
        """
        if now_s >= self.resting_until:
            self.num_rests += 1
        # The exponent is bounded because 2.0 ** 1024 overflows.
        limit_s = min(most_s, _FIRST_REST_S * 2.0 ** min(max(0, self.num_rests - 1), 30))
        self.rest(now_s + min(asked_s, limit_s))


class ReplicaLease:
    """Holds one attempt's claim on a replica, given back on leaving the ``with`` block with whatever was learnt.

    ``request_key`` is the same for all tries of one request, ``caller`` for all requests of one. A health check may
    claim a replica whose breaker is open; success then closes it.
    """

    def __init__(
        self, replica: Replica, now_s: float, work: float, request_key: object = None, caller: str = ""
    ) -> None:
        self.replica = replica
        self._began_s = now_s
        self._request_key = request_key
        self._caller = caller
        breaker = replica.breaker
        self._ticket = breaker.begin(now_s) if breaker.can_attempt(now_s) else None
        self._is_trial = breaker.state(now_s) is not BreakerState.CLOSED
        self._work_left = work
        replica.num_outstanding += 1
        replica.work += work

    def progress(self, num_tokens: int) -> None:
        """Count tokens that have arrived: that much less work is outstanding.

        The first of them ends a half-open breaker's trial: whole answers may take minutes.
        """
        if self._is_trial:
            self.succeed()
            self._is_trial = False
        done = min(self._work_left, float(num_tokens))
        self._work_left -= done
        self.replica.work -= done

    def succeed(self) -> None:
        """Note that the server works."""
        self.replica.is_refusing = False
        self.replica.num_rests = 0
        self._reach()

    def refuse(self) -> None:
        """Note that the server works, but not for us."""
        self.replica.is_refusing = True
        self._reach()

    def _reach(self) -> None:
        if self._ticket is None:
            self.replica.breaker.reset()
        else:
            self.replica.breaker.succeed(self._ticket, self._began_s, self._caller)

    def fail(self, now_s: float) -> None:
        """Note that the server is broken."""
        if self._ticket is not None:
            self.replica.breaker.fail(self._ticket, now_s, self._request_key, self._caller)

    def __enter__(self) -> ReplicaLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.replica.num_outstanding -= 1
        self.replica.work -= self._work_left
        if self.replica.num_outstanding == 0:
            self.replica.work = 0.0  # what rounding left over
        # After succeed or fail this changes nothing.
        if self._ticket is not None:
            self.replica.breaker.abandon(self._ticket)


@dataclass(slots=True)
class ReplicaSet:
    """Holds every replica of a model.

    References
    ----------
    "Least outstanding work" is least-loaded balancing with requests weighted by expected length; with equal weights
    it is the usual least-outstanding-requests.
    """

    replicas: Sequence[Replica]
    max_outstanding: int
    _turn: int = field(default=0, init=False)

    @classmethod
    def of(cls, urls: Sequence[str], breaker: BreakerConfig, max_outstanding: int) -> ReplicaSet:
        return cls([Replica(url.rstrip("/"), Breaker(breaker)) for url in urls], max_outstanding)

    def choose(self, now_s: float, avoid: Sequence[Replica] = ()) -> Replica | None:
        """Return the replica with the least outstanding work that can take a request and is not in ``avoid``.

        Ties go round, so that idle replicas share the traffic.
        """
        # Starting one further each time is what lets ties go round.
        self._turn += 1
        count = len(self.replicas)
        best: Replica | None = None
        for step in range(count):
            replica = self.replicas[(self._turn + step) % count]
            if replica in avoid or not replica.can_take(now_s, self.max_outstanding):
                continue
            if best is None or (replica.is_refusing, replica.work) < (best.is_refusing, best.work):
                best = replica
        return best

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until some replica may take a request, as far as known."""
        return min(replica.wait_s(now_s) for replica in self.replicas)

    @property
    def num_outstanding(self) -> int:
        return sum(replica.num_outstanding for replica in self.replicas)
