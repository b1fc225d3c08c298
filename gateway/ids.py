"""Request ids: uuidv7, so rows sort by the time they were accepted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime


def uuid7(*, time_ns: Callable[[], int] = time.time_ns, random_bytes: Callable[[int], bytes] = os.urandom) -> str:
    """A fresh uuidv7 in its usual 36 characters: 48 bits of milliseconds, 12 bits of their fraction, 62 random bits.

    References
    ----------
    RFC 9562, section 5.7; the fraction is section 6.2, method 3, so ids made within a millisecond still sort by time.
    """
    milliseconds, rest_ns = divmod(time_ns(), 1_000_000)
    fraction = (rest_ns << 12) // 1_000_000
    random = int.from_bytes(random_bytes(8), "big") & 0x3FFF_FFFF_FFFF_FFFF
    value = (milliseconds & 0xFFFF_FFFF_FFFF) << 80 | 7 << 76 | fraction << 64 | 2 << 62 | random
    digits = f"{value:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def time_of(request_id: str) -> datetime:
    """When an id was made, to the millisecond."""
    return datetime.fromtimestamp(int(request_id[:8] + request_id[9:13], 16) / 1000, UTC)


def first_at(moment: datetime) -> str:
    """Return what sorts before every id made from a moment on, and after every one made before."""
    digits = f"{int(moment.timestamp() * 1000):012x}"
    return f"{digits[:8]}-{digits[8:]}"


def is_uuid(text: str) -> bool:
    """Whether ``text`` has the shape of a uuid in lower-case hex, so that anything else never reaches the database."""
    return len(text) == 36 and all(
        char == "-" if place in (8, 13, 18, 23) else char in "0123456789abcdef" for place, char in enumerate(text)
    )


# The body of an answer shows its request's id behind one of these.
_SHOWN_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")


def bare_id(shown: str) -> str:
    """Return the request's id in what a body, or a header, shows as the id of an answer."""
    for prefix in _SHOWN_PREFIXES:
        if shown.startswith(prefix):
            return shown[len(prefix) :]
    return shown
