"""The document against the server: every route is in it, it is valid, and every error it names can be had."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from openapi_spec_validator import validate
from starlette.routing import Route

from backends.errors import BackendFailure, BackendOverloaded, BackendRefused, BackendTimeout, BackendUnavailable
from backends.protocol import EmbedResult, GenerateRequest
from backends.testing import EchoBackend, Script
from classifier.router import BUILTIN
from gateway.access.authenticator import make_key
from gateway.admin.api import admin_operations
from gateway.admin.openapi import describe_settings
from gateway.admin.operation import Operation
from gateway.admin.operation_table import renew
from gateway.config.sections import AdminConfig
from gateway.ids import uuid7
from gateway.store.feedback import MAX_REPORTS
from tests.faults import PrivatePostgres
from tests.gateway.access.test_limits_http import limited
from tests.gateway.admin.kit import PREFIX, Admin, Seen, add_key, administered
from tests.gateway.admin.test_reports import raise_alert
from tests.gateway.admin.test_routers import FOUR, ladder_of_four
from tests.gateway.harness import echo_backends, make_settings, running

CHAT = {"model": "simple", "messages": [{"role": "user", "content": "one two"}]}
TEXT = {"model": "simple", "prompt": "one two"}
ITEMS = {"model": "simple", "input": "one two"}
BLOCKS = CHAT | {"max_tokens": 50}
VECTORS = {"model": "auto", "input": "one two"}
COUNTS = "/v1/messages/count_tokens"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": ITEMS,
    "/v1/messages": BLOCKS,
    COUNTS: CHAT,
    "/v1/embeddings": VECTORS,
}
BY_ID = {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]}
VAGUE: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"dimensions": 3},
    "/v1/responses": {"background": True},
    "/v1/messages": BY_ID,
    COUNTS: BY_ID,
}
FEEDBACK = "/v1/feedback"
KEPT = f"/v1/responses/resp_{uuid7()}"
KEPT_PATHS = (("GET", KEPT), ("DELETE", KEPT), ("GET", f"{KEPT}/input_items"), ("POST", f"{KEPT}/cancel"))
READING = ("/v1/models", "/v1/models/auto", f"/v1/requests/{uuid7()}")


class SlowEmbedder(EchoBackend):
    """Takes its time over vectors and counts."""

    async def count_tokens(self, request: GenerateRequest, *, limit: int | None = None) -> int | None:
        await asyncio.sleep(0.4)
        return await super().count_tokens(request, limit=limit)

    async def embed(self, texts: Sequence[str]) -> EmbedResult:
        await asyncio.sleep(0.4)
        return await super().embed(texts)


class Uncounting(EchoBackend):
    """Is closed to whoever wants a count."""

    async def count_tokens(self, request: GenerateRequest, *, limit: int | None = None) -> int | None:
        raise BackendUnavailable("closed")


def operations() -> list[Operation]:
    return admin_operations(AdminConfig())


def sample(operation: Operation) -> str:
    """A path of the operation, with words where names belong."""
    return operation.path.replace("{", "").replace("}", "")


@pytest.mark.slow
async def test_the_document_is_valid_and_has_every_route(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    async with running(settings) as gateway:
        document = (await gateway.client.get("/openapi.json")).json()
        validate(document)
        assert document == describe_settings(settings)
        served = {
            (method.lower(), route.path.replace(":path", ""))
            for route in gateway.app.routes
            if isinstance(route, Route)
            for method in (route.methods or {"POST"}) - {"HEAD"}
        }
    described = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert served == described
    names = [each["operationId"] for methods in document["paths"].values() for each in methods.values()]
    assert len(names) == len(set(names))


def test_the_page_has_every_operation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "admin.md").read_text()
    assert renew(page, operations()) == page, "run: python -m gateway.admin.operation_table docs/admin.md"


@pytest.mark.db
@pytest.mark.slow
async def test_every_documented_error_of_the_administration_occurs(
    tmp_path: Path, private_postgres: PrivatePostgres
) -> None:
    seen: Seen = defaultdict(set)
    await _refusals(tmp_path, seen)
    await _wrong_forms(tmp_path, seen)
    await _strange_names(tmp_path, seen)
    await _conflicts(tmp_path, seen)
    await _without_a_database(tmp_path, seen, private_postgres)
    async with administered(tmp_path) as admin:
        assert _missing(admin, seen, "admin") == {}


@pytest.mark.db
@pytest.mark.slow
async def test_every_documented_error_of_use_occurs(tmp_path: Path, private_postgres: PrivatePostgres) -> None:
    seen: Seen = defaultdict(set)
    await _callers(tmp_path, seen)
    await _bodies(tmp_path, seen)
    await _limits(tmp_path, seen)
    await _failures(tmp_path, seen)
    await _use_without_a_database(tmp_path, seen, private_postgres)
    async with administered(tmp_path) as admin:
        assert _missing(admin, seen, "use") == {}


def _missing(admin: Admin, seen: Seen, tag: str) -> dict[str, set[tuple[int, str]]]:
    """Documented errors nobody has seen, by operation."""
    missing = {}
    for methods in admin.document["paths"].values():
        for described in methods.values():
            if tag not in described["tags"]:
                continue
            named = {
                (int(status), code)
                for status, response in described["responses"].items()
                if int(status) >= 400
                for code in _codes(response)
            }
            if left := named - seen[described["operationId"]]:
                missing[described["operationId"]] = left
    return missing


def _codes(response: Any) -> list[str]:
    narrowed = response["content"]["application/json"]["schema"]["allOf"][1]
    codes: list[str] = narrowed["properties"]["error"]["properties"]["code"]["enum"]
    return codes


# ---- the administration


async def _refusals(tmp_path: Path, seen: Seen) -> None:
    async with administered(tmp_path, seen) as admin:
        user, _ = await add_key(admin.gateway)
        wrong = {"authorization": f"Bearer {make_key()}"}
        for each in operations():
            path = sample(each)
            await admin.error(each.method, path, 401, "invalid_api_key", headers=wrong)
            await admin.error(each.method, path, 403, "wrong_key_scope", headers=user)
            await admin.error(each.method, path, 403, "origin_refused", headers={"origin": "https://evil.example"})


async def _slowly() -> AsyncIterator[bytes]:
    yield b"{"
    await asyncio.sleep(0.5)
    yield b"}"


async def _wrong_forms(tmp_path: Path, seen: Seen) -> None:
    options = {"admin__max_body_bytes": 1024, "admin__max_artifact_bytes": 1024, "server__slow_client_timeout_s": 0.1}
    async with administered(tmp_path, seen, **options) as admin:
        for each in operations():
            path, tag = sample(each), {"if-match": '"x"'}
            body = {} if each.body_kind in ("none", "bytes") else {"json": {}}
            await admin(each.method, f"{path}?colour=red", headers=tag, **body)
            if each.conditional == "must":
                await admin.error(each.method, path, 428, "precondition_required", "If-Match", **body)
            if "limit" in each.query_schemas:
                await admin.error(each.method, f"{path}?limit=x", 400, "invalid_type", "limit")
            elif "tier" in each.query_schemas:
                await admin.error(each.method, f"{path}?tier=x", 400, "invalid_type", "tier")
            if each.body is None:
                continue
            await admin.error(each.method, path, 413, "request_too_large", content=b"x" * 2000, headers=tag)
            await admin.error(each.method, path, 408, "request_timeout", content=_slowly(), headers=tag)
            if each.body_kind == "bytes":
                await admin.error(each.method, path, 400, "router_refused", content=b"x")
                continue
            await admin.error(each.method, path, 400, "invalid_json", content=b"{", headers=tag)
            members = ("reason", "version", "name", "limits", "permissions", "tenant")
            for wrong in ({"on": "yes"}, *({name: 1} for name in members)):
                await admin(each.method, path, json=wrong, headers=tag)


async def _strange_names(tmp_path: Path, seen: Seen) -> None:
    async with administered(tmp_path, seen) as admin:
        for each in operations():
            if "{" in each.path:
                body = {"json": {"version": "x"}} if each.name == "activate_policy" else {}
                tag = {"if-match": '"x"'} if each.conditional == "must" else {}
                await admin(each.method, sample(each), headers=tag, **body)
        await admin("GET", "/policies/none/diff?from=x")
        await admin("POST", "/what-if", json={"name": "none"})


async def _conflicts(tmp_path: Path, seen: Seen) -> None:
    async with administered(tmp_path, seen, ladder_of_four(), toml=FOUR, learning__enabled=False) as admin:
        stale = {"headers": {"if-match": '"77"'}}
        version = (await admin("POST", "/routers", content=BUILTIN.read_bytes())).json()["version"]
        alert_id = await raise_alert(admin)
        key_id = (await admin("POST", "/keys", json={})).json()["id"]
        for method, path, options in (
            ("PUT", "/kill-switch", {"json": {"on": True}} | stale),
            ("PUT", "/policies/default", {"json": {}} | stale),
            ("PUT", "/policies/spare", {"json": {}, "headers": {"if-none-match": "*"}}),
            ("DELETE", "/policies/spare", stale),
            ("POST", "/policies/default/rollback", stale),
            ("POST", "/policies/default/rollback", {}),
            ("POST", "/policies/default/activate", {"json": {"version": (await admin.body())[1].strip('"')}} | stale),
            ("POST", f"/routers/{version}/promote", stale),
            ("POST", f"/routers/{version}/shadow", stale),
            ("POST", "/routers/rollback", stale),
            ("POST", "/routers/rollback", {}),
            ("POST", f"/routers/{version}/shadow", {}),
            ("POST", f"/routers/{version}/shadow", {}),
            ("POST", f"/alerts/{alert_id}/resolve", {}),
            ("POST", f"/alerts/{alert_id}/resolve", {}),
            ("PUT", f"/keys/{key_id}/limits", {"json": {}} | stale),
            ("PUT", f"/keys/{key_id}/permissions", {"json": {}} | stale),
            ("POST", f"/keys/{key_id}/rotate", stale),
            ("DELETE", f"/keys/{key_id}", stale),
            ("DELETE", f"/keys/{key_id}", {}),
            ("DELETE", f"/keys/{key_id}", {}),
            ("POST", f"/keys/{key_id}/rotate", {}),
            ("PUT", f"/keys/{key_id}/limits", {"json": {}}),
            ("PUT", f"/keys/{key_id}/permissions", {"json": {}}),
        ):
            await admin(method, path, **options)


async def _without_a_database(tmp_path: Path, seen: Seen, cluster: PrivatePostgres) -> None:
    async with administered(tmp_path, seen, database__url=cluster.url) as admin:
        cluster.stop()
        for each in operations():
            await admin.error(each.method, sample(each), 503, "log_unavailable")
        cluster.start()


# ---- use


async def _callers(tmp_path: Path, seen: Seen) -> None:
    async with administered(tmp_path, seen) as admin:
        holder, _ = await add_key(admin.gateway, scope="admin")
        wrong = {"authorization": f"Bearer {make_key()}"}
        posts, reads = [("POST", path) for path in (*BODIES, FEEDBACK)], [("GET", path) for path in READING]
        for method, path in [*posts, *reads, *KEPT_PATHS]:
            await admin.error(method, path, 401, "invalid_api_key", headers=wrong)
            await admin.error(method, path, 403, "wrong_key_scope", headers=holder)
            await admin.error(method, path, 403, "origin_refused", headers={"origin": "https://evil.example"})
        answered = (await admin.gateway.chat("hi")).json()["suffice"]["request_id"]
        report = {"request_id": answered, "kind": "rating", "value": 1, "idempotency_key": "one"}
        assert (await admin("POST", FEEDBACK, json=report)).status_code == 200
        await admin("POST", FEEDBACK, json=report | {"value": 0})
        for number in range(MAX_REPORTS):
            await admin("POST", FEEDBACK, json=report | {"idempotency_key": f"another {number}"})
        await admin.error("POST", FEEDBACK, 404, "request_not_found", json=report | {"request_id": uuid7()})
        await admin("POST", FEEDBACK, json=report | {"kind": "colour"})
        await admin("POST", FEEDBACK, json=report | {"kind": 7})
        await admin.error("GET", "/v1/models/none", 404, "model_not_found", "model")
        await admin.error("GET", f"/v1/requests/{uuid7()}", 404, "request_not_found")
        await _kept(admin)


async def _kept(admin: Admin) -> None:
    for method, path in KEPT_PATHS:
        await admin.error(method, path, 404, "response_not_found")
        hurried = await limited(admin.gateway, requests_per_minute=1)
        await admin(method, path, headers=hurried)
        await admin.error(method, path, 429, "rate_limit_exceeded", headers=hurried)
    kept = f"/v1/responses/{(await admin('POST', '/v1/responses', json=ITEMS | {'store': True})).json()['id']}"
    await admin.error("GET", f"{kept}?stream=true", 400, "unsupported_parameter", "stream")
    await admin.error("POST", f"{kept}/cancel", 400, "unsupported_parameter")
    await admin.error("GET", f"{kept}/input_items?limit=0", 400, "invalid_value", "limit")
    await admin.error("GET", f"{kept}/input_items?limit=few", 400, "invalid_type", "limit")
    missing = ITEMS | {"previous_response_id": "resp_x"}
    await admin.error("POST", "/v1/responses", 400, "previous_response_not_found", "previous_response_id", json=missing)


async def _bodies(tmp_path: Path, seen: Seen) -> None:
    options = {"server__max_body_bytes": 1024, "server__slow_client_timeout_s": 0.1}
    async with administered(tmp_path, seen, **options) as admin:
        for path in (*BODIES, FEEDBACK):
            await admin.error("POST", path, 413, "request_too_large", content=b"x" * 2000)
            await admin.error("POST", path, 408, "request_timeout", content=_slowly())
            await admin.error("POST", path, 400, "invalid_json", content=b"{")
        for path, body in BODIES.items():
            await admin.error("POST", path, 400, "invalid_type", "model", json=body | {"model": 1})
            await admin.error("POST", path, 404, "model_not_found", "model", json=body | {"model": "none"})
            await admin.error("POST", path, 400, "invalid_value", "model", json=body | {"model": None})
            vague = VAGUE.get(path, {"functions": [{}]})
            param = "messages[0].content[0]" if vague is BY_ID else next(iter(vague))
            await admin.error("POST", path, 400, "unsupported_parameter", param, json=body | vague)
            if path != "/v1/embeddings":
                asked = body | {"suffice": {"tier": 2}}
                await admin.error("POST", path, 400, "conflicting_limits", "suffice.tier", json=asked)


async def _limits(tmp_path: Path, seen: Seen) -> None:
    async with administered(tmp_path, seen) as admin:
        thrifty = await limited(admin.gateway, tokens_per_minute=1)
        poor = await limited(admin.gateway, budget_usd_per_day="0.000001")
        for path, body in BODIES.items():
            if path == COUNTS:
                # It takes no tokens and costs nothing.
                once = await limited(admin.gateway, requests_per_minute=1)
                assert (await admin("POST", path, json=body, headers=once)).status_code == 200
                await admin.error("POST", path, 429, "rate_limit_exceeded", json=body, headers=once)
                continue
            await admin.error("POST", path, 429, "rate_limit_exceeded", json=body, headers=thrifty)
            if path != "/v1/embeddings":
                await admin.error("POST", path, 429, "insufficient_quota", json=body, headers=poor)
        hurried = await limited(admin.gateway, requests_per_minute=1)
        for _ in range(3):
            await admin("POST", FEEDBACK, json={}, headers=hurried)
        admin.gateway.parts.admission.is_draining = True
        for path, body in BODIES.items():
            await admin.error("POST", path, 503, "shutting_down", json=body)


async def _failures(tmp_path: Path, seen: Seen) -> None:
    for script, status, code in (
        (Script(fail_before=BackendUnavailable("x")), 503, "model_unavailable"),
        (Script(fail_before=BackendOverloaded("x")), 503, "overloaded"),
        (Script(fail_before=BackendRefused("x")), 502, "model_refused"),
        (Script(fail_before=BackendTimeout("x")), 504, "model_timeout"),
        (Script(fail_before=BackendFailure("x")), 502, "model_failed"),
        (Script(fail_after=1), 502, "answer_failed"),
    ):
        async with administered(tmp_path, seen, echo_backends(small=script)) as admin:
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
                await admin.error("POST", path, status, code, json=BODIES[path])
    async with administered(tmp_path, seen, {"small": Uncounting("small"), "large": EchoBackend("large")}) as admin:
        await admin.error("POST", COUNTS, 503, "model_unavailable", json=BODIES[COUNTS])
    slow = {"small": SlowEmbedder("small", Script(hang_after=0)), "large": EchoBackend("large", context_length=4)}
    async with administered(tmp_path, seen, slow, server__request_timeout_s=0.1) as admin:
        for path, body in BODIES.items():
            await admin.error("POST", path, 504, "deadline_exceeded", json=body)
            if path not in ("/v1/embeddings", COUNTS):
                most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
                long = body | {"model": "expert", most: 50}
                await admin.error("POST", path, 400, "context_length_exceeded", "messages", json=long)


async def _use_without_a_database(tmp_path: Path, seen: Seen, cluster: PrivatePostgres) -> None:
    async with administered(tmp_path, seen, database__url=cluster.url) as admin:
        key = {"authorization": f"Bearer {make_key()}"}
        cluster.stop()
        for path, body in BODIES.items():
            await admin.error("POST", path, 503, "log_unavailable", json=body, headers=key)
        await admin.error("POST", FEEDBACK, 503, "log_unavailable", json={}, headers=key)
        for method, path in [*(("GET", path) for path in READING), *KEPT_PATHS]:
            await admin.error(method, path, 503, "log_unavailable", headers=key)
        cluster.start()


@pytest.mark.slow
async def test_bodies_that_are_taken_fit_the_document(tmp_path: Path) -> None:
    """The schema says no less than the server: what is served would have passed it."""
    import jsonschema

    async with administered(tmp_path) as admin:
        for path, body in BODIES.items():
            for more in ({}, {"n": None, "user": "me"}, {"suffice": None}, {"unknown": 1}):
                sent = body | more
                assert (await admin.gateway.client.post(path, json=sent)).status_code == 200
                schema = admin.document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
                jsonschema.validate(sent, schema)
        chat = admin.document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
        from tests.gateway.endpoints.test_bad_requests import WRONG_FIELDS

        told = 0
        for change, _ in WRONG_FIELDS:
            try:
                jsonschema.validate(CHAT | change, chat["schema"])
            except jsonschema.ValidationError:
                told += 1
        # What rests on two fields at once, or on the server's tiers, no schema of ours tells.
        assert told >= 0.75 * len(WRONG_FIELDS)


async def test_unknown_methods_say_which_are_known(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        found: httpx.Response = await gateway.client.patch(f"{PREFIX}/policies/default")
        assert (found.status_code, found.json()["error"]["code"]) == (405, "method_not_allowed")
        assert {each.strip() for each in found.headers["allow"].split(",")} >= {"GET", "PUT", "DELETE"}
