"""Translates foreign failures into ours: HTTP statuses, error bodies and httpx exceptions, one table each.

What a server says may quote what we sent it, and our API key with it; messages are cut short and the key is struck out
before they go anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import httpx
import orjson

from backends.errors import (
    BackendError,
    BackendFailure,
    BackendOverloaded,
    BackendRefused,
    BackendTimeout,
    BackendUnavailable,
    ContextLengthExceeded,
    RejectedByServer,
)
from backends.remote.retry import parse_retry_after_s

_MAX_MESSAGE_CHARS = 400

# Most specific first, as ``isinstance`` finds them.
_TRANSPORT: tuple[tuple[type[Exception], type[BackendError], str], ...] = (
    (httpx.ConnectTimeout, BackendTimeout, "no connection in time"),
    (httpx.PoolTimeout, BackendOverloaded, "no free connection in time"),
    (httpx.TimeoutException, BackendTimeout, "no answer in time"),
    (httpx.ConnectError, BackendUnavailable, "cannot connect"),
    (httpx.ProxyError, BackendUnavailable, "the proxy failed"),
    (httpx.UnsupportedProtocol, BackendUnavailable, "unsupported protocol"),
    (httpx.DecodingError, BackendFailure, "undecodable body"),
    (httpx.HTTPError, BackendFailure, "connection lost"),
    (httpx.StreamError, BackendFailure, "connection lost"),
    (OSError, BackendFailure, "connection lost"),
)

FOREIGN_ERRORS = tuple(foreign for foreign, _, _ in _TRANSPORT)
"""Everything a transport may raise that :func:`from_transport` translates."""


def from_transport(error: Exception, where: str) -> BackendError:
    """Translate an exception of the HTTP client; ``where`` is the replica's base URL."""
    for foreign, ours, meaning in _TRANSPORT:
        if isinstance(error, foreign):
            detail = f": {error}" if str(error) else ""
            return ours(f"{where}: {meaning} ({type(error).__name__}{detail}).")
    raise AssertionError(f"no row for {type(error).__name__}") from error


def from_status(
    status: int, headers: Mapping[str, str], body: bytes, where: str, secrets: tuple[str, ...] = ()
) -> BackendError:
    """Translate an HTTP status that is not 200.

    401, 402, 403 and a used-up quota are about our key and our account, so they are the operator's to mend, not the
    caller's, and no wait mends them. A message about the key may quote it, and is not repeated.
    """
    message, code, param, fields = _read_error(body, secrets)
    said = f"{where} answered {status}" + (f": {message}" if message else "")
    retry_after_s = parse_retry_after_s(headers.get("retry-after"))
    if status == 402 or (status == 429 and code == "insufficient_quota"):
        return BackendRefused(said)
    if status in (429, 529):
        return BackendOverloaded(said, retry_after_s=retry_after_s)
    if status in (401, 403):
        return BackendRefused(f"{where} answered {status}: it refuses our API key. Check api_key_env.")
    # A wrong path or model name: the message is safe to repeat, it quotes no key.
    if status in (404, 405):
        return BackendUnavailable(f"{said}. Check urls and model.")
    if status == 503:
        return BackendUnavailable(said, retry_after_s=retry_after_s)
    if status in (408, 504):
        return BackendTimeout(said)
    if 400 <= status < 500:
        named = "".join(
            f" ({name} {strike_out(value, secrets)!r})" for name, value in (("param", param), ("code", code)) if value
        )
        return _context_error(message, code, fields, status, said) or RejectedByServer(
            said + named, status=status, param=param, code=code
        )
    return BackendFailure(said)


def from_error_chunk(body: Any, where: str, secrets: tuple[str, ...] = ()) -> BackendError:
    """Translate an error object found inside a stream; its ``code`` is an HTTP status at vLLM and llama.cpp."""
    error = body.get("error") if isinstance(body, dict) else None
    source = error if isinstance(error, dict) else body if isinstance(body, dict) else {}
    code = source.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return from_status(status, {}, orjson.dumps(body), where, secrets)


def blames_replica(error: BackendError) -> bool:
    """Return whether a failure says that the replica is broken; being busy, a bad request or a bad key do not."""
    return error.retryable and not isinstance(error, BackendOverloaded | BackendRefused)


def strike_out(text: str, secrets: tuple[str, ...]) -> str:
    """Return ``text`` without control characters or secrets, cut to a readable length."""
    for secret in secrets:
        text = text.replace(secret, "…")
    text = " ".join(text.split())
    text = "".join(char for char in text if char.isprintable())
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[:_MAX_MESSAGE_CHARS] + "…"


def _read_error(body: bytes, secrets: tuple[str, ...]) -> tuple[str, str | None, str | None, dict[str, Any]]:
    """Return (message, code, param, all fields) of OpenAI's, FastAPI's, vLLM's and llama.cpp's error bodies."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        # Usually a proxy's HTML page; its text helps nobody.
        is_page = body.lstrip()[:1] == b"<"
        return "" if is_page else strike_out(body.decode("utf-8", "replace"), secrets), None, None, {}
    fields = parsed if isinstance(parsed, dict) else {}
    inner = fields.get("error", fields)
    if isinstance(inner, str):
        return strike_out(inner, secrets), None, None, fields
    fields = inner if isinstance(inner, dict) else fields
    message = fields.get("message", fields.get("detail", ""))
    message = message if isinstance(message, str) else orjson.dumps(message).decode()
    code, kind, param = fields.get("code"), fields.get("type"), fields.get("param")
    name = code if isinstance(code, str) else kind if isinstance(kind, str) else None
    return strike_out(message, secrets), name, param if isinstance(param, str) else None, fields


# OpenAI and vLLM: "maximum context length is 8192 tokens … you requested 9000 tokens (8900 in the messages, 100 in …)";
# newer vLLM: "… maximum context length is 4096 tokens and your request has 30 input tokens".
_CONTEXT = re.compile(r"(?:maximum )?context (?:length|size|window)\D{0,40}?(\d+)", re.IGNORECASE)
_PROMPT = re.compile(
    r"(\d+) (?:in the (?:messages|prompt)|input tokens)"
    r"|(?:resulted in(?: at least)?|request has|prompt (?:has|contains)(?: at least)?|request \() ?(\d+)",
    re.IGNORECASE,
)
_REQUESTED = re.compile(r"requested (?:about )?(\d+) tokens", re.IGNORECASE)


def _context_error(
    message: str, code: str | None, fields: dict[str, Any], status: int, said: str
) -> ContextLengthExceeded | RejectedByServer | None:
    """Recognise "too long" and find its numbers, which callers are promised."""
    named = code in ("context_length_exceeded", "exceed_context_size_error")
    if not named and not re.search(r"context (length|size|window)", message, re.IGNORECASE):
        return None
    # llama.cpp puts the numbers in fields.
    limit, asked = fields.get("n_ctx"), fields.get("n_prompt_tokens")
    if not (isinstance(limit, int) and isinstance(asked, int)):
        found_limit = _CONTEXT.search(message)
        found_asked = _PROMPT.search(message) or _REQUESTED.search(message)
        if found_limit is None or found_asked is None:
            return RejectedByServer(said, status=status, code="context_length_exceeded")
        limit = int(found_limit.group(1))
        asked = int(next(group for group in found_asked.groups() if group))
    return ContextLengthExceeded(asked, limit)
