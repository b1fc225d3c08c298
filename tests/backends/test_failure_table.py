"""Every foreign failure becomes one of ours: the whole table, and no secret in any message."""

from __future__ import annotations

import ssl
from typing import Any

import aiohttp
import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.errors import (
    BackendError,
    BackendFailure,
    BackendOverloaded,
    BackendRefused,
    BackendTimeout,
    BackendUnavailable,
    ContextLengthExceeded,
    ModelLoadError,
    RejectedByServer,
    RequestRejected,
    UnsupportedByBackend,
)
from backends.remote import aiohttp_transport
from backends.remote.failure_table import (
    FOREIGN_ERRORS,
    blames_replica,
    from_error_chunk,
    from_status,
    from_transport,
    strike_out,
)
from policies.errors import NoTierFits

WHERE = "http://far/v1"
SECRET = "sk-very-secret"

# --- exceptions of the HTTP client -----------------------------------------------------------------------------------

TRANSPORT: dict[type[Exception], type[BackendError]] = {
    httpx.ConnectTimeout: BackendTimeout,
    httpx.ReadTimeout: BackendTimeout,
    httpx.WriteTimeout: BackendTimeout,
    httpx.PoolTimeout: BackendOverloaded,
    httpx.ConnectError: BackendUnavailable,
    httpx.ReadError: BackendFailure,
    httpx.WriteError: BackendFailure,
    httpx.CloseError: BackendFailure,
    httpx.ProxyError: BackendUnavailable,
    httpx.UnsupportedProtocol: BackendUnavailable,
    httpx.LocalProtocolError: BackendFailure,
    httpx.RemoteProtocolError: BackendFailure,
    httpx.DecodingError: BackendFailure,
    httpx.TooManyRedirects: BackendFailure,
    httpx.StreamClosed: BackendFailure,
    ConnectionResetError: BackendFailure,
    BrokenPipeError: BackendFailure,
    ssl.SSLError: BackendFailure,
}


@pytest.mark.parametrize("foreign", TRANSPORT, ids=lambda kind: kind.__name__)
def test_an_exception_of_httpx_becomes_ours_and_names_replica_and_cause(foreign: type[Exception]) -> None:
    error = foreign() if foreign is httpx.StreamClosed else foreign("the reason")
    ours = from_transport(error, WHERE)
    assert type(ours) is TRANSPORT[foreign]
    assert ours.retryable
    assert str(ours).startswith(f"{WHERE}: ")
    assert foreign.__name__ in str(ours)
    assert isinstance(error, FOREIGN_ERRORS)
    if foreign is not httpx.StreamClosed:
        assert "the reason" in str(ours)


def leaves(kind: type[Exception]) -> list[type[Exception]]:
    below = [leaf for child in kind.__subclasses__() for leaf in leaves(child)]
    return below or [kind]


def test_every_exception_httpx_can_raise_on_a_request_has_a_row() -> None:
    made_by_us = {httpx.HTTPStatusError}
    for kind in {*leaves(httpx.HTTPError), *leaves(httpx.StreamError)} - made_by_us:
        assert issubclass(kind, FOREIGN_ERRORS), kind


def test_a_bug_of_ours_is_not_taken_for_the_networks() -> None:
    for bug in (KeyError("x"), ZeroDivisionError(), TypeError("x")):
        assert not isinstance(bug, FOREIGN_ERRORS)
        with pytest.raises(AssertionError, match="no row"):
            from_transport(bug, WHERE)


def connector_error(kind: type[aiohttp.ClientConnectorError]) -> aiohttp.ClientConnectorError:
    key: Any = type("Key", (), {"host": "far", "port": 80, "ssl": None, "is_ssl": False})()
    return kind(key, OSError(111, "refused"))


AIOHTTP = [
    (connector_error(aiohttp.ClientConnectorError), httpx.ConnectError, BackendUnavailable),
    (connector_error(aiohttp.ClientConnectorDNSError), httpx.ConnectError, BackendUnavailable),
    (connector_error(aiohttp.ClientProxyConnectionError), httpx.ProxyError, BackendUnavailable),
    (aiohttp.ConnectionTimeoutError("t"), httpx.ConnectTimeout, BackendTimeout),
    (aiohttp.SocketTimeoutError("t"), httpx.ReadTimeout, BackendTimeout),
    (aiohttp.ServerTimeoutError("t"), httpx.ReadTimeout, BackendTimeout),
    (aiohttp.ServerDisconnectedError(), httpx.RemoteProtocolError, BackendFailure),
    (aiohttp.ClientPayloadError("half"), httpx.ReadError, BackendFailure),
    (aiohttp.ClientOSError(104, "reset"), httpx.ReadError, BackendFailure),
    (aiohttp.ClientConnectionError("closed"), httpx.ReadError, BackendFailure),
    (ConnectionResetError("reset"), httpx.ReadError, BackendFailure),
]


@pytest.mark.parametrize(("theirs", "name", "ours"), AIOHTTP, ids=lambda each: getattr(each, "__name__", None))
def test_aiohttps_failures_are_httpxs_by_their_own_names(
    theirs: Exception, name: type[Exception], ours: type[BackendError]
) -> None:
    named = aiohttp_transport.translate(theirs)
    assert type(named) is name
    assert type(from_transport(named, WHERE)) is ours


# --- statuses --------------------------------------------------------------------------------------------------------


def by_status(status: int) -> type[BackendError]:
    """The table of docs/backends.md, in words of its own."""
    if status in (429, 529):
        return BackendOverloaded
    if status in (401, 402, 403):
        return BackendRefused
    if status in (404, 405, 503):
        return BackendUnavailable
    if status in (408, 504):
        return BackendTimeout
    return RejectedByServer if 400 <= status < 500 else BackendFailure


@pytest.mark.parametrize("status", [*range(201, 209), *range(300, 309), *range(400, 452), *range(500, 530), 599])
def test_every_status_has_its_type(status: int) -> None:
    error = from_status(status, {}, b'{"error": {"message": "so it is"}}', WHERE)
    assert type(error) is by_status(status)
    assert error.retryable == (not isinstance(error, RequestRejected))
    if status not in (401, 403):
        assert "so it is" in str(error)
    assert f"{WHERE} answered {status}" in str(error)
    if isinstance(error, RequestRejected):
        assert error.status == status


def test_a_quota_that_is_used_up_is_no_overload() -> None:
    """OpenAI says 429 for both; only one passes by waiting."""
    body = orjson.dumps({"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}})
    assert type(from_status(429, {"retry-after": "1"}, body, WHERE)) is BackendRefused


@pytest.mark.parametrize("status", [429, 529, 503])
@pytest.mark.parametrize(("value", "seconds"), [("7", 7.0), ("0", 0.0), ("soon", None), ("-3", None), ("inf", None)])
def test_retry_after_is_read_where_it_means_something(status: int, value: str, seconds: float | None) -> None:
    error = from_status(status, {"retry-after": value}, b"", WHERE)
    assert isinstance(error, BackendUnavailable)
    assert error.retry_after_s == seconds
    assert not isinstance(from_status(500, {"retry-after": value}, b"", WHERE), BackendUnavailable)


@pytest.mark.parametrize("status", [401, 403])
def test_what_a_server_says_of_our_key_is_not_repeated(status: int) -> None:
    body = orjson.dumps({"error": {"message": f"Incorrect API key provided: {SECRET}"}})
    error = from_status(status, {}, body, WHERE, ())
    assert SECRET not in str(error)
    assert "api_key_env" in str(error)


# --- bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message", "code", "param"),
    [
        (
            {"error": {"message": "no", "code": "invalid_value", "param": "top_p", "type": "t"}},
            "no (param 'top_p') (code 'invalid_value')",
            "invalid_value",
            "top_p",
        ),
        # What is of no known vocabulary is the server's own text: for the log alone.
        (
            {"error": {"message": "no", "code": "bad", "param": "our_own"}},
            "no (param 'our_own') (code 'bad')",
            None,
            None,
        ),
        (
            {"error": {"message": "no", "code": 400, "type": "BadRequestError", "param": None}},
            "no (code 'BadRequestError')",
            None,
            None,
        ),
        ({"error": "no"}, "no", None, None),
        ({"message": "no", "object": "error", "type": "t", "code": 400}, "no (code 't')", None, None),
        ({"detail": "no"}, "no", None, None),
        ({"detail": [{"loc": ["body", "n"], "msg": "no"}]}, '[{"loc":["body","n"],"msg":"no"}]', None, None),
        ({"error": {"message": {"deep": "no"}}}, '{"deep":"no"}', None, None),
        ({"error": {"message": "two\nlines\x00 \t of   text"}}, "two lines of text", None, None),
        (["no"], "", None, None),
        ({}, "", None, None),
        ({"error": None, "message": "no"}, "no", None, None),
        ({"error": {"message": "no", "code": ["x"], "param": {"a": 1}}}, "no", None, None),
    ],
)
def test_error_bodies_of_every_server_are_read(body: Any, message: str, code: str | None, param: str | None) -> None:
    error = from_status(400, {}, orjson.dumps(body), WHERE)
    assert isinstance(error, RequestRejected)
    said = f"{WHERE} answered 400" + (f": {message}" if message else "")
    assert (str(error), error.code, error.param) == (said, code, param)


def test_plain_text_is_shown_and_a_web_page_is_not() -> None:
    assert str(from_status(400, {}, b"  model is\nbusy ", WHERE)).endswith(": model is busy")
    assert "body" not in str(from_status(502, {}, b" \n<html><body>Bad Gateway</body></html>", WHERE))
    assert str(from_status(500, {}, b"\xff\xfe", WHERE)).endswith("��")


@pytest.mark.parametrize(
    ("error", "prompt", "limit"),
    [
        (
            {
                "message": "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens "
                "(8900 in the messages, 100 in the completion). Please reduce the length.",
                "code": "context_length_exceeded",
            },
            8900,
            8192,
        ),
        ({"message": "maximum context length is 4096 tokens and your request has 5030 input tokens"}, 5030, 4096),
        ({"message": "Context size is 2048; prompt contains at least 3000 tokens."}, 3000, 2048),
        (
            {"message": "The maximum context length is 100 tokens. However, your messages resulted in 120 tokens."},
            120,
            100,
        ),
        ({"message": "maximum context length is 100 tokens, you requested about 250 tokens"}, 250, 100),
        ({"message": "too big", "type": "exceed_context_size_error", "n_ctx": 64, "n_prompt_tokens": 99}, 99, 64),
        # What this project says itself, as a tier of another.
        ({"message": str(ContextLengthExceeded(120, 100, 7)), "code": "context_length_exceeded"}, 120, 100),
        ({"message": str(ContextLengthExceeded(120, 100, is_counted=False, param="prompt"))}, 120, 100),
        ({"message": str(NoTierFits(120, 7, 100, is_counted=False))}, 120, 100),
    ],
)
def test_too_long_a_prompt_comes_with_its_numbers(error: dict[str, Any], prompt: int, limit: int) -> None:
    found = from_status(400, {}, orjson.dumps({"error": error}), WHERE)
    assert isinstance(found, ContextLengthExceeded)
    assert (found.num_prompt_tokens, found.context_length) == (prompt, limit)
    # An error event in a stream that began well is read alike.
    assert type(from_error_chunk({"error": {**error, "code": 400}}, WHERE)) is type(found)


def test_too_long_a_prompt_without_numbers_keeps_its_code() -> None:
    for error in ({"message": "context window exceeded"}, {"message": "x", "code": "context_length_exceeded"}):
        found = from_status(413, {}, orjson.dumps({"error": error}), WHERE)
        assert isinstance(found, RequestRejected)
        assert (found.code, found.status) == ("context_length_exceeded", 413)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"error": {"message": "died", "code": 500}}, BackendFailure),
        ({"error": {"message": "busy", "code": 429}}, BackendOverloaded),
        ({"error": {"message": "away", "code": 503}}, BackendUnavailable),
        ({"error": {"message": "no", "code": 422}}, RejectedByServer),
        ({"error": {"message": "no", "code": 401}}, BackendRefused),
        ({"error": {"message": "odd", "code": 200}}, BackendFailure),
        ({"error": {"message": "odd", "code": 9000}}, BackendFailure),
        ({"error": {"message": "odd", "code": "overloaded"}}, BackendFailure),
        ({"error": "died"}, BackendFailure),
        ({"object": "error", "message": "died", "code": 404}, BackendUnavailable),
        ([], BackendFailure),
        (None, BackendFailure),
    ],
)
def test_an_error_in_a_stream_goes_by_its_code(body: Any, kind: type[BackendError]) -> None:
    assert type(from_error_chunk(body, WHERE)) is kind


# --- whose fault, and what is said -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "is_blamed"),
    [
        (BackendUnavailable("x"), True),
        (BackendTimeout("x"), True),
        (BackendFailure("x"), True),
        (BackendOverloaded("x"), False),
        (BackendRefused("x"), False),
        (RequestRejected("x", status=400), False),
        (ContextLengthExceeded(2, 1), False),
        (UnsupportedByBackend("echo", "m"), False),
        (ModelLoadError("x"), False),
    ],
)
def test_only_a_broken_replica_is_blamed(error: BackendError, is_blamed: bool) -> None:
    assert blames_replica(error) == is_blamed


@given(st.text(), st.text(), st.integers(200, 599).filter(lambda status: status != 200))
def test_no_secret_leaves_by_any_message(before: str, after: str, status: int) -> None:
    said = before + SECRET + after
    for body in (
        said.encode("utf-8", "replace"),
        orjson.dumps({"error": {"message": said.encode("utf-8", "replace").decode()}}),
    ):
        error = from_status(status, {}, body, WHERE, (SECRET,))
        assert SECRET not in str(error)
        assert str(error).isprintable()
        assert len(str(error)) < 600


def test_a_long_message_is_cut_and_control_characters_go() -> None:
    assert strike_out("a" * 1000, ()) == "a" * 400 + "…"
    assert strike_out("a\x1b[31mb\u202ec\n\td", ()) == "a[31mbc d"
    assert strike_out("key k1 and k2", ("k1", "k2")) == "key … and …"
