"""Findings of remote models that fail, lie or never end."""

from __future__ import annotations

import asyncio
import gzip
import json
import time

import httpx

from backends.testing import Script
from tests.backends.provider.behaviours import BEHAVIOURS, Behaviour
from tests.backends.provider.call import ProviderCall
from tests.backends.provider.server import ProviderServer
from tests.drills.kit import free_port
from tests.drills.reproductions.stage import (
    CHAT,
    KEYS,
    QUIET,
    Found,
    Parts,
    Proxy,
    Stage,
    add_key,
    asking,
    client_of,
    connected,
    message_of,
    reproduces,
    status_of,
)

_BOMB = gzip.compress(b" " * (64 * 2**20))
_TIER = """
[[tiers]]
name = "t{tier}"
model = "m{tier}"
price_per_request_usd = 0.000{tier}
[models.m{tier}]
kind = "remote"
urls = ["{url}"]
model = "provider-model"
timeouts.first_token_s = 10.0
{more}
"""
# What no caller is to learn: addresses, settings, exceptions and what the model's server wrote.
_INSIDE = (
    "127.0.0.1",
    "http://",
    "postgresql://",
    "api_key_env",
    "Traceback",
    "secret-internal-detail",
    "Error(",
    "sk-",
)


def remote(*urls: str, more: str = "") -> str:
    """Return the configuration of a ladder of remote tiers."""
    tiers = [_TIER.format(tier=place + 1, url=url, more=more) for place, url in enumerate(urls)]
    return "".join(tiers) + QUIET


async def _traceback(call: ProviderCall) -> None:
    await call.error(500, "Traceback secret-internal-detail!")


async def _bomb(call: ProviderCall) -> None:
    await call.start(headers={"content-type": "application/json", "content-encoding": "gzip"})
    await call.write(_BOMB)
    await call.end()


async def _endless(call: ProviderCall) -> None:
    await call.stream(1)
    event = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "provider-model"}
    event |= {"choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}]}
    await call.repeat(b"data: " + json.dumps(event).encode() + b"\n\n", delay_s=0.002)


async def _huge_usage(call: ProviderCall) -> None:
    message = {"role": "assistant", "content": "hello"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 2**40, "completion_tokens": 2**40, "total_tokens": 2**41}
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": "provider-model", "choices": [choice]}
    if not call.seen.body.get("stream"):
        await call.json(200, body | {"usage": usage})
        return
    await call.start()
    chunk = body | {"object": "chat.completion.chunk", "usage": None}
    await call.event(chunk | {"choices": [{"index": 0, "delta": message, "finish_reason": "stop"}]})
    await call.event(chunk | {"choices": [], "usage": usage})
    await call.done()


async def _rested(call: ProviderCall) -> None:
    """Ask one caller to stay away for an hour, and answer everybody else."""
    await BEHAVIOURS["429_for_an_hour" if call.num_seen == 1 else "ok"](call)


_HOSTILE: dict[str, Behaviour] = {
    "traceback": _traceback,
    "bomb": _bomb,
    "endless": _endless,
    "huge_usage": _huge_usage,
    "rested": _rested,
}


def _provider() -> ProviderServer:
    return ProviderServer(Script(text="one two three four five six"), more=_HOSTILE)


@reproduces("M2", "the second of two remote tiers refuses connections")
async def one_tier_down(stage: Stage) -> Found:
    with _provider() as provider:
        toml = remote(provider.url("ok"), f"http://127.0.0.1:{free_port()}/v1")
        async with stage.serving(toml) as server, client_of(server) as client:
            told = await status_of(client.post(CHAT, json=asking("hi", "t1")))
            ready = await client.get("/readyz")
    return Found(ready.status_code == 503 and told == "200", f"the first tier: {told}; /readyz: {ready.status_code}")


@reproduces("M3", "an upstream's 500 with its traceback, and /readyz, both as seen by callers")
async def upstream_text(stage: Stage) -> Found:
    parts = Parts()
    with _provider() as provider:
        toml = remote(provider.url("traceback"), provider.url("401")) + KEYS
        async with stage.serving(toml) as server:
            headers = await add_key(server)
            async with client_of(server, headers) as client:
                for model in ("t1", "t2"):
                    parts.note(*_inside(message_of(await client.post(CHAT, json=asking("hi", model)))))
            async with client_of(server) as client:
                parts.note(*_inside((await client.get("/readyz")).text, "/readyz without a key"))
    parts.note(*await _dead_database(stage))
    return parts.found()


async def _dead_database(stage: Stage) -> tuple[bool, str]:
    """What /readyz tells those without a key when the database is gone."""
    url = await stage.cluster.database()
    proxy = Proxy(int(url.rpartition(":")[2].partition("/")[0]))
    await proxy.open()
    with _provider() as provider:
        through = url.replace(f":{proxy.target}/", f":{proxy.port}/")
        async with stage.serving(remote(provider.url("ok")) + KEYS, through) as server, client_of(server) as client:
            headers = await add_key(server, url=url)
            await proxy.cut()
            await status_of(client.post(CHAT, json=asking("hi"), headers=headers))
            await asyncio.sleep(1.0)
            return _inside((await client.get("/readyz")).text, "and with the database gone")


def _inside(told: str, of: str = "a caller") -> tuple[bool, str]:
    shown = [each for each in _INSIDE if each in told]
    return bool(shown), f"{of} is shown {', '.join(shown) or 'nothing of the inside'}"


@reproduces("S3", "an upstream that refuses the key, one that breaks off, one whose event is damaged")
async def shown_inside(stage: Stage) -> Found:
    parts = Parts()
    names = ("401", "reset_after_3_tokens", "malformed_after_3_tokens")
    with _provider() as provider:
        toml = remote(*(provider.url(each) for each in names))
        async with stage.serving(toml) as server, client_of(server) as client:
            for place, name in enumerate(names):
                body = asking("hi", f"t{place + 1}", stream=place > 0)
                answer = await client.post(CHAT, json=body)
                told = answer.text.partition('"error"')[2]
                # A piece of the damaged event's bytes is of the inside, too.
                is_open, seen = _inside(told.replace("nonsense", "sk-"), name)
                parts.note(is_open, seen)
    return parts.found()


@reproduces("S4", "an upstream that refuses our key")
async def refused_key(stage: Stage) -> Found:
    with _provider() as provider:
        async with stage.serving(remote(provider.url("401"))) as server, client_of(server) as client:
            answer = await client.post(CHAT, json=asking("hi"))
            told, again = await status_of(_given(answer)), answer.headers.get("retry-after")
    return Found(told != "502 model_refused", f"{told}, Retry-After: {again}; documented: 502 model_refused, none")


async def _given(answer: httpx.Response) -> httpx.Response:
    return answer


@reproduces("S5", "an upstream answers 64 MiB of blanks in 64 kB of gzip, twice")
async def compressed_answer(stage: Stage) -> Found:
    with _provider() as provider:
        async with stage.serving(remote(provider.url("bomb"))) as server, client_of(server) as client:
            await client.get("/v1/models")
            before = server.rss_bytes()
            told = [await status_of(client.post(CHAT, json=asking("hi"))) for _ in range(2)]
            growth = server.rss_bytes() - before
    return Found(growth > 64 * 2**20, f"{told[0]}, memory grew by {growth / 2**20:.0f} MiB")


@reproduces("S6", "an upstream that never ends, max_tokens 8, streamed")
async def endless_answer(stage: Stage) -> Found:
    num_events, is_ended = 0, False
    with _provider() as provider:
        async with stage.serving(remote(provider.url("endless"))) as server, client_of(server) as client:
            begun_s = time.monotonic()
            async with client.stream("POST", CHAT, json=asking("hi", stream=True, max_tokens=8)) as answer:
                async for line in answer.aiter_lines():
                    num_events += line.startswith("data:")
                    is_ended = line == "data: [DONE]" or '"error"' in line
                    if is_ended or num_events > 1000 or time.monotonic() - begun_s > 10.0:
                        break
    return Found(not is_ended, f"{'ended' if is_ended else 'still going'} after {num_events} events")


@reproduces("L8", "an upstream counts 2^40 tokens, with PostgreSQL")
async def huge_usage(stage: Stage) -> Found:
    url = await stage.cluster.database()
    with _provider() as provider:
        async with stage.serving(remote(provider.url("huge_usage")), url) as server, client_of(server) as client:
            told = await status_of(client.post(CHAT, json=asking("hi")))
        async with connected(url) as connection:
            num_rows = await connection.fetchval("SELECT count(*) FROM requests WHERE status_code = 200")
    return Found(told != "200" or num_rows == 0, f"{told}, {num_rows} row of an answer")


@reproduces("L9", "one 429 with Retry-After: 3600 of an upstream that answers all others; asked for 10 s")
async def rested_replica(stage: Stage) -> Found:
    told: list[str] = []
    with _provider() as provider:
        async with stage.serving(remote(provider.url("rested"))) as server, client_of(server) as client:
            begun_s = time.monotonic()
            while "200" not in told and time.monotonic() - begun_s < 10.0:
                told.append(await status_of(client.post(CHAT, json=asking("hi"))))
                await asyncio.sleep(0.25)
            waited_s = time.monotonic() - begun_s
    return Found("200" not in told, f"first {told[0]}; after {waited_s:.1f} s: {told[-1]}")
