"""Time that passes when it is told to."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class SimulatedClock:
    """Begins now and runs ahead; calling it gives the present moment, aware."""

    def __init__(self) -> None:
        self._moment = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self._moment

    def time_ns(self) -> int:
        """As :func:`time.time_ns`, for ids that sort by time."""
        return int(self._moment.timestamp() * 1e9)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._moment += timedelta(seconds=seconds)
