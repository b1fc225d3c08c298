"""A gateway to administer, and a client that checks every answer against the server's own description of it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from gateway.access.authenticator import hash_key, make_key, shown_prefix
from gateway.ids import uuid7
from gateway.store.records import ApiKey
from tests.gateway.harness import Gateway, assert_error, make_settings, running

PREFIX = "/admin/v1"

Seen = dict[str, set[tuple[int, str]]]
"""Operation's id -> (status, error code) of every answer; the code of a success is empty."""


@dataclass
class Admin:
    """Calls operations; every answer must be one that the document names, in the form it says."""

    gateway: Gateway
    document: Mapping[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    seen: Seen = field(default_factory=lambda: defaultdict(set))

    async def __call__(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **options: Any
    ) -> httpx.Response:
        url = path if path.startswith("/v1") else PREFIX + path
        response = await self.gateway.client.request(
            method, url, headers={**self.headers, **(headers or {})}, **options
        )
        operation = self._operation(method, url.partition("?")[0])
        described = operation["responses"].get(str(response.status_code))
        assert described is not None, f"{operation['operationId']} does not document {response.status_code}"
        value = response.json()
        schema = described["content"]["application/json"]["schema"]
        jsonschema.validate(value, dict(schema) | {"components": self.document["components"]})
        code = value["error"]["code"] if response.status_code >= 400 else ""
        self.seen[operation["operationId"]].add((response.status_code, code))
        return response

    async def get(self, path: str, **options: Any) -> Any:
        """The value of a success."""
        response = await self("GET", path, **options)
        assert response.status_code == 200, response.text
        return response.json()

    async def error(
        self, method: str, path: str, status: int, code: str, param: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """The error of a refusal."""
        return assert_error(await self(method, path, **options), status, code, param)

    async def body(self, name: str = "default") -> tuple[dict[str, Any], str]:
        """A policy's body and its entity tag."""
        response = await self("GET", f"/policies/{name}")
        return response.json()["body"], response.headers["etag"]

    def _operation(self, method: str, path: str) -> Mapping[str, Any]:
        found = []
        for template, methods in self.document["paths"].items():
            pattern = re.sub(r"{\w+}", "[^/]+", template)
            if re.fullmatch(pattern, path) and method.lower() in methods:
                found.append((template.count("{"), methods[method.lower()]))
        assert found, f"the document has no {method} {path}"
        operation: Mapping[str, Any] = min(found, key=lambda each: each[0])[1]
        return operation


@asynccontextmanager
async def administered(
    directory: Path, seen: Seen | None = None, backends: Any = None, router: Any = None, **overrides: Any
) -> AsyncIterator[Admin]:
    """A running gateway with an open administration."""
    async with running(make_settings(directory, **overrides), backends, router=router) as gateway:
        document = (await gateway.client.get("/openapi.json")).json()
        yield Admin(gateway, document, seen=defaultdict(set) if seen is None else seen)


async def add_key(gateway: Gateway, scope: str = "use", tenant: str = "default") -> tuple[dict[str, str], ApiKey]:
    """A key as a header, and its row."""
    secret = make_key()
    key = ApiKey(
        key_id=uuid7(),
        name="test",
        key_hash=hash_key(secret),
        prefix=shown_prefix(secret),
        created_at=datetime.now(UTC),
        tenant=tenant,
        scope=scope,
    )
    await gateway.parts.store.insert_key(key)
    return {"authorization": f"Bearer {secret}"}, key
