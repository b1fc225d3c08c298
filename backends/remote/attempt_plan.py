"""Plans attempts: the replica to try next, after how long, or the error to give up with.

Pure: time and chance are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from backends.config import RetryConfig
from backends.errors import BackendError, BackendOverloaded, BackendRefused, BackendTimeout, BackendUnavailable
from backends.remote.replicas import Replica, ReplicaSet
from backends.remote.retry import full_jitter_s


@dataclass(frozen=True, slots=True)
class PlannedAttempt:
    """Try this replica after a wait in seconds."""

    replica: Replica
    wait_s: float = 0.0


@dataclass(slots=True, eq=False)
class AttemptPlan:
    """Holds the attempts of one request.

    A replica that was not tried yet is tried at once; one that failed already is tried again after a wait with full
    jitter, or after its Retry-After when that is longer. A Retry-After past ``RetryConfig.max_s`` ends the attempts:
    the caller decides better what to do with so long a time. A server that let the first token's time pass is not asked
    again, since it may still be computing the answer nobody waits for; one that refuses our key is not either.
    """

    replicas: ReplicaSet
    config: RetryConfig
    rng: Random
    model: str
    max_rest_s: float = 60.0
    tried: list[Replica] = field(default_factory=list)
    silent: list[Replica] = field(default_factory=list)
    asked_until: dict[Replica, float] = field(default_factory=dict)
    num_failed: int = 0
    last_error: BackendError | None = None

    def first(self, now_s: float) -> PlannedAttempt:
        """Return the first replica to try.

        Raises
        ------
        BackendOverloaded : every replica that works is full
        BackendUnavailable : no replica works, as far as known
        """
        replica = self.replicas.choose(now_s)
        if replica is None:
            raise self._nobody(now_s)
        return PlannedAttempt(replica)

    def after(self, error: BackendError, replica: Replica, now_s: float) -> PlannedAttempt:
        """Return what to try after ``error``, or raise it."""
        self.num_failed += 1
        self.last_error = error
        self.tried.append(replica)
        # It may still be at work on the answer: asking again would pay for it twice.
        if isinstance(error, BackendTimeout | BackendRefused):
            self.silent.append(replica)
        retry_after_s = error.retry_after_s if isinstance(error, BackendUnavailable) else None
        if retry_after_s is not None:
            # The request itself waits as long as it was told; others are held up no longer than they must be.
            self.asked_until[replica] = now_s + retry_after_s
            replica.rest_as_asked(now_s, retry_after_s, self.max_rest_s)
        if not error.retryable or self.num_failed >= self.config.max_attempts:
            raise error
        fresh = self.replicas.choose(now_s, avoid=self.tried)
        if fresh is not None:
            return PlannedAttempt(fresh)
        return self._again(error, now_s)

    def claim(self, planned: PlannedAttempt, now_s: float) -> Replica:
        """Return the planned replica once its wait is over, or another if things have changed meanwhile."""
        if planned.replica.can_take(now_s, self.replicas.max_outstanding):
            return planned.replica
        replica = self.replicas.choose(now_s, avoid=self.silent)
        if replica is None:
            raise self.last_error or self._nobody(now_s)
        return replica

    def _again(self, error: BackendError, now_s: float) -> PlannedAttempt:
        # Drawn once, so that replicas are compared by what they ask for and not by luck.
        jitter_s = full_jitter_s(self.num_failed, self.config, self.rng)
        waits = {
            index: max(jitter_s, each.wait_s(now_s), self.asked_until.get(each, now_s) - now_s)
            for index, each in enumerate(self.replicas.replicas)
            if each not in self.silent and each.num_outstanding < self.replicas.max_outstanding
        }
        if not waits:
            raise error
        index = min(waits, key=lambda each: (waits[each], self.replicas.replicas[each].work))
        if waits[index] > self.config.max_s:
            raise error
        return PlannedAttempt(self.replicas.replicas[index], waits[index])

    def _nobody(self, now_s: float) -> BackendUnavailable:
        wait_s = self.replicas.wait_s(now_s)
        if wait_s == 0.0:
            return BackendOverloaded(
                f"Every replica of {self.model!r} has {self.replicas.max_outstanding} requests in flight.",
                retry_after_s=1.0,
            )
        return BackendUnavailable(
            f"No replica of {self.model!r} answers; next try in {wait_s:.1f} s.", retry_after_s=wait_s
        )
