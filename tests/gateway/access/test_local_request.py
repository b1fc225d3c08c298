"""What an open server takes for a program of its own machine, on every path it has (security review H6, H7)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Route

from gateway.access.authenticator import make_key
from gateway.access.local_request import foreign_host, foreign_sign, host_name, is_loopback
from gateway.app import create_app
from gateway.edge.http_protocol import BoundedHttpProtocol
from tests.gateway.admin.kit import add_key
from tests.gateway.harness import Gateway, assert_error, echo_backends, make_settings, running
from tests.gateway.raw import eventually

FOREIGN = {
    "rebound name": {"host": "rebound.evil.example:21002"},
    "address of another machine": {"host": "192.168.0.3"},
    "name that begins like loopback": {"host": "127.0.0.1.evil.example"},
    "name that ends like loopback": {"host": "evil.localhost.example"},
    "standard header": {"forwarded": "for=203.0.113.9"},
    "usual header": {"x-forwarded-for": "203.0.113.9"},
    "loopback said to be forwarded": {"x-forwarded-for": "127.0.0.1"},
    "forwarded name": {"x-forwarded-host": "llm.example.com"},
    "forwarded scheme alone": {"x-forwarded-proto": "https"},
    "nginx": {"x-real-ip": "203.0.113.9"},
    "gateway": {"via": "1.1 proxy"},
    "content delivery network": {"cf-connecting-ip": "203.0.113.9"},
}
LOOPBACK_HOSTS = (
    "localhost",
    "LOCALHOST:80",
    "127.0.0.1",
    "127.8.9.1:65535",
    "[::1]",
    "[::1]:8000",
    "[::ffff:127.0.0.1]",
)
FOREIGN_HOSTS = (
    "", "evil.example", "0.0.0.0", "10.0.0.1", "[::]", "[::2]", "::1", "localhost.", "localhost.evil", "127.0.0.1.evil",
    "localhost:80:80", "localhost:port", "user@localhost", "localhost/", "localhost evil", " localhost", "127.1",
    "2130706433", "0x7f.0.0.1", "[::ffff:10.0.0.1]", "localhost\x00",
)  # fmt: skip


def connection(host: str | None = "localhost", peer: Any = ("127.0.0.1", 5), **headers: str) -> dict[str, Any]:
    given_headers = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"client": peer, "headers": [*([] if host is None else [(b"host", host.encode("latin-1"))]), *given_headers]}


@pytest.mark.parametrize("host", LOOPBACK_HOSTS)
def test_names_of_loopback_are_this_machines(host: str) -> None:
    assert foreign_sign(connection(host)) is None


@pytest.mark.parametrize("host", [*FOREIGN_HOSTS, None])
def test_every_other_host_is_foreign(host: str | None) -> None:
    assert foreign_sign(connection(host)) is not None


def test_two_hosts_are_none() -> None:
    asked = connection("localhost")
    asked["headers"].append((b"host", b"localhost"))
    assert foreign_host(asked) is not None


@given(st.text(st.characters(max_codepoint=255), max_size=40))
def test_no_other_text_is_taken_for_loopback(host: str) -> None:
    if foreign_host(connection(host)) is None:
        assert is_loopback(host_name(host) or "")
        assert re.fullmatch(r"localhost|127(\.\d{1,3}){3}|\[[0-9a-f:.]+\]", re.sub(r":\d+$", "", host.lower()))


@pytest.mark.parametrize(
    ("peer", "is_here"),
    [
        (("127.0.0.1", 1), True), (("127.9.9.9", 1), True), (("::1", 1), True), (("::ffff:127.0.0.1", 1), True),
        (("10.0.0.1", 1), False), (("::ffff:10.0.0.1", 1), False), (("172.17.0.1", 1), False), (("", 0), False),
        (("testclient", 1), False), (None, False),
    ],
)  # fmt: skip
def test_the_peer_is_on_loopback(peer: Any, is_here: bool) -> None:
    assert (foreign_sign(connection(peer=peer)) is None) == is_here


def test_listed_names_are_as_good_as_loopbacks() -> None:
    names = frozenset({"llm.lan"})
    assert foreign_sign(connection("LLM.lan:8000"), names) is None
    assert foreign_sign(connection("llm.lan", x_forwarded_for="10.0.0.1"), names) is not None
    assert foreign_sign(connection("llm.lan.evil.example"), names) is not None


@pytest.mark.slow
@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN)
async def test_every_path_of_an_open_server_wants_a_key_of_what_is_not_from_here(
    tmp_path: Path, headers: Mapping[str, str]
) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        asked = paths_of(gateway)
        assert {path for _, path in asked} >= {"/v1/chat/completions", "/metrics", "/openapi.json", "/admin/v1/keys"}
        for method, path in asked:
            answer = await gateway.client.request(method, path, headers=headers)
            if path == "/healthz":
                assert answer.json() == {"status": "ok"}
            elif path == "/readyz":
                assert answer.json() == {"status": "ready"}, "the status is for balancers, the rest is not"
            else:
                assert "suffice keys create" in assert_error(answer, 401, "invalid_api_key")["message"]
        assert not await gateway.parts.store.list_keys()
        assert not await gateway.rows()


async def test_a_key_opens_an_open_server_through_a_proxy(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        proxied = {"host": "llm.example.com", "x-forwarded-for": "203.0.113.9"}
        use, _ = await add_key(gateway)
        chat = {"model": "auto", "messages": [{"role": "user", "content": "hi"}]}
        answer = await gateway.client.post("/v1/chat/completions", json=chat, headers=proxied | use)
        assert answer.status_code == 200
        assert_error(await gateway.client.get("/metrics", headers=proxied | use), 403, "wrong_key_scope")
        admin, _ = await add_key(gateway, scope="admin")
        for path in ("/admin/v1/tiers", "/metrics", "/openapi.json", "/docs"):
            assert (await gateway.client.get(path, headers=proxied | admin)).status_code == 200, path
        assert "tiers" in (await gateway.client.get("/readyz", headers=proxied | admin)).json()
        for wrong in (f"Bearer {make_key()}", "Bearer word", "Basic x"):
            answer = await gateway.client.get("/metrics", headers=proxied | {"authorization": wrong})
            assert_error(answer, 401, "invalid_api_key")


@pytest.mark.slow
async def test_a_server_that_is_open_on_purpose_never_opens_its_administration_to_others(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, auth__required="never")) as gateway:
        for headers in FOREIGN.values():
            assert (await gateway.client.get("/v1/models", headers=headers)).status_code == 200
            assert (await gateway.client.get("/metrics", headers=headers)).status_code == 200
            for method, path in paths_of(gateway):
                if path.startswith("/admin"):
                    assert_error(await gateway.client.request(method, path, headers=headers), 401, "invalid_api_key")
        assert (await gateway.client.get("/admin/v1/tiers")).status_code == 200


@pytest.mark.parametrize("required", ["auto", "never"])
async def test_listed_hosts_open_the_models_and_never_the_administration(tmp_path: Path, required: str) -> None:
    options = {"auth__required": required, "server__allowed_hosts": ("LLM.lan",)}
    async with running(make_settings(tmp_path, **options)) as gateway:
        for host, status in (("llm.lan:80", 200), ("localhost", 200), ("other.lan", 401)):
            answer = await gateway.client.get("/v1/models", headers={"host": host})
            assert answer.status_code == status, host
        assert_error(await gateway.client.get("/admin/v1/tiers", headers={"host": "llm.lan"}), 401, "invalid_api_key")


async def test_a_trusted_proxy_closes_an_open_server(tmp_path: Path) -> None:
    """What it passes on looks local where it names nobody, so nothing without a key is let in."""
    async with running(make_settings(tmp_path, server__trusted_proxies=("127.0.0.1",))) as gateway:
        for path in ("/v1/models", "/metrics", "/admin/v1/tiers"):
            assert_error(await gateway.client.get(path), 401, "invalid_api_key")


async def test_an_old_proxy_that_says_nothing_administers_nothing(tmp_path: Path) -> None:
    """nginx with ``proxy_pass`` alone writes a Host of loopback and no header of its own, but HTTP/1.0."""
    async with running(make_settings(tmp_path)) as gateway:
        reader, writer = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))
        writer.write(b"GET /admin/v1/tiers HTTP/1.0\r\nhost: localhost\r\n\r\n")
        answer = await reader.read()
        writer.close()
        assert b" 401 " in answer.split(b"\r\n")[0]


async def test_an_unknown_peer_is_nobody_of_this_machine(tmp_path: Path) -> None:
    """A Unix socket is where proxies like to connect, and a call in the process has no peer at all."""
    settings = make_settings(tmp_path)
    app = create_app(settings, backends=echo_backends())
    path = tmp_path / "suffice.sock"
    config = uvicorn.Config(app, uds=str(path), http=BoundedHttpProtocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    async with app.router.lifespan_context(app):
        serving = asyncio.create_task(server._serve())
        await eventually(lambda: server.started)
        inside = httpx.ASGITransport(app, client=None)  # type: ignore[arg-type]
        for transport in (httpx.AsyncHTTPTransport(uds=str(path)), inside):
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                for asked in ("/v1/models", "/metrics", "/admin/v1/keys"):
                    assert_error(await client.get(asked), 401, "invalid_api_key")
        server.should_exit = True
        await serving


def paths_of(gateway: Gateway) -> list[tuple[str, str]]:
    """Every method and path that the application has."""
    found = []
    for route in gateway.app.router.routes:
        assert isinstance(route, Route), "another kind of route needs its own check of who may come in"
        path = re.sub(r"{(\w+)(:\w+)?}", r"\1", route.path)
        found += [(method, path) for method in sorted(route.methods or ()) if method != "HEAD"]
    return found
