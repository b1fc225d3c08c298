"""Holds, by name, everything :class:`tests.backends.provider.server.ProviderServer` can do to a client.

Most are faults seen in the field: servers that answer late, never, in pieces, half, twice, in the wrong form, or with a
good status and a bad body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from backends.testing import count_prompt_tokens, split_tokens, token_id
from tests.backends.provider.call import ProviderCall
from tests.backends.provider.openai_codec import embeddings_body, usage_body

Behaviour = Callable[[ProviderCall], Awaitable[None]]
BEHAVIOURS: dict[str, Behaviour] = {}
_DIED = {"error": {"message": "engine died", "type": "InternalServerError", "code": 500}}

SIGNED = (
    {"type": "thinking", "thinking": "", "signature": "c2lnbmVk"},
    {"type": "redacted_thinking", "data": "aGlkZGVu"},
)


def _named(behaviour: Behaviour) -> Behaviour:
    BEHAVIOURS[behaviour.__name__] = behaviour
    return behaviour


def _status(name: str, status: int, message: str, headers: dict[str, str] | None = None, **fields: Any) -> None:
    async def answer(call: ProviderCall) -> None:
        await call.error(status, message, headers, **fields)

    BEHAVIOURS[name] = answer


def _whole(name: str, status: int, body: bytes, headers: dict[str, str]) -> None:
    BEHAVIOURS[name] = lambda call: call.whole(status, body, headers)


def _stream(name: str, *acts: Behaviour, num_tokens: int | None = 0) -> None:
    """Register an event stream of the answer's first tokens (None: the whole of it), then the acts in turn."""

    async def answer(call: ProviderCall) -> None:
        await call.stream(num_tokens)
        for act in acts:
            await act(call)

    BEHAVIOURS[name] = answer


def _event(body: Any) -> Behaviour:
    return lambda call: call.event(body)


def _write(data: bytes) -> Behaviour:
    return lambda call: call.write(data)


def _repeat(data: bytes, delay_s: float = 0.0) -> Behaviour:
    return lambda call: call.repeat(data, delay_s=delay_s)


async def _reset(call: ProviderCall) -> None:
    # What was written before must reach the client before the reset does.
    await asyncio.sleep(0.05)
    call.reset()


_end, _done, _hang = ProviderCall.end, ProviderCall.done, ProviderCall.until_gone


# --- good answers ----------------------------------------------------------------------------------------------------


@_named
async def ok(call: ProviderCall) -> None:
    """Answer as scripted, streamed or whole as asked."""
    if not call.seen.body.get("stream"):
        await call.answer_whole()
        return
    await asyncio.sleep(call.script.first_delay_s)
    await call.stream(delay_s=call.script.token_delay_s or 0.0)
    await call.done()


@_named
async def slow(call: ProviderCall) -> None:
    """Take 0.3 s to the first token."""
    await asyncio.sleep(0.3)
    await call.stream()
    await call.done()


@_named
async def slow_tokens(call: ProviderCall) -> None:
    """Take 30 ms for each token."""
    await call.stream(delay_s=0.03)
    await call.done()


@_named
async def torn_sse(call: ProviderCall) -> None:
    """Send every byte in a write of its own: events, lines and characters are torn everywhere."""
    await call.start()
    for byte in call.stream_bytes():
        await call.write(bytes([byte]))
    await call.end()


@_named
async def one_write(call: ProviderCall) -> None:
    """Send the whole stream at once."""
    await call.start()
    await call.write(call.stream_bytes())
    await call.end()


@_named
async def crlf(call: ProviderCall) -> None:
    """End lines with carriage return and newline, and begin with a byte order mark."""
    await call.start()
    await call.write(b"\xef\xbb\xbf")
    for chunk in call.chunks():
        await call.write(b"data: " + orjson.dumps(chunk) + b"\r\n\r\n")
    await call.write(b"data: [DONE]\r\n\r\n")
    await call.end()


@_named
async def comments(call: ProviderCall) -> None:
    """Send keep-alive comments, ids and event names between chunks."""
    await call.start()
    for at, chunk in enumerate(call.chunks()):
        await call.write(b": ping\n\nid: %d\nevent: message\nretry: 1\ndata:" % at + orjson.dumps(chunk) + b"\n\n")
    await call.done()


@_named
async def sets_cookie(call: ProviderCall) -> None:
    """Set a cookie with every answer, as load balancers do."""
    await call.start(headers={"content-type": "text/event-stream", "set-cookie": "seen=before; Path=/"})
    await call.write(call.stream_bytes())
    await call.end()


@_named
async def signs(call: ProviderCall) -> None:
    """Sign reasoning, and hide some, as LiteLLM's proxy passes it on from Anthropic."""
    await call.start()
    is_thinking = False
    for chunk in call.chunks():
        delta = chunk["choices"][0].get("delta", {}) if chunk["choices"] else {}
        if is_thinking and not delta.get("reasoning_content"):
            for block in SIGNED:
                signing = {**chunk, "choices": [{"index": 0, "delta": {"thinking_blocks": [block]}}]}
                await call.write(b"data: " + orjson.dumps(signing) + b"\n\n")
        is_thinking = bool(delta.get("reasoning_content"))
        await call.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
    await call.done()


@_named
async def ignores_stop(call: ProviderCall) -> None:
    """Know no stop strings, as transformers' server does."""
    call.seen.body.pop("stop", None)
    await ok(call)


@_named
async def no_stream_options(call: ProviderCall) -> None:
    """Refuse ``stream_options`` as older servers do."""
    if "stream_options" in call.seen.body:
        await call.error(400, "Unrecognized request argument supplied: stream_options")
        return
    await call.stream()
    await call.done()


@_named
async def no_usage(call: ProviderCall) -> None:
    """Count no tokens."""
    await call.stream(with_usage=False)
    await call.done()


@_named
async def usage_never(call: ProviderCall) -> None:
    """Finish the answer, then fall silent instead of counting tokens."""
    await call.stream(with_usage=False)
    await call.until_gone()


# A whole answer although a stream was asked for; no [DONE]; text after it, on a connection that stays open.
BEHAVIOURS["not_streamed"] = ProviderCall.answer_whole
_stream("no_done", _end, num_tokens=None)
_stream("after_done", _write(b"data: [DONE]\n\ndata: {nonsense\n\n"), _hang, num_tokens=None)

# --- failures before the first token ---------------------------------------------------------------------------------

_status("400", 400, "temperature must be at most 2", param="temperature", code="invalid_value")
_status("401", 401, "Incorrect API key provided: sk-secret")
_status("402", 402, "Insufficient credits")
_status("403", 403, "Key not allowed here")
_status("404", 404, "The model does not exist.")
_status("422", 422, "unprocessable")
_status("429", 429, "Rate limit reached", {"retry-after": "0"})
_status("429_for_an_hour", 429, "Quota used up", {"retry-after": "3600"})
_status("500", 500, "internal error")
_status("503", 503, "loading model")
_status("503_for_an_hour", 503, "maintenance", {"retry-after": "3600"})
_status("529", 529, "overloaded")
_status(
    "context_openai",
    400,
    "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (4900 in the messages, "
    "100 in the completion). Please reduce the length of the messages or completion.",
    code="context_length_exceeded",
)
_status(
    "context_vllm",
    400,
    "'max_tokens' or 'max_completion_tokens' is too large: 9000. This model's maximum context length is 4096 tokens "
    "and your request has 30 input tokens (9000 > 4096 - 30).",
    code=400,
)
_status(
    "context_llamacpp",
    400,
    "the request exceeds the available context size, try increasing it",
    type="exceed_context_size_error",
    code=400,
    n_prompt_tokens=4900,
    n_ctx=4096,
)


@_named
async def flaky(call: ProviderCall) -> None:
    """Fail every first and second of three requests."""
    if call.num_seen % 3:
        await call.error(503, "not yet")
        return
    await ok(call)


@_named
async def poisoned(call: ProviderCall) -> None:
    """Fail on whoever says poison."""
    if "poison" in str(call.seen.body.get("messages")):
        await call.error(500, "engine died")
        return
    await ok(call)


@_named
async def reset_before_head(call: ProviderCall) -> None:
    """Reset the connection instead of answering."""
    call.reset()


_whole("redirect", 307, b"", {"location": "http://127.0.0.1:9/v1/chat/completions"})
# A captive portal; a reverse proxy whose server is gone; an error object under a good status.
_whole("html", 200, b"<html>Welcome!</html>", {"content-type": "text/html"})
_whole("html_502", 502, b"<html><h1>502 Bad Gateway</h1></html>", {"content-type": "text/html"})
_whole("json_error_200", 200, orjson.dumps(_DIED), {"content-type": "application/json"})

_stream("empty_body", _end)
_stream("empty_stream", _done)
_stream("error_event", _event(_DIED), _done)
_stream("malformed_json", _write(b'data: {"choices": [{"delta": {"content": "a"\n\n'), _done)
_stream("wrong_types", _event({"object": "chat.completion.chunk", "choices": [{"delta": {"content": 7}}]}), _done)
_stream("huge_line", _repeat(b"x" * 1_000_000))
_stream("hang_after_head", _hang)
# Alive by the socket, dead by its purpose.
_stream("pings_forever", _repeat(b": ping\n\n", 0.01))
_stream("reset_after_head", _write(b": hello\n\n"), _reset)
BEHAVIOURS["hang"] = _hang

# --- failures after the first token ----------------------------------------------------------------------------------

_stream("reset_after_3_tokens", _reset, num_tokens=3)
_stream("close_after_3_tokens", _end, num_tokens=3)
_stream("done_after_3_tokens", _done, num_tokens=3)
_stream("cut_after_3_tokens", _write(b'data: {"choices": [{"delta": {"con'), _end, num_tokens=3)
_stream("stall_after_3_tokens", _hang, num_tokens=3)
_stream("ping_after_3_tokens", _repeat(b": ping\n\n", 0.01), num_tokens=3)
_stream("error_after_3_tokens", _event(_DIED), _done, num_tokens=3)
_stream("malformed_after_3_tokens", _write(b"data: nonsense\n\n"), _done, num_tokens=3)


@_named
async def unknown_reason(call: ProviderCall) -> None:
    """Finish for a reason nobody documented."""
    await call.start()
    for chunk in call.chunks():
        if chunk["choices"] and chunk["choices"][0]["finish_reason"]:
            chunk["choices"][0]["finish_reason"] = "abort"
        await call.event(chunk)
    await call.done()


@_named
async def two_endings(call: ProviderCall) -> None:
    """Send the finish reason twice, then text."""
    await call.start()
    for chunk in call.chunks():
        await call.event(chunk)
        if chunk["choices"] and chunk["choices"][0]["finish_reason"]:
            await call.event(chunk)
    await call.done()


# --- everything but completions --------------------------------------------------------------------------------------


async def answer_other(call: ProviderCall) -> None:
    """Answer ``/v1/embeddings``, ``/v1/models`` and vLLM's ``/tokenize``."""
    body = call.seen.body
    if call.seen.behaviour in ("500", "503", "hang", "429"):
        await BEHAVIOURS[call.seen.behaviour](call)
    elif call.seen.path == "/v1/embeddings":
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        await call.json(200, embeddings_body(body, [_vector(text) for text in texts]))
    elif call.seen.path == "/tokenize":
        usage = usage_body(call.request, call.script, 0, 0)
        await call.json(
            200, {"count": usage["prompt_tokens"], "tokens": list(range(count_prompt_tokens(call.request)))}
        )
    elif call.seen.path == "/v1/models":
        await call.json(200, {"object": "list", "data": [{"id": "provider-model", "object": "model"}]})
    else:
        await call.error(404, f"no path {call.seen.path!r}")


def _vector(text: str) -> list[float]:
    values = [0.5] * 8
    for token in split_tokens(text):
        values[token_id(token) % 8] += 2.0
    return values
