"""Collects what the audit log says of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gateway.ids import uuid7
from gateway.store.control_records import AuditEntry
from gateway.store.rows import clean_text

_MAX_SUBJECT_CHARS = 512


@dataclass(slots=True)
class AuditTrail:
    """Gathers what the audit log will say of a change, or of a reading of texts.

    ``status`` is that of a success. ``is_written`` is set once a change carries its entry in its own transaction,
    ``shows_texts`` where the answer holds prompts, answers or comments, whose reading is written down as well.
    """

    action: str
    subject: str
    status: int
    remote: str
    key_id: str | None = None
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    is_written: bool = False
    shows_texts: bool = False

    def entry(self, status: int) -> AuditEntry:
        """Return the row of the audit log."""
        return AuditEntry(
            audit_id=uuid7(),
            created_at=datetime.now(UTC),
            action=self.action,
            # A path may hold anything, and may be as long as a head.
            subject=clean_text(self.subject)[:_MAX_SUBJECT_CHARS],
            key_id=self.key_id,
            before=self.before,
            after=self.after,
            status=status,
            remote=self.remote,
        )

    def carried(self, subject: str, before: Any, after: Any) -> AuditEntry:
        """Return the row that a change writes in its own transaction."""
        self.subject, self.before, self.after = subject, before, after
        self.is_written = True
        return self.entry(self.status)
