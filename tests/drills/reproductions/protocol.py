"""Findings of heads, keys, old clients and the shapes of answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.drills.kit import Server, within
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
    exchange,
    message_of,
    read_sqlite,
    reproduces,
    sqlite_path,
)

_CANARY = "wal-kanarienvogel-41d7"
# Tier 4 of the built-in ladder thinks before it answers.
_THINKING = LOCAL.replace("builtin:tier1", "builtin:tier3") + "thinking = true\n"
_CHECKED_ONCE = """
[learning]
enabled = false
[monitor]
enabled = false
[policy]
sampling_share = 1.0
[verification]
poll_s = 0.05
allowance_usd = 100.0
"""


def _head(more: str) -> bytes:
    return f"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n{more}\r\n".encode()


def _status_line(answer: bytes) -> str:
    return answer.partition(b"\r\n")[0].decode("latin-1") or "closed"


@reproduces("L7", "a head of 70 KB in one piece, where 64 KB is the limit")
async def long_head(stage: Stage) -> Found:
    async with stage.serving(ECHO + QUIET) as server:
        told = _status_line(await exchange(server, _head(f"x-long: {'x' * 70_000}\r\n")))
    return Found(" 200" in told, told)


@reproduces("S8", "a prompt beyond every context")
async def context_message(stage: Stage) -> Found:
    async with stage.serving(ECHO + QUIET) as server, client_of(server) as client:
        answer = await client.post(CHAT, json=asking("word " * 20_000))
    message = message_of(answer)
    return Found("maximum context length is" not in message, f"{answer.status_code}: {message[:90]}")


@reproduces("S9", "HTTP/1.0, heads of 70 and 109 kB, a key and 0xA0, logprobs of both kinds, a checked prompt's file")
async def small_things(stage: Stage) -> Found:
    parts = Parts()
    async with stage.serving(ECHO + QUIET + KEYS) as server:
        headers = await add_key(server)
        await _old_client(server, headers, parts)
        await _long_heads(server, parts)
        blank = f"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\nauthorization: {headers['authorization']}"
        told = _status_line(await exchange(server, blank.encode() + b"\xa0\r\n\r\n"))
        parts.note(" 200" in told, f"key and 0xA0: {told}")
    async with stage.serving(LOCAL + QUIET) as server, client_of(server) as client:
        answer = await client.post("/v1/completions", json=_sampled())
        shown = answer.json()["choices"][0]["logprobs"]
        pairs = list(zip(shown["tokens"], shown["top_logprobs"] or [], strict=False))
        lacking = sum(token not in (top or {}) for token, top in pairs)
        parts.note(lacking > 0 or not pairs, f"top_logprobs lacks {lacking} of {len(shown['tokens'])} sampled tokens")
    async with stage.serving(_THINKING + QUIET) as server, client_of(server) as client:
        answer = await client.post(CHAT, json=asking("12 + 7 * 3 = ?", "tier-1", max_tokens=3, logprobs=True))
        logprobs = answer.json()["choices"][0]["logprobs"]
        parts.note(logprobs is None, f"logprobs of a thought alone: {json.dumps(logprobs)[:40]}")
    await _checked_prompt(stage, parts)
    return parts.found()


def _sampled() -> dict[str, Any]:
    body = {"model": "tier-1", "prompt": "The sea is", "max_tokens": 16, "temperature": 1.5, "seed": 1}
    return body | {"logprobs": 0, "ignore_eos": True}


async def _old_client(server: Server, headers: dict[str, str], parts: Parts) -> None:
    body = json.dumps(asking("hi", stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nhost: a\r\nauthorization: {headers['authorization']}\r\n"
    data = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    answer = await exchange(server, data)
    is_chunked = b"transfer-encoding: chunked" in answer.lower()
    parts.note(is_chunked, f"HTTP/1.0 stream: {'chunked' if is_chunked else 'not chunked'}")


async def _long_heads(server: Server, parts: Parts) -> None:
    many = "".join(f"x-{place}: y\r\n" for place in range(10_000))
    for name, more in (("70 kB in one header", f"x-long: {'x' * 70_000}\r\n"), ("10,000 headers", many)):
        told = _status_line(await exchange(server, _head(more)))
        parts.note(" 200" in told, f"{name}: {told.partition(' ')[2]}")


async def _checked_prompt(stage: Stage, parts: Parts) -> None:
    """A prompt drawn for a check is to be gone from the files some time after the check is done."""
    async with stage.serving(ECHO + _CHECKED_ONCE) as server:
        async with client_of(server) as client:
            body = asking(f"{_CANARY} " * 300, suffice={"max_tier": 1})
            (await client.post(CHAT, json=body)).raise_for_status()
        query = "SELECT status FROM verifications"
        assert await within(60.0, lambda: read_sqlite(server, query) == [("done",)]), read_sqlite(server, query)
        await within(90.0, lambda: _copies(server) == 0)
        parts.note(_copies(server) > 0, f"{_copies(server)} copies of a checked prompt in the files after 90 s")
    await asyncio.sleep(0)


def _copies(server: Server) -> int:
    files = [each for each in sqlite_path(server).parent.iterdir() if each.name.startswith("suffice.db")]
    return sum(each.read_bytes().count(_CANARY.encode()) for each in files)
