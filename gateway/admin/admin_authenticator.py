"""Knows administrators: holders of keys of their scopes; on loopback, until there is an ``admin`` key, anybody."""

from __future__ import annotations

from typing import Protocol

from gateway.access.authenticator import ADMIN, ADMIN_READ, ANONYMOUS, Authenticator, Caller
from gateway.access.local_request import foreign_sign
from gateway.edge.gate import Head
from gateway.errors import Unauthenticated, WrongScope


class AdminKeys(Protocol):
    """Stands for the part of the store that is needed here."""

    async def had_admin_key(self) -> bool: ...


class AdminAuthenticator:
    """Finds the administrator behind a request.

    A server that listens on loopback alone and asks no key for use asks none here either of a request that comes
    straight from a program on this machine, as long as no admin key was ever made; with the first one the
    administration is closed to everybody else for good, also when that key is revoked. It protects against other
    machines, web pages and whoever a proxy lets through, not against other programs of this machine's users.
    """

    def __init__(self, authenticator: Authenticator, keys: AdminKeys) -> None:
        self._authenticator = authenticator
        self._keys = keys

    async def check(self, head: Head, *, writes: bool) -> Caller:
        """Return the administrator behind a request; ``writes`` says whether it asks for more than a look.

        Raises
        ------
        OriginRefused, Unauthenticated, WrongScope, StoreUnavailable
        """
        self._authenticator.check_origin(head.origin, any_listed=False)
        caller = await self._authenticator.check(head.authorization, head.connection, scope=None)
        if caller.key_id is None:
            reason = await self._why_closed(head)
            if reason is not None:
                raise Unauthenticated(
                    f"The administration wants a key of the scope 'admin': {reason}. "
                    "'suffice keys create --scope admin' makes one."
                )
            return ANONYMOUS
        if caller.scope == ADMIN_READ:
            if writes:
                raise WrongScope("This key may only read here; changes want one of the scope 'admin'.")
            return caller
        if caller.scope != ADMIN:
            raise WrongScope("This key is for using the models; the administration wants one of the scope 'admin'.")
        return caller

    async def _why_closed(self, head: Head) -> str | None:
        """Return why a request without a key may not administer; ``server.allowed_hosts`` opens nothing here."""
        if not self._authenticator.is_local:
            return "others than this machine can connect"
        if (sign := foreign_sign(head.connection)) is not None:
            return sign
        if head.connection.get("http_version") == "1.0":
            # The one trace that nginx leaves when it is told nothing but where to pass requests to.
            return "it came as HTTP/1.0, as from a proxy"
        return "one was made before" if await self._keys.had_admin_key() else None
