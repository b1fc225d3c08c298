"""Knows administrators: holders of a key of the scope ``admin``; on loopback, until there is such a key, anybody."""

from __future__ import annotations

from typing import Protocol

from gateway.access.authenticator import ADMIN, ANONYMOUS, Authenticator, Caller
from gateway.edge.head import Head
from gateway.errors import Unauthenticated, WrongScope


class AdminKeys(Protocol):
    """Stands for the part of the store that is needed here."""

    async def count_admin_keys(self) -> int: ...


class AdminAuthenticator:
    """Finds the administrator behind a request.

    A server that listens on loopback alone and asks no key for use asks none here either, as long as no admin key was
    made; with the first one the administration is closed to everybody else. It protects against other machines and
    against web pages, not against other programs of this machine's users.
    """

    def __init__(self, authenticator: Authenticator, keys: AdminKeys) -> None:
        self._authenticator = authenticator
        self._keys = keys

    async def check(self, head: Head) -> Caller:
        """Return the administrator behind a request.

        Raises
        ------
        OriginRefused, Unauthenticated, WrongScope, StoreUnavailable
        """
        self._authenticator.check_origin(head.origin, any_listed=False)
        caller = await self._authenticator.check(head.authorization, scope=None)
        if caller.key_id is None:
            if not self._authenticator.is_local or await self._keys.count_admin_keys():
                raise Unauthenticated(
                    "The administration wants a key of the scope 'admin'; "
                    "'suffice keys create --scope admin' makes one."
                )
            return ANONYMOUS
        if caller.scope != ADMIN:
            raise WrongScope("This key is for using the models; the administration wants one of the scope 'admin'.")
        return caller
