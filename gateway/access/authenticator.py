"""Authenticates callers by the hash of their API keys, remembered for a moment; open only where nobody else reaches."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Protocol
from urllib.parse import urlsplit

from gateway.access.key_limits import NO_LIMITS, KeyLimits, stored_limits
from gateway.access.key_permissions import stored_permissions
from gateway.access.local_request import Connection, foreign_host, foreign_sign, is_loopback
from gateway.config.sections import AuthConfig, ServerConfig
from gateway.errors import KeyWanted, OriginRefused, Unauthenticated, WrongScope
from gateway.store.records import ApiKey
from policies.types import EVERYTHING, Permissions

KEY_PREFIX = "sk-suffice-"
# The part of a key that is kept for people to recognise it by: 30 of its 256 bits.
_SHOWN_CHARS = len(KEY_PREFIX) + 5
_MAX_KEY_CHARS = 256
_MAX_REMEMBERED = 4096
# Keys that were refused are remembered apart and shortly, so that a client that goes on asking costs no look-up each.
_MAX_REFUSED, _REFUSED_S = 4096, 1.0
# From so many unknown keys a second on, the hashes of all keys are read instead, once a second.
_FLOOD_PER_S, _MAX_LISTED = 20, 20_000
_KEY_FORM = re.compile(re.escape(KEY_PREFIX) + r"[A-Za-z0-9_-]{20,}")

USE, ADMIN, ADMIN_READ = "use", "admin", "admin-read"
SCOPES = (USE, ADMIN, ADMIN_READ)


_UNKNOWN_KEY = "The API key is not valid. 'suffice keys list' shows those that are."


class KeyFinder(Protocol):
    """The part of the store that is needed here."""

    async def find_key(self, key_hash: str) -> ApiKey | None: ...

    async def list_key_hashes(self, limit: int) -> frozenset[str] | None: ...


@dataclass(frozen=True, slots=True)
class Caller:
    """Names the tenant and key of a request; ``key_id`` is None on an open server."""

    tenant: str = "default"
    key_id: str | None = None
    limits: KeyLimits = NO_LIMITS
    scope: str = USE
    permissions: Permissions = EVERYTHING

    @property
    def is_limited(self) -> bool:
        """Whether anything bounds what the key may use."""
        return self.limits is not NO_LIMITS and self.limits != NO_LIMITS


ANONYMOUS = Caller()


def make_key() -> str:
    """A new key with 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """SHA-256 (hex). A fast hash is right for keys of 256 random bits: there is no dictionary to try."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def shown_prefix(key: str) -> str:
    """The beginning by which people recognise a key."""
    return key[:_SHOWN_CHARS]


OpenTo = Literal["nobody", "local", "everybody"]
"""Who needs no key: nobody; requests straight from a program on this machine; whoever can connect."""


def open_to(auth: AuthConfig, server: ServerConfig) -> OpenTo:
    """Return who needs no key. A proxy that is trusted to name the caller is a way in from elsewhere."""
    if auth.required == "never":
        return "everybody"
    is_local = is_loopback(server.host) and not server.trusted_proxies
    return "local" if auth.required == "auto" and is_local else "nobody"


class _KeyLookup:
    """Finds keys in the store. A flood of unknown ones, each another, costs a read a second instead of one each.

    A key made by another server meanwhile is then seen a second later.
    """

    def __init__(self, keys: KeyFinder) -> None:
        self._keys = keys
        self._second = -1
        self._num_unknown, self._num_before = 0, 0
        self._num_asked = 0  # and not answered yet: they may all be unknown
        self._listing: asyncio.Task[frozenset[str] | None] | None = None

    async def find(self, key_hash: str, now_s: float) -> ApiKey | None:
        self._turn(int(now_s))
        found = None
        is_calm = max(self._num_unknown, self._num_before) + self._num_asked < _FLOOD_PER_S
        if is_calm or await self._is_listed(key_hash):
            self._num_asked += 1
            try:
                found = await self._keys.find_key(key_hash)
            finally:
                self._num_asked -= 1
        self._num_unknown += found is None
        return found

    def forget(self) -> None:
        """Drop what is known of all keys: one was made or changed."""
        self._listing = None

    def _turn(self, second: int) -> None:
        if second != self._second:
            self._num_before = self._num_unknown if second == self._second + 1 else 0
            self._second, self._num_unknown, self._listing = second, 0, None

    async def _is_listed(self, key_hash: str) -> bool:
        """Whether a key may be in the store; also true when there are too many to list."""
        if self._listing is None:
            self._listing = asyncio.ensure_future(self._keys.list_key_hashes(_MAX_LISTED))
        # Shielded: a caller that leaves takes the reading from nobody.
        hashes = await asyncio.shield(self._listing)
        return hashes is None or key_hash in hashes


class Authenticator:
    """Turns an ``Authorization`` header into a :class:`Caller`.

    An open server takes requests without a key and with any word that is not one of its own keys (clients insist on
    sending something); a key of its own that is wrong or revoked is refused there too. One that is open because only
    this machine can connect asks of each such request that it comes straight from here.
    """

    def __init__(
        self,
        config: AuthConfig,
        server: ServerConfig,
        keys: KeyFinder,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.open_to = open_to(config, server)
        self.is_open = self.open_to != "nobody"
        self.is_local = is_loopback(server.host) and not server.trusted_proxies
        self._cache_s = config.key_cache_s
        self._lookup = _KeyLookup(keys)
        self._origins = frozenset(server.cors_origins)
        self._allowed_hosts = frozenset(name.lower() for name in server.allowed_hosts)
        self._clock = clock
        self._remembered: OrderedDict[str, tuple[float, Caller]] = OrderedDict()
        self._refused: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def check_origin(self, origin: str | None, *, any_listed: bool = True) -> None:
        """Keep web pages off an open server: a browser would let any page post to it.

        ``any_listed``: pages of the origins that the settings list may.

        Raises
        ------
        OriginRefused
        """
        if origin is None or not self.is_open:
            return
        if any_listed and ("*" in self._origins or origin in self._origins):
            return
        if not (self.is_local and is_loopback(urlsplit(origin).hostname or "")):
            raise OriginRefused(origin)

    async def check(
        self, authorization: str | None, connection: Connection | None = None, *, scope: str | None = USE
    ) -> Caller:
        """The caller behind a header, whose key must have a scope unless that is None.

        ``connection`` is what the request came on; without it nobody is let in without a key.

        Raises
        ------
        Unauthenticated, WrongScope
        StoreUnavailable
            The key is not remembered and cannot be looked up.
        """
        key = self._key(authorization)
        if key is None or (self.is_open and not key.startswith(KEY_PREFIX)):
            if self.is_open:
                self._check_connection(connection or {})
                return ANONYMOUS
            raise Unauthenticated(
                "No API key was given. Send it as 'Authorization: Bearer sk-suffice-…'; "
                "'suffice keys create' makes one."
            )
        key_hash, now_s = hash_key(key), self._clock()
        remembered = self._remembered.get(key_hash)
        if remembered is not None and now_s < remembered[0]:
            caller = remembered[1]
        elif _KEY_FORM.fullmatch(key) is None:
            # No key was ever made like this, so there is none to look for.
            raise Unauthenticated(_UNKNOWN_KEY)
        else:
            caller = await self._find(key_hash, now_s)
        if scope is not None and caller.scope != scope:
            raise WrongScope(f"The key is of the scope {caller.scope!r}; this wants one of the scope {scope!r}.")
        return caller

    def _check_connection(self, connection: Connection) -> None:
        """Refuse a request without a key that an open server is not open to."""
        if self.open_to == "local":
            sign = foreign_sign(connection, self._allowed_hosts)
            if sign is not None:
                raise KeyWanted(f"only programs on its own machine may call it, and directly; {sign}")
        elif self._allowed_hosts and (sign := foreign_host(connection, self._allowed_hosts)) is not None:
            raise KeyWanted(f"it answers only to the names in server.allowed_hosts; {sign}")

    def forget(self, key_hash: str) -> None:
        """Drop what is remembered of a key: it was made or changed."""
        self._remembered.pop(key_hash, None)
        self._refused.pop(key_hash, None)
        self._lookup.forget()

    def _key(self, authorization: str | None) -> str | None:
        if not authorization:
            return None
        scheme, _, key = authorization.partition(" ")
        # HTTP knows these two blanks; str.strip would drop bytes that Unicode calls blank as well.
        key = key.strip(" \t")
        if scheme.lower() != "bearer" or not key:
            if self.is_open:
                return None
            raise Unauthenticated("The Authorization header must be 'Bearer' and a key.")
        if len(key) > _MAX_KEY_CHARS:
            raise Unauthenticated("The API key is too long to be one.")
        return key

    async def _find(self, key_hash: str, now_s: float) -> Caller:
        refused = self._refused.get(key_hash)
        if refused is not None and now_s < refused[0]:
            raise Unauthenticated(refused[1])
        found = await self._lookup.find(key_hash, now_s)
        if found is None or not hmac.compare_digest(found.key_hash, key_hash):
            raise self._refuse(key_hash, now_s, _UNKNOWN_KEY)
        if found.revoked_at is not None:
            told = f"The API key {found.prefix}… was revoked on {found.revoked_at:%Y-%m-%d}."
            raise self._refuse(key_hash, now_s, told)
        left_s = _left_s(found)
        if left_s <= 0:
            told = f"The API key {found.prefix}… expired at {found.expires_at:%Y-%m-%d %H:%M} UTC. Ask for another one."
            raise self._refuse(key_hash, now_s, told)
        permissions = stored_permissions(found.permissions)
        caller = Caller(found.tenant, found.key_id, stored_limits(found.limits), found.scope, permissions)
        # Wrong keys are remembered elsewhere, so that they cannot push good ones out.
        self._remembered[key_hash] = (now_s + min(self._cache_s, left_s), caller)
        self._remembered.move_to_end(key_hash)
        while len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        return caller

    def _refuse(self, key_hash: str, now_s: float, told: str) -> Unauthenticated:
        self._remembered.pop(key_hash, None)
        self._refused[key_hash] = (now_s + _REFUSED_S, told)
        self._refused.move_to_end(key_hash)
        while len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)
        return Unauthenticated(told)


def _left_s(key: ApiKey) -> float:
    """Return how long a key is still good, by the wall clock."""
    return math.inf if key.expires_at is None else (key.expires_at - datetime.now(UTC)).total_seconds()
