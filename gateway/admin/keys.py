"""Keys: made and shown once, listed, limited, given another secret, revoked."""

from __future__ import annotations

from datetime import UTC, datetime

from gateway import fields
from gateway.admin import schemas
from gateway.admin.endpoint import described
from gateway.admin.operation import Asked, Field, Operation, Reply
from gateway.admin.rooms import Rooms
from gateway.admin.views import key_view
from gateway.auth import SCOPES, USE, hash_key, make_key, shown_prefix
from gateway.control.errors import Conflict
from gateway.errors import NotFound
from gateway.ids import uuid7
from gateway.rates.limits import NO_LIMITS, read_limits
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
_LIMITS = Field(read_limits, "What the key may use; null or absent is without limit.")


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
            ),
            Operation(
                method="POST",
                path="/keys/{key_id}/rotate",
                name="rotate_key",
                summary="Give a key another secret; the old one ends. Everything else of it stays.",
                handler=self.rotate,
                returns=_WITH_SECRET,
                errors=(*named, Conflict),
            ),
            Operation(
                method="DELETE",
                path="/keys/{key_id}",
                name="revoke_key",
                summary="Revoke a key, for good.",
                handler=self.revoke,
                returns=_KEY,
                errors=(*named, Conflict),
            ),
        ]

    async def list(self, asked: Asked) -> Reply:
        return Reply({"object": "list", "data": [key_view(each) for each in await self._rooms.store.list_keys()]})

    async def get(self, asked: Asked) -> Reply:
        return Reply(key_view(await self._key(asked.path["key_id"])))

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
        await self._rooms.store.insert_key(key)
        described(asked, f"key {key.key_id}", None, key_view(key))
        return Reply(key_view(key) | {"key": secret}, status=201)

    async def limit(self, asked: Asked) -> Reply:
        key = await self._key(asked.path["key_id"])
        limits = (asked.body["limits"] or NO_LIMITS).stored()
        described(asked, f"key {key.key_id}", {"limits": dict(key.limits)}, {"limits": limits})
        if not await self._rooms.queries.change_key(key.key_id, {"limits": limits}):
            raise _revoked(key)
        self._rooms.forget_key(key.key_hash)
        return Reply(key_view(await self._key(key.key_id)))

    async def rotate(self, asked: Asked) -> Reply:
        key = await self._key(asked.path["key_id"])
        secret = make_key()
        prefix = shown_prefix(secret)
        described(asked, f"key {key.key_id}", {"prefix": key.prefix}, {"prefix": prefix})
        if not await self._rooms.queries.change_key(key.key_id, {"key_hash": hash_key(secret), "prefix": prefix}):
            raise _revoked(key)
        self._rooms.forget_key(key.key_hash)
        return Reply(key_view(await self._key(key.key_id)) | {"key": secret})

    async def revoke(self, asked: Asked) -> Reply:
        key = await self._key(asked.path["key_id"])
        described(asked, f"key {key.key_id}", {"revoked": False}, {"revoked": True})
        if not await self._rooms.store.revoke_key(key.key_id, datetime.now(UTC)):
            raise _revoked(key)
        self._rooms.forget_key(key.key_hash)
        return Reply(key_view(await self._key(key.key_id)))

    async def _key(self, key_id: str) -> ApiKey:
        found = await self._rooms.queries.key(key_id)
        if found is None:
            raise NotFound("key", key_id)
        return found


def _revoked(key: ApiKey) -> Conflict:
    return Conflict(f"Key {key.prefix}…", "an active one", "a revoked one")
