"""Reads when a key expires, as it is written on the command line."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from gateway.failure_report import USAGE_STATUS, CommandError

_UNITS = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}


def moment_of(written: str, now: datetime) -> datetime:
    """Return the moment that ``30d``, ``12h``, ``2030-01-31`` or an RFC 3339 time stands for; without a zone in UTC.

    Raises
    ------
    CommandError
        It is none, or not to come.
    """
    span = re.fullmatch(r"([0-9]{1,6})([mhdw])", written)
    try:
        moment = now + int(span[1]) * _UNITS[span[2]] if span else datetime.fromisoformat(written)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        is_future = moment.astimezone(UTC) > now
    except (ValueError, OverflowError):
        is_future = False
    if not is_future:
        expected = "a time to come: 90d, 12h, 30m, 2w, a date or a moment such as 2030-01-31T12:00:00Z"
        raise CommandError(f"--expires is {written[:40]!r}; expected {expected}.", status=USAGE_STATUS)
    return moment
