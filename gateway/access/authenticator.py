"""Authenticates callers by the hash of their API keys, remembered for a moment; open only where nobody else reaches."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from gateway.access.key_limits import NO_LIMITS, KeyLimits, stored_limits
from gateway.config.sections import AuthConfig
from gateway.errors import OriginRefused, Unauthenticated, WrongScope
from gateway.store.records import ApiKey

KEY_PREFIX = "sk-suffice-"
# The part of a key that is kept for people to recognise it by: 30 of its 256 bits.
_SHOWN_CHARS = len(KEY_PREFIX) + 5
_MAX_KEY_CHARS = 256
_MAX_REMEMBERED = 4096

USE, ADMIN = "use", "admin"
SCOPES = (USE, ADMIN)


class KeyFinder(Protocol):
    """The part of the store that is needed here."""

    async def find_key(self, key_hash: str) -> ApiKey | None: ...


@dataclass(frozen=True, slots=True)
class Caller:
    """Names the tenant and key of a request; ``key_id`` is None on an open server."""

    tenant: str = "default"
    key_id: str | None = None
    limits: KeyLimits = NO_LIMITS
    scope: str = USE

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


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address listened on."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Authenticator:
    """Turns an ``Authorization`` header into a :class:`Caller`.

    An open server takes requests without a key and with any word that is not one of its own keys (clients insist on
    sending something); a key of its own that is wrong or revoked is refused there too.
    """

    def __init__(
        self,
        config: AuthConfig,
        host: str,
        keys: KeyFinder,
        *,
        cors_origins: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_open = config.required == "never" or (config.required == "auto" and is_loopback(host))
        self.is_local = is_loopback(host)
        self._cache_s = config.key_cache_s
        self._keys = keys
        self._origins = frozenset(cors_origins)
        self._clock = clock
        self._remembered: OrderedDict[str, tuple[float, Caller]] = OrderedDict()

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

    async def check(self, authorization: str | None, *, scope: str | None = USE) -> Caller:
        """The caller behind a header, whose key must have a scope unless that is None.

        Raises
        ------
        Unauthenticated, WrongScope
        StoreUnavailable
            The key is not remembered and cannot be looked up.
        """
        key = self._key(authorization)
        if key is None or (self.is_open and not key.startswith(KEY_PREFIX)):
            if self.is_open:
                return ANONYMOUS
            raise Unauthenticated(
                "No API key was given. Send it as 'Authorization: Bearer sk-suffice-…'; "
                "'suffice keys create' makes one."
            )
        caller = await self._caller(hash_key(key))
        if scope is not None and caller.scope != scope:
            raise WrongScope(f"The key is of the scope {caller.scope!r}; this wants one of the scope {scope!r}.")
        return caller

    def forget(self, key_hash: str) -> None:
        """Drop what is remembered of a key: it was changed."""
        self._remembered.pop(key_hash, None)

    def _key(self, authorization: str | None) -> str | None:
        if not authorization:
            return None
        scheme, _, key = authorization.partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            if self.is_open:
                return None
            raise Unauthenticated("The Authorization header must be 'Bearer' and a key.")
        if len(key) > _MAX_KEY_CHARS:
            raise Unauthenticated("The API key is too long to be one.")
        return key

    async def _caller(self, key_hash: str) -> Caller:
        now_s = self._clock()
        remembered = self._remembered.get(key_hash)
        if remembered is not None and now_s < remembered[0]:
            return remembered[1]
        found = await self._keys.find_key(key_hash)
        if found is None or not hmac.compare_digest(found.key_hash, key_hash):
            self._remembered.pop(key_hash, None)
            raise Unauthenticated("The API key is not valid. 'suffice keys list' shows those that are.")
        if found.revoked_at is not None:
            self._remembered.pop(key_hash, None)
            raise Unauthenticated(f"The API key {found.prefix}… was revoked on {found.revoked_at:%Y-%m-%d}.")
        caller = Caller(found.tenant, found.key_id, stored_limits(found.limits), found.scope)
        # Only good keys are remembered, so wrong ones cannot push them out.
        self._remembered[key_hash] = (now_s + self._cache_s, caller)
        self._remembered.move_to_end(key_hash)
        while len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        return caller
