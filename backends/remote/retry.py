"""Computes how long to wait before trying again."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import isfinite
from random import Random

from backends.config import RetryConfig


def full_jitter_s(num_failed: int, config: RetryConfig, rng: Random) -> float:
    """Draw a wait in seconds, uniform up to a cap that doubles with each failed attempt.

    References
    ----------
    Brooker 2015, "Exponential Backoff and Jitter", AWS Architecture Blog, "Full Jitter".
    """
    assert num_failed >= 1
    # The exponent is bounded because 2.0 ** 1024 overflows; the cap holds long before.
    cap_s = min(config.max_s, config.base_s * 2.0 ** min(num_failed - 1, 30))
    return rng.uniform(0.0, cap_s)


def parse_retry_after_s(value: str | None, now: datetime | None = None) -> float | None:
    """Read a Retry-After header (RFC 9110 §10.2.3: seconds or a date), None when absent or unreadable."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        return _seconds_until(value, now or datetime.now(UTC))
    return seconds if isfinite(seconds) and seconds >= 0 else None


def _seconds_until(value: str, now: datetime) -> float | None:
    try:
        moment = parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - now).total_seconds())
