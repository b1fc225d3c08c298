"""The store: the decision log, API keys, sessions and policy versions, in SQLite or PostgreSQL."""

from __future__ import annotations

import asyncio
import secrets as random_secrets
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import Select, delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.exc import SQLAlchemyError

from gateway.config.store_section import StoreConfig
from gateway.store.committer import GroupCommitter
from gateway.store.engines import make_engine, prepare_sqlite_file, truncate_wal, use_wal
from gateway.store.errors import RecordRejected, StoreClosed
from gateway.store.installation_secret import InstallationSecret
from gateway.store.migrate import ensure_schema
from gateway.store.records import (
    ApiKey,
    PolicyVersion,
    RequestRecord,
    ResponseRecord,
    SessionRecord,
    StepRecord,
    VerificationJob,
)
from gateway.store.rows import (
    clean_text,
    decode_key,
    decode_policy_version,
    decode_record,
    decode_session,
    decode_step,
    encode_record,
)
from gateway.store.server_lock import ServerLock
from gateway.store.sinks import BatchSink, PostgresSink, SqliteSink
from gateway.store.tables import (
    api_keys,
    configs,
    policy_versions,
    request_texts,
    requests,
    secrets,
    sessions,
    verifications,
)
from gateway.store.translate import RowFault, translate
from gateway.store.urls import Dialect, parse_database_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sqlalchemy.ext.asyncio import AsyncConnection

_DIGEST_KEY = "digest_key"
# ``last_used_at`` of a key is this coarse: one update a minute a key, not one a request.
_KEY_USE_EVERY = timedelta(minutes=1)
_REPORT_CONNECTIONS = 2


class Store:
    """One open database. Use as ``async with Store(config) as store`` or ``open`` and ``close``.

    Every method raises :class:`StoreUnavailable` (or its kinds) when the database does not answer; none needs to be
    called again to recover, the next call finds the database back.

    Attributes
    ----------
    num_forgotten : texts that this process deleted one by one since it opened; the file is to be scrubbed of them
    """

    def __init__(self, config: StoreConfig) -> None:
        self._config = config
        self._url = parse_database_url(config.url)
        self._engine = make_engine(self._url, config)
        # For reports, which may take longer than what a request waits for, and must not take its connections.
        self._reports = make_engine(
            self._url, replace(config, write_timeout_s=config.report_timeout_s, pool_size=_REPORT_CONNECTIONS)
        )
        self._sink: BatchSink = (
            SqliteSink(self._url, config) if self._url.dialect == "sqlite" else PostgresSink(self._url, config)
        )
        self.committer = GroupCommitter(
            self._sink,
            shown=self._url.shown,
            max_pending=config.max_pending_records,
            max_batch=config.max_batch_records,
        )
        self._lock: ServerLock | None = None
        self._secret: InstallationSecret | None = None
        self._key_used_at: dict[str, datetime] = {}
        self._is_open = False
        self.num_forgotten = 0

    @property
    def dialect(self) -> Dialect:
        """Return which of the two databases it is."""
        return self._url.dialect

    @property
    def shown_url(self) -> str:
        """The database's URL without its password."""
        return self._url.shown

    async def open(self, *, as_server: bool = False) -> Self:
        """Connect, bring the schema up to date, start the writer.

        Parameters
        ----------
        as_server : it answers requests by this database; of a SQLite file only one process may

        Raises
        ------
        StoreUnavailable : the database is down, or its file's place cannot be written
        DatabaseInUse : another server has the SQLite file
        SchemaMismatch : see :func:`gateway.store.migrate.ensure_schema`
        """
        if self._url.dialect == "sqlite":
            prepare_sqlite_file(self._url)
            if as_server:
                self._take_lock()
            await use_wal(self._engine, self._url)
        await ensure_schema(self._engine, self._url, migrate=self._config.migrate)
        self._secret = InstallationSecret(await self._load_digest_key())
        self.committer.start()
        self._is_open = True
        return self

    async def close(self) -> None:
        """Commit what waits, then close every connection. Idempotent."""
        if self._is_open:
            self._is_open = False
            await self.committer.close(self._config.connect_timeout_s + self._config.write_timeout_s)
        await self._sink.close()
        await self._engine.dispose()
        await self._reports.dispose()
        if self._lock is not None:
            self._lock.release()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """A transaction on a pooled connection, for what lives in tables of its own; foreign exceptions are translated.

        Raises
        ------
        StoreUnavailable and its kinds
        RowFault : the values are at fault; to be caught where that can be
        """
        try:
            async with self._engine.begin() as connection:
                yield connection
        except (SQLAlchemyError, OSError, TimeoutError) as error:
            raise translate(error, self.shown_url) from error

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A transaction for reports: on connections of their own, with ``database.report_timeout_s``.

        Raises
        ------
        StoreUnavailable and its kinds
        """
        try:
            async with asyncio.timeout(self._config.report_timeout_s), self._reports.begin() as connection:
                yield connection
        except (SQLAlchemyError, OSError, TimeoutError) as error:
            raise translate(error, self.shown_url) from error

    async def __aenter__(self) -> Self:
        try:
            return await self.open()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- the log

    async def record(
        self, record: RequestRecord, job: VerificationJob | None = None, response: ResponseRecord | None = None
    ) -> None:
        """Return once the row is committed: only then may the last byte of the answer leave.

        The row's session, its key's last use, the job to check its answer and the response that is kept are committed
        with it, or not at all.

        Raises
        ------
        StoreUnavailable and its kinds, RecordRejected
        """
        if not self._is_open:
            raise StoreClosed(f"{self.shown_url} is not open.", database=self.shown_url)
        try:
            is_first_use = self._is_first_use_this_minute(record)
            entry = encode_record(record, self._sink.encode_time, note_key_use=is_first_use, job=job, response=response)
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise RecordRejected(record.request_id, f"{type(error).__name__}: {error}") from error
        await self.committer.commit(entry)

    @property
    def secret(self) -> InstallationSecret:
        """The installation's own."""
        assert self._secret is not None, "open() first"
        return self._secret

    def digest(self, content: str) -> str:
        """HMAC-SHA256 (hex) of a text under this installation's own key: equal texts match, but none can be guessed."""
        return self.secret.digest(content)

    async def get_request(self, request_id: str) -> RequestRecord | None:
        rows = await self._rows(select_records().where(requests.c.request_id == clean_text(request_id)))
        return decode_record(rows[0]) if rows else None

    async def recent(
        self, *, limit: int = 50, key_id: str | None = None, tenant: str | None = None, before_id: str | None = None
    ) -> list[RequestRecord]:
        """The newest rows first; ``before_id`` is the last id of the page before."""
        statement = select_records().order_by(requests.c.request_id.desc()).limit(limit)
        if key_id is not None:
            statement = statement.where(requests.c.key_id == key_id)
        if tenant is not None:
            statement = statement.where(requests.c.tenant == tenant)
        if before_id is not None:
            statement = statement.where(requests.c.request_id < clean_text(before_id))
        return [decode_record(row) for row in await self._rows(statement)]

    # ---- keys

    async def insert_key(self, key: ApiKey) -> None:
        await self._insert(api_keys, _values(key))

    async def find_key(self, key_hash: str) -> ApiKey | None:
        """The key with this SHA-256 (hex), revoked or not."""
        rows = await self._rows(select(api_keys).where(api_keys.c.key_hash == key_hash))
        return decode_key(rows[0]) if rows else None

    async def list_key_hashes(self, limit: int) -> frozenset[str] | None:
        """The SHA-256 (hex) of every key, revoked ones included; None if there are more than ``limit``."""
        rows = await self._rows(select(api_keys.c.key_hash).limit(limit + 1))
        return None if len(rows) > limit else frozenset(row["key_hash"] for row in rows)

    async def list_keys(self) -> list[ApiKey]:
        """Oldest first, revoked ones included."""
        return [decode_key(row) for row in await self._rows(select(api_keys).order_by(api_keys.c.created_at))]

    async def count_active_keys(self) -> int:
        column, now = api_keys.c, datetime.now(UTC)
        is_good = column.revoked_at.is_(None) & (column.expires_at.is_(None) | (column.expires_at > now))
        rows = await self._rows(select(func.count().label("n")).where(is_good))
        return int(rows[0]["n"])

    async def revoke_key(self, key_id: str, revoked_at: datetime) -> bool:
        """False when there is no such key, or it was revoked before."""
        is_active = (api_keys.c.key_id == key_id) & api_keys.c.revoked_at.is_(None)
        return await self._change(update(api_keys).where(is_active).values(revoked_at=revoked_at)) > 0

    async def rotate_key(self, key_id: str, key_hash: str, prefix: str) -> bool:
        """Give a key another secret. False when there is no such key, or it was revoked."""
        is_active = (api_keys.c.key_id == key_id) & api_keys.c.revoked_at.is_(None)
        return await self._change(update(api_keys).where(is_active).values(key_hash=key_hash, prefix=prefix)) > 0

    async def delete_key(self, key_id: str) -> None:
        """Take a key away that was never used; others are revoked, so that the log's rows keep their key."""
        await self._change(delete(api_keys).where(api_keys.c.key_id == key_id))

    # ---- sessions

    async def get_session(self, tenant: str, session_id: str, since: datetime | None = None) -> SessionRecord | None:
        """Written by ``record``; the newest answered request of the conversation, since a moment."""
        wanted = (sessions.c.tenant == clean_text(tenant)) & (sessions.c.session_id == clean_text(session_id))
        if since is not None:
            wanted &= sessions.c.updated_at >= since
        rows = await self._rows(select(sessions).where(wanted))
        return decode_session(rows[0]) if rows else None

    async def find_step(self, call_digest: str, since: datetime) -> StepRecord | None:
        """The newest answer since a moment whose calls have this digest, with what its turn was drawn for."""
        step, decided, check = requests.alias(), requests.alias(), verifications.c
        turn_id = func.coalesce(step.c.turn_id, step.c.request_id)
        joined = step.join(decided, decided.c.request_id == turn_id, isouter=True).join(
            verifications, check.request_id == turn_id, isouter=True
        )
        columns = (step.c.prompt_tokens, step.c.completion_tokens, step.c.turn, step.c.step, decided.c.confidence)
        drawn = (check.direction, check.against_tier, check.inclusion_probability, check.stratum)
        wanted = (step.c.call_digest == call_digest) & (step.c.created_at >= since)
        rows = await self._rows(
            select(
                step.c.final_tier.label("tier"),
                turn_id.label("turn_id"),
                *columns,
                decided.c.verify_probability.label("probability"),
                *drawn,
            )
            .select_from(joined)
            .where(wanted, step.c.final_tier.is_not(None))
            .order_by(step.c.request_id.desc())
            .limit(1)
        )
        return decode_step(rows[0]) if rows else None

    # ---- policies and configurations

    async def get_policy_version(self, name: str, version: str) -> PolicyVersion | None:
        wanted = (policy_versions.c.name == name) & (policy_versions.c.version == version)
        rows = await self._rows(select(policy_versions).where(wanted))
        return decode_policy_version(rows[0]) if rows else None

    async def list_policy_versions(self, name: str) -> list[PolicyVersion]:
        """Newest first."""
        wanted = select(policy_versions).where(policy_versions.c.name == name)
        rows = await self._rows(wanted.order_by(policy_versions.c.created_at.desc()))
        return [decode_policy_version(row) for row in rows]

    async def put_config(self, config_hash: str, body: Mapping[str, Any], created_at: datetime) -> None:
        """Keep what a ``config_hash`` stands for. ``body`` must hold no secrets. Idempotent."""
        await self._insert(
            configs, {"config_hash": config_hash, "body": dict(body), "created_at": created_at}, ignore_existing=True
        )

    # ---- health

    async def ping(self) -> None:
        """One round trip to the database.

        Raises
        ------
        StoreUnavailable
        """
        await self._rows(text("SELECT 1 AS one"))

    async def scrub(self) -> bool:
        """Make what was deleted unreadable in the files of SQLite, beside other users of them.

        Pages are overwritten when their rows are deleted; this empties the write-ahead log, which holds them as they
        were. False where others were in the way; the next call may do it. PostgreSQL overwrites with its own vacuum.

        Raises
        ------
        StoreUnavailable and its kinds
        """
        return self._url.dialect != "sqlite" or await truncate_wal(self._engine, self._url)

    # ---- inside

    def _take_lock(self) -> None:
        assert self._url.path is not None
        self._lock = ServerLock(self._url.path, self.shown_url)
        try:
            self._lock.take()
        except OSError as error:
            raise translate(error, self.shown_url) from error

    def _is_first_use_this_minute(self, record: RequestRecord) -> bool:
        if record.key_id is None:
            return False
        last = self._key_used_at.get(record.key_id)
        if last is not None and record.created_at - last < _KEY_USE_EVERY:
            return False
        self._key_used_at[record.key_id] = record.created_at
        return True

    async def _load_digest_key(self) -> bytes:
        await self._insert(
            secrets,
            {"name": _DIGEST_KEY, "value": random_secrets.token_hex(32), "created_at": datetime.now(UTC)},
            ignore_existing=True,
        )
        rows = await self._rows(select(secrets.c.value).where(secrets.c.name == _DIGEST_KEY))
        return bytes.fromhex(rows[0]["value"])

    async def _rows(self, statement: Any) -> list[Mapping[str, Any]]:
        async with self.transaction() as connection:
            return [dict(row) for row in (await connection.execute(statement)).mappings()]

    async def _change(self, statement: Any, values: dict[str, Any] | None = None) -> int:
        async with self.transaction() as connection:
            return int((await connection.execute(statement, values)).rowcount)

    async def _insert(self, table: Any, values: dict[str, Any], *, ignore_existing: bool = False) -> None:
        insert = sqlite_insert(table) if self._url.dialect == "sqlite" else postgres_insert(table)
        try:
            await self._change(insert.on_conflict_do_nothing() if ignore_existing else insert, values)
        except RowFault as fault:
            raise RecordRejected(str(next(iter(values.values()))), str(fault)) from fault


def select_records() -> Select[Any]:
    """Rows of the log with their texts, as :func:`gateway.store.rows.decode_record` takes them."""
    joined = requests.outerjoin(request_texts, requests.c.request_id == request_texts.c.request_id)
    return select(*requests.c, request_texts.c.prompt, request_texts.c.answer).select_from(joined)


def _values(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}
