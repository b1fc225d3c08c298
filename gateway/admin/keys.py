"""Keys: made and shown once, listed, limited, given another secret, revoked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import orjson

from gateway.access.authenticator import SCOPES, USE, hash_key, make_key, shown_prefix
from gateway.access.key_limits import NO_LIMITS, KeyLimits, read_limits
from gateway.admin import schemas
from gateway.admin.endpoint import audited
from gateway.admin.operation import Asked, Field, Operation, Reply
from gateway.admin.rooms import Rooms
from gateway.admin.views import key_view
from gateway.api import fields
from gateway.api.declaration import schema_of
from gateway.control.errors import Conflict
from gateway.errors import NotFound
from gateway.ids import uuid7
from gateway.store.admin_writes import Edit
from gateway.store.records import ApiKey

_KEY = schemas.shape(
    id=schemas.TEXT,
    name=schemas.TEXT,
    prefix=schemas.TEXT,
    tenant=schemas.TEXT,
    scope=schemas.TEXT,
    limits=schemas.ANY_OBJECT,
)
_WITH_SECRET = schemas.shape(id=schemas.TEXT, key=schemas.TEXT, prefix=schemas.TEXT)
_NAME = fields.string(200, min_chars=1)
_LIMITS = Field(
    fields.lets_through(schema_of(KeyLimits))(read_limits), "What the key may use; null or absent is without limit."
)


class KeyPages:
    """Keys over HTTP. A secret is in the answer to its making and nowhere else."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def operations(self) -> list[Operation]:
        named = (NotFound,)
        return [
            Operation(
                method="GET",
                path="/keys",
                name="list_keys",
                summary="Every key, revoked ones included, by its prefix.",
                handler=self.list,
                returns=schemas.listing(_KEY),
            ),
            Operation(
                method="POST",
                path="/keys",
                name="create_key",
                summary="Make a key. This answer is the only place its secret can be seen.",
                handler=self.create,
                returns=_WITH_SECRET,
                status=201,
                body={
                    "name": Field(_NAME, "What it is for.", "unnamed"),
                    "tenant": Field(_NAME, "Whose requests it makes.", "default"),
                    "scope": Field(fields.one_of(*SCOPES), "What it opens: the models, or this administration.", USE),
                    "limits": _LIMITS,
                },
            ),
            Operation(
                method="GET",
                path="/keys/{key_id}",
                name="get_key",
                summary="One key.",
                handler=self.get,
                returns=_KEY,
                errors=named,
            ),
            Operation(
                method="PUT",
                path="/keys/{key_id}/limits",
                name="limit_key",
                summary="Change what a key may use.",
                handler=self.limit,
                returns=_KEY,
                body={"limits": _LIMITS},
                errors=(*named, Conflict),
                conditional="may",
            ),
            Operation(
                method="POST",
                path="/keys/{key_id}/rotate",
                name="rotate_key",
                summary="Give a key another secret; the old one ends. Everything else of it stays.",
                handler=self.rotate,
                returns=_WITH_SECRET,
                errors=(*named, Conflict),
                conditional="may",
            ),
            Operation(
                method="DELETE",
                path="/keys/{key_id}",
                name="revoke_key",
                summary="Revoke a key, for good.",
                handler=self.revoke,
                returns=_KEY,
                errors=(*named, Conflict),
                conditional="may",
            ),
        ]

    async def list(self, asked: Asked) -> Reply:
        return Reply({"object": "list", "data": [key_view(each) for each in await self._rooms.store.list_keys()]})

    async def get(self, asked: Asked) -> Reply:
        found = await self._rooms.queries.key(asked.path["key_id"])
        if found is None:
            raise NotFound("key", asked.path["key_id"])
        return Reply(key_view(found), etag=_tag(found))

    async def create(self, asked: Asked) -> Reply:
        secret = make_key()
        limits = asked.body["limits"] or NO_LIMITS
        key = ApiKey(
            key_id=uuid7(),
            name=asked.body["name"],
            key_hash=hash_key(secret),
            prefix=shown_prefix(secret),
            created_at=datetime.now(UTC),
            tenant=asked.body["tenant"],
            limits=limits.stored(),
            scope=asked.body["scope"],
        )
        await self._rooms.writes.insert_key(key, audited(asked, f"key {key.key_id}", None, key_view(key)))
        return Reply(key_view(key) | {"key": secret}, status=201, etag=_tag(key))

    async def limit(self, asked: Asked) -> Reply:
        limits = (asked.body["limits"] or NO_LIMITS).stored()
        key = await self._change(asked, {"limits": limits}, lambda key: {"limits": dict(key.limits)})
        return Reply(key_view(key), etag=_tag(key))

    async def rotate(self, asked: Asked) -> Reply:
        secret = make_key()
        values = {"key_hash": hash_key(secret), "prefix": shown_prefix(secret)}
        key = await self._change(asked, values, lambda key: {"prefix": key.prefix})
        return Reply(key_view(key) | {"key": secret}, etag=_tag(key))

    async def revoke(self, asked: Asked) -> Reply:
        values = {"revoked_at": datetime.now(UTC)}
        key = await self._change(asked, values, lambda key: {"revoked": key.revoked_at is not None})
        return Reply(key_view(key), etag=_tag(key))

    async def _change(
        self, asked: Asked, values: Mapping[str, Any], shown: Callable[[ApiKey], dict[str, Any]]
    ) -> ApiKey:
        """Change a key that is active and, where the request says so, as it was read.

        ``shown`` is what of it the audit log holds, before and after.

        Raises
        ------
        NotFound, Conflict
        """
        key_id = asked.path["key_id"]
        before: list[ApiKey] = []

        def edit(key: ApiKey) -> Edit:
            if asked.if_match is not None and asked.if_match != _tag(key):
                raise Conflict(f"Key {key.prefix}…", asked.if_match or "none", _tag(key))
            if key.revoked_at is not None:
                raise Conflict(f"Key {key.prefix}…", "an active one", "a revoked one")
            before.append(key)
            return values, audited(asked, f"key {key_id}", shown(key), shown(replace(key, **values)))

        changed = await self._rooms.writes.change_key(key_id, edit)
        if changed is None:
            raise NotFound("key", key_id)
        self._rooms.forget_key(before[0].key_hash)
        return changed


def _tag(key: ApiKey) -> str:
    """Changes with whatever can be changed about a key, and with nothing else."""
    content = [key.key_hash, dict(key.limits), key.revoked_at]
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()[:12]
