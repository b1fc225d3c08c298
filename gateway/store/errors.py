"""Everything the store can raise.

::

    StoreError
    ├── StoreUnavailable       the database does not answer                (the caller may come back)
    │   ├── StoreFull          no space left where the database writes
    │   ├── StoreOverloaded    more rows wait for their commit than allowed
    │   └── StoreClosed        the service is stopping
    ├── RecordRejected         this one row cannot be stored; its neighbours were
    ├── FeedbackFull           as much is reported about a request as is kept
    ├── StoreUrlInvalid        the database URL cannot be used              (at start)
    ├── DatabaseInUse          another server has the SQLite file           (at start)
    └── SchemaMismatch         the database is older or newer than the code (at start)
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of the tree; ``retryable`` says whether the same call may succeed later."""

    retryable: bool = False


class StoreUnavailable(StoreError):
    """``database`` is the URL without its password."""

    retryable = True

    def __init__(self, message: str, *, database: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.database = database
        self.retry_after_s = retry_after_s


class StoreFull(StoreUnavailable):
    pass


class StoreOverloaded(StoreUnavailable):
    pass


class StoreClosed(StoreUnavailable):
    pass


class RecordRejected(StoreError):
    def __init__(self, request_id: str, problem: str) -> None:
        super().__init__(f"The row of request {request_id!r} was refused by the database: {problem}")
        self.request_id = request_id
        self.problem = problem


class FeedbackFull(StoreError):
    def __init__(self, request_id: str, max_reports: int, max_chars: int) -> None:
        super().__init__(
            f"About request {request_id} no more is kept: at most {max_reports} reports, and {max_chars} characters "
            "of their texts together. What was reported before stays as it is."
        )
        self.request_id = request_id


class StoreUrlInvalid(StoreError):
    pass


class DatabaseInUse(StoreError):
    """``holder`` is the process that has it, as text; empty where it is not known."""

    def __init__(self, database: str, holder: str) -> None:
        whose = f" (process {holder})" if holder else ""
        super().__init__(
            f"{database} is served by another server{whose}. Stop that one, name another file in database.url, or use "
            "PostgreSQL for several servers."
        )
        self.database = database
        self.holder = holder


class SchemaMismatch(StoreError):
    def __init__(self, database: str, found: str | None, expected: str, remedy: str) -> None:
        super().__init__(f"{database} is at schema revision {found or 'none'}, this version needs {expected}. {remedy}")
        self.database = database
        self.found = found
        self.expected = expected
