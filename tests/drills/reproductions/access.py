"""Findings of who gets in, and what one caller learns of another."""

from __future__ import annotations

import random
from typing import Any

import httpx

from tests.drills.reproductions.stage import (
    CHAT,
    ECHO,
    KEYS,
    LOCAL,
    QUIET,
    Found,
    Parts,
    Stage,
    add_key,
    asking,
    client_of,
    message_of,
    read_sqlite,
    reproduces,
    status_of,
)
from tests.drills.tenant_isolation import make_text

_SECRET = "the-prompt-of-somebody"
_ADMIN = "/admin/v1"


@reproduces("H3", "tenant A sends a text, tenant B the same and another of its shape")
async def prefix_oracle(stage: Stage) -> Found:
    rng = random.Random(1)
    text, other = make_text(rng), make_text(rng)
    async with stage.serving(LOCAL + QUIET + KEYS) as server:
        first, second = await add_key(server, "a"), await add_key(server, "b")

        async def cached(headers: dict[str, str], content: str) -> int:
            async with client_of(server, headers) as client:
                answer = await client.post(CHAT, json=asking(content, "tier-1", max_tokens=1))
            answer.raise_for_status()
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        await cached(first, text)
        of_other, of_same = await cached(second, other), await cached(second, text)
    return Found(of_same > of_other, f"cached_tokens: {of_same} of the same text, {of_other} of another")


@reproduces("H6", "a server on loopback, asked as a proxy of the same host forwards, without a key")
async def behind_proxy(stage: Stage) -> Found:
    headers = {"x-forwarded-for": "203.0.113.9", "host": "llm.example.com"}
    async with stage.serving(ECHO + QUIET) as server, client_of(server, headers) as client:
        told = await status_of(client.put(f"{_ADMIN}/kill-switch", json={"on": True}))
        made = await status_of(client.post(f"{_ADMIN}/keys", json={"name": "x", "scope": "admin"}))
    return Found(told == "200" or made == "201", f"kill switch: {told}; an admin key: {made}")


@reproduces("H7", "an open server asked with the Host of a page that was bound to it anew")
async def rebound_host(stage: Stage) -> Found:
    async with stage.serving(ECHO + QUIET + '[log]\nprompts = "full"\n') as server:
        async with client_of(server) as client:
            answer = await client.post(CHAT, json=asking(_SECRET))
            request_id = answer.headers["x-suffice-request-id"]
        async with client_of(server, {"host": f"rebound.evil.example:{server.port}"}) as client:
            read = await client.get(f"{_ADMIN}/requests/{request_id}")
            keys = await status_of(client.get(f"{_ADMIN}/keys"))
    shown = "with the prompt" if _SECRET in read.text else "without the prompt"
    return Found(_SECRET in read.text or keys == "200", f"a request: {read.status_code}, {shown}; keys: {keys}")


@reproduces("M7", "the last admin key is revoked")
async def revoked_admin(stage: Stage) -> Found:
    async with stage.serving(ECHO + QUIET + "[auth]\nkey_cache_s = 0\n") as server, client_of(server) as client:
        before = await status_of(client.get(f"{_ADMIN}/keys"))
        await add_key(server, scope="admin")
        closed = await status_of(client.get(f"{_ADMIN}/keys"))
        (key_id,) = read_sqlite(server, "SELECT key_id FROM api_keys")[0]
        url = f"sqlite:///{server.folder}/suffice.db"
        done = await stage.command("keys", "revoke", str(key_id), SUFFICE_DATABASE__URL=url)
        after = await status_of(client.get(f"{_ADMIN}/keys"))
    assert done.status == 0, done.output
    return Found(after == "200", f"without a key: first {before}, with an admin key made {closed}, revoked {after}")


@reproduces("M9", "a key that is to use one policy alone names another one")
async def other_policy(stage: Stage) -> Found:
    policies = '[policy]\nallowed_regions = ["eu"]\n[policies.open]\nallowed_regions = ["us"]\n'
    parts = Parts()
    async with stage.serving(ECHO + QUIET + KEYS + policies) as server:
        url = f"sqlite:///{server.folder}/suffice.db"
        environ = {"SUFFICE_DATABASE__URL": url, "SUFFICE_SERVER__PORT": str(server.port)}
        config = str(server.folder / "suffice.toml")
        bound = await stage.command("keys", "create", "-c", config, "--allowed-policy", "default", **environ)
        if bound.status == 0:
            secret = next(word for word in bound.output.split() if word.startswith("sk-suffice-") and len(word) > 40)
            headers = {"authorization": f"Bearer {secret}"}
        else:
            headers = await add_key(server)
            parts.note(is_open=True, seen="keys create knows no --allowed-policy")
        async with client_of(server, headers) as client:
            plain = await _tier_of(client.post(CHAT, json=asking("hi")))
            chosen = await _tier_of(client.post(CHAT, json=asking("hi") | {"suffice": {"policy": "open"}}))
    parts.note(chosen.startswith("200"), f"default policy (eu): {plain}; policy open (us): {chosen}")
    return parts.found()


async def _tier_of(request: Any) -> str:
    answer: httpx.Response = await request
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.json()['error']['code']}"
    return f"200 by {answer.headers['x-suffice-tier']}"


@reproduces("L5", "an audited change with X-Forwarded-For; an administrator reads a prompt")
async def audit_remote(stage: Stage) -> Found:
    parts = Parts()
    async with stage.serving(ECHO + QUIET + KEYS + '[log]\nprompts = "full"\n') as server:
        admin, user = await add_key(server, scope="admin"), await add_key(server)
        async with client_of(server, user) as client:
            answer = await client.post(CHAT, json=asking(_SECRET))
        forwarded = admin | {"x-forwarded-for": "203.0.113.9"}
        async with client_of(server, forwarded) as client:
            (await client.put(f"{_ADMIN}/kill-switch", json={"on": False})).raise_for_status()
        remote = str(read_sqlite(server, "SELECT remote FROM admin_audit")[0][0])
        parts.note("203.0.113.9" in remote, f"remote is {remote}")
        async with client_of(server, admin) as client:
            read = await client.get(f"{_ADMIN}/requests/{answer.headers['x-suffice-request-id']}")
        assert _SECRET in read.text, message_of(read)
        num = len(read_sqlite(server, "SELECT audit_id FROM admin_audit")) - 1
        parts.note(num == 0, f"{num} audit row of the reading")
    return parts.found()
