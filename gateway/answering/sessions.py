"""Remembers which tier served a conversation last; reads it back from the log after a restart."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from gateway.store.records import RequestRecord, SessionRecord
from policies.types import SessionState

_MAX_REMEMBERED = 10_000


class SessionFinder(Protocol):
    """The part of the store that is needed here."""

    async def get_session(self, tenant: str, session_id: str) -> SessionRecord | None: ...


class Sessions:
    """A bounded memory before the store; the store itself is written with each request's row."""

    def __init__(self, finder: SessionFinder) -> None:
        self._finder = finder
        self._remembered: OrderedDict[tuple[str, str], SessionState | None] = OrderedDict()

    async def get(self, tenant: str, session_id: str | None) -> SessionState | None:
        """Return where a conversation stands; None when it is new or not named."""
        if session_id is None:
            return None
        key = (tenant, session_id)
        if key not in self._remembered:
            found = await self._finder.get_session(tenant, session_id)
            self._keep(key, SessionState(found.tier, found.cached_tokens) if found is not None else None)
        return self._remembered[key]

    def note(self, record: RequestRecord) -> None:
        """A committed request moved its conversation."""
        if record.session_id is not None and record.final_tier is not None and record.error_code is None:
            cached_tokens = record.prompt_tokens + record.completion_tokens
            self._keep((record.tenant, record.session_id), SessionState(record.final_tier, cached_tokens))

    def _keep(self, key: tuple[str, str], state: SessionState | None) -> None:
        self._remembered[key] = state
        self._remembered.move_to_end(key)
        while len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)
