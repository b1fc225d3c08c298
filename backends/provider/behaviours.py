"""Holds, by name, everything :class:`backends.provider.server.ProviderServer` can do to a client.

Most are faults seen in the field: servers that answer late, never, in pieces, half, twice, in the wrong form, or with a
good status and a bad body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from backends.provider.call import ProviderCall
from backends.provider.openai_codec import embeddings_body, usage_body
from backends.testing import count_prompt_tokens, split_tokens, token_id

Behaviour = Callable[[ProviderCall], Awaitable[None]]
BEHAVIOURS: dict[str, Behaviour] = {}


def _named(behaviour: Behaviour) -> Behaviour:
    BEHAVIOURS[behaviour.__name__] = behaviour
    return behaviour


def _status(name: str, status: int, message: str, headers: dict[str, str] | None = None, **fields: Any) -> None:
    async def answer(call: ProviderCall) -> None:
        await call.error(status, message, headers, **fields)

    BEHAVIOURS[name] = answer


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
    body = b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in call.chunks()) + b"data: [DONE]\n\n"
    for at in range(len(body)):
        await call.write(body[at : at + 1])
    await call.end()


@_named
async def one_write(call: ProviderCall) -> None:
    """Send the whole stream at once."""
    await call.start()
    await call.write(
        b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in call.chunks()) + b"data: [DONE]\n\n"
    )
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
async def not_streamed(call: ProviderCall) -> None:
    """Answer whole although a stream was asked for."""
    await call.answer_whole()


@_named
async def no_done(call: ProviderCall) -> None:
    """End the stream without ``[DONE]``."""
    await call.stream()
    await call.end()


@_named
async def ignores_stop(call: ProviderCall) -> None:
    """Know no stop strings, as transformers' server does."""
    call.seen.body.pop("stop", None)
    await ok(call)


@_named
async def after_done(call: ProviderCall) -> None:
    """Go on after ``[DONE]``, and keep the connection open."""
    await call.stream()
    await call.write(b"data: [DONE]\n\ndata: {nonsense\n\n")
    await call.until_gone()


@_named
async def no_usage(call: ProviderCall) -> None:
    """Count no tokens."""
    await call.start()
    for chunk in call.chunks(with_usage=False):
        await call.event(chunk)
    await call.done()


@_named
async def no_stream_options(call: ProviderCall) -> None:
    """Refuse ``stream_options`` as older servers do."""
    if "stream_options" in call.seen.body:
        await call.error(400, "Unrecognized request argument supplied: stream_options")
        return
    await call.stream()
    await call.done()


@_named
async def usage_never(call: ProviderCall) -> None:
    """Finish the answer, then fall silent instead of counting tokens."""
    await call.start()
    for chunk in call.chunks(with_usage=False):
        await call.event(chunk)
    await call.until_gone()


# --- failures before the first token ---------------------------------------------------------------------------------

_status("400", 400, "temperature must be at most 2", param="temperature", code="invalid_value")
_status("401", 401, "Incorrect API key provided: sk-secret")
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
async def redirect(call: ProviderCall) -> None:
    """Point elsewhere."""
    await call.whole(307, b"", {"location": "http://127.0.0.1:9/v1/chat/completions"})


@_named
async def html(call: ProviderCall) -> None:
    """Answer 200 with a web page, as a captive portal does."""
    await call.whole(200, b"<html>Welcome!</html>", {"content-type": "text/html"})


@_named
async def html_502(call: ProviderCall) -> None:
    """Answer as a reverse proxy whose server is gone."""
    await call.whole(502, b"<html><h1>502 Bad Gateway</h1></html>", {"content-type": "text/html"})


@_named
async def json_error_200(call: ProviderCall) -> None:
    """Answer 200 with an error object."""
    await call.json(200, {"error": {"message": "engine died", "code": 500}})


@_named
async def empty_body(call: ProviderCall) -> None:
    """Answer 200 with an event stream of no bytes."""
    await call.start()
    await call.end()


@_named
async def empty_stream(call: ProviderCall) -> None:
    """Answer 200 with ``[DONE]`` and nothing before it."""
    await call.start()
    await call.done()


@_named
async def error_event(call: ProviderCall) -> None:
    """Answer 200, then an error event."""
    await call.start()
    await call.event({"error": {"message": "engine died", "code": 500}})
    await call.done()


@_named
async def malformed_json(call: ProviderCall) -> None:
    """Send an event that is not JSON."""
    await call.start()
    await call.write(b'data: {"choices": [{"delta": {"content": "a"\n\n')
    await call.done()


@_named
async def wrong_types(call: ProviderCall) -> None:
    """Send JSON whose values have the wrong types."""
    await call.start()
    await call.event({"object": "chat.completion.chunk", "choices": [{"delta": {"content": 7}}]})
    await call.done()


@_named
async def huge_line(call: ProviderCall) -> None:
    """Send a line that never ends."""
    await call.start()
    await call.repeat(b"x" * 1_000_000)


@_named
async def hang(call: ProviderCall) -> None:
    """Never answer."""
    await call.until_gone()


@_named
async def hang_after_head(call: ProviderCall) -> None:
    """Answer 200 and then nothing."""
    await call.start()
    await call.until_gone()


@_named
async def pings_forever(call: ProviderCall) -> None:
    """Send comments, never a token: alive by the socket, dead by its purpose."""
    await call.start()
    await call.repeat(b": ping\n\n", delay_s=0.01)


@_named
async def reset_before_head(call: ProviderCall) -> None:
    """Reset the connection instead of answering."""
    call.reset()


@_named
async def reset_after_head(call: ProviderCall) -> None:
    """Reset the connection before the first token."""
    await call.start()
    await call.write(b": hello\n\n")
    call.reset()


# --- failures after the first token ----------------------------------------------------------------------------------


@_named
async def reset_after_3_tokens(call: ProviderCall) -> None:
    """Reset the connection in the middle of the answer."""
    await call.stream(3)
    await asyncio.sleep(0.05)
    call.reset()


@_named
async def close_after_3_tokens(call: ProviderCall) -> None:
    """End the stream cleanly in the middle of the answer."""
    await call.stream(3)
    await call.end()


@_named
async def done_after_3_tokens(call: ProviderCall) -> None:
    """Send ``[DONE]`` in the middle of the answer, without a finish reason."""
    await call.stream(3)
    await call.done()


@_named
async def cut_after_3_tokens(call: ProviderCall) -> None:
    """End the stream in the middle of an event."""
    await call.stream(3)
    await call.write(b'data: {"choices": [{"delta": {"con')
    await call.end()


@_named
async def stall_after_3_tokens(call: ProviderCall) -> None:
    """Fall silent in the middle of the answer."""
    await call.stream(3)
    await call.until_gone()


@_named
async def ping_after_3_tokens(call: ProviderCall) -> None:
    """Send only comments from the middle of the answer on."""
    await call.stream(3)
    await call.repeat(b": ping\n\n", delay_s=0.01)


@_named
async def error_after_3_tokens(call: ProviderCall) -> None:
    """Send an error event in the middle of the answer."""
    await call.stream(3)
    await call.event({"error": {"message": "engine died", "type": "InternalServerError", "code": 500}})
    await call.done()


@_named
async def malformed_after_3_tokens(call: ProviderCall) -> None:
    """Send nonsense in the middle of the answer."""
    await call.stream(3)
    await call.write(b"data: nonsense\n\n")
    await call.done()


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
