"""Breaks the circuit to a failing server, as a pure state machine: time is an argument, nothing is awaited.

::

    CLOSED ──threshold requests failed in a row──► OPEN ──open_s passed──► HALF_OPEN
       ▲                                      ▲                        │
       │                                      └─────── probe fails ────┤  (the wait doubles, up to max_open_s)
       └───────────────────────────────────────────── probe succeeds ──┘

Every attempt takes a ticket and gives it back with its result. A ticket from before the last change of state is stale:
its result says nothing about the replica now, so it changes nothing.

Failures of one caller alone do not open it while another was served in the last minute: whoever can make a server fail
by a prompt would otherwise close it to everyone. The next failure of a second caller does.
"""

from __future__ import annotations

from enum import StrEnum

from backends.config import BreakerConfig

# For so long a served caller speaks for the server against the failures of another.
_WITNESS_S = 60.0


class BreakerState(StrEnum):
    """Says whether a replica takes requests."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Decide whether a replica may be tried, and learn from the results.

    Times are seconds on any clock that does not go backwards.
    """

    def __init__(self, config: BreakerConfig | None = None) -> None:
        self._config = config or BreakerConfig()
        self._is_tripped = False
        self._num_failures = 0
        # At most as many as the threshold.
        self._failed_keys: set[object] = set()
        self._failed_callers: set[str] = set()
        # The last two callers that were served -> when: of any caller, one of them is another.
        self._served: dict[str, float] = {}
        self._num_trips = 0
        self._open_until = 0.0
        self._probe: int | None = None
        self._epoch = 0

    def state(self, now_s: float) -> BreakerState:
        """Return the state at ``now_s``."""
        if not self._is_tripped:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._open_until else BreakerState.HALF_OPEN

    def can_attempt(self, now_s: float) -> bool:
        """Return whether an attempt may begin: always when closed, one at a time when half open."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._probe is None)

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until an attempt may begin, as far as known now."""
        return 0.0 if self.can_attempt(now_s) else max(0.0, self._open_until - now_s)

    def begin(self, now_s: float) -> int:
        """Begin an attempt and return its ticket."""
        assert self.can_attempt(now_s), "ask can_attempt first"
        if self._is_tripped:
            self._epoch += 1
            self._probe = self._epoch
        return self._epoch

    def succeed(self, ticket: int, now_s: float = 0.0, caller: str = "") -> None:
        """Note that an attempt reached a working server."""
        # A success that began before the trip says nothing about the server now.
        if ticket != self._epoch:
            return
        self.reset()
        self._served.pop(caller, None)
        self._served[caller] = now_s
        while len(self._served) > 2:
            del self._served[next(iter(self._served))]

    def fail(self, ticket: int, now_s: float, request_key: object = None, caller: str = "") -> None:
        """Note that an attempt found the server broken.

        Attempts with the same ``request_key`` count once: a request that makes a server fail must not close it to the
        others by its own retries.
        """
        if ticket != self._epoch:
            return
        if self._probe == ticket:
            self._trip(now_s)
            return
        if request_key is not None and request_key in self._failed_keys:
            return
        if self._num_failures < self._config.failure_threshold:
            self._failed_keys.add(request_key)
            self._num_failures += 1
        self._failed_callers.add(caller)
        if self._num_failures >= self._config.failure_threshold and not self._is_one_callers_fault(now_s):
            self._trip(now_s)

    def _is_one_callers_fault(self, now_s: float) -> bool:
        return len(self._failed_callers) == 1 and any(
            caller not in self._failed_callers and now_s - at_s < _WITNESS_S for caller, at_s in self._served.items()
        )

    def abandon(self, ticket: int) -> None:
        """Note that an attempt ended without telling anything: it was cancelled, or the request itself was at fault."""
        if self._probe == ticket:
            self._probe = None

    def reset(self) -> None:
        """Close: the replica is known to work."""
        if self._is_tripped:
            self._epoch += 1
        self._is_tripped = False
        self._num_failures = 0
        self._failed_keys.clear()
        self._failed_callers.clear()
        self._num_trips = 0
        self._probe = None

    def _trip(self, now_s: float) -> None:
        # The exponent is bounded because 2.0 ** 1024 overflows; the cap holds long before.
        wait_s = min(self._config.open_s * 2.0 ** min(self._num_trips, 30), self._config.max_open_s)
        self._open_until = now_s + wait_s
        self._is_tripped = True
        self._num_trips += 1
        self._num_failures = 0
        self._failed_keys.clear()
        self._failed_callers.clear()
        self._probe = None
        self._epoch += 1
