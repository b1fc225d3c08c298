"""OpenAI's ``x-ratelimit-*`` headers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime

from gateway.access.rate_windows import Want

Headers = list[tuple[bytes, bytes]]


def rate_headers(wants: Sequence[Want], spent: Sequence[int], now: datetime) -> Headers:
    """Limit, what is left of it, and when it is whole again, for each meter of the minute."""
    found: Headers = []
    for want, so_far in zip(wants, spent, strict=True):
        name = want.account.meter.value.encode()
        left_s = math.ceil((want.account.ends_at - now).total_seconds())
        found.append((b"x-ratelimit-limit-" + name, b"%d" % want.limit))
        found.append((b"x-ratelimit-remaining-" + name, b"%d" % max(0, want.limit - so_far)))
        found.append((b"x-ratelimit-reset-" + name, b"%ds" % max(0, left_s)))
    return found
