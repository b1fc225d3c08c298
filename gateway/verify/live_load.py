"""Watches live traffic: whether a check may begin, and whether one under way must let it pass."""

from __future__ import annotations

from collections.abc import Iterable

from backends.protocol import Backend
from gateway.access.admission import Admission


class LiveLoad:
    """Reads the queue before the gateway and the queues of the engines.

    Parameters
    ----------
    admission : the gateway's own places; None in a worker without a gateway
    backends : every served model
    max_live : no check begins beside more live requests than this
    """

    def __init__(self, admission: Admission | None, backends: Iterable[Backend], max_live: int) -> None:
        self._admission = admission
        self._backends = tuple(backends)
        self._max_live = max_live
        self.num_checks = 0

    def must_yield(self) -> bool:
        """Return whether somebody waits for what a check would use."""
        if self._admission is not None and (self._admission.num_waiting or self._admission.is_draining):
            return True
        # A check that waits in an engine is background work itself and stands behind the others.
        return any(backend.load().waiting > self.num_checks for backend in self._backends)

    def may_begin(self, *, is_overdue: bool) -> bool:
        """Return whether a check may begin now; an overdue one does not mind company, only a queue."""
        if self.must_yield():
            return False
        num_live = self._admission.num_running if self._admission is not None else 0
        return is_overdue or num_live <= self._max_live
