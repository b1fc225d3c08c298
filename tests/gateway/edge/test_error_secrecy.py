"""What an error knows of the inside reaches the log and no caller (security review M3, fault review S3, S4)."""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from backends import errors as backends
from backends.config import RemoteModelConfig, RetryConfig
from backends.remote.openai_backend import OpenAIBackend
from backends.testing import Script
from gateway.edge.error_table import TABLE, answer_to, row_of
from gateway.edge.responder import Responder
from gateway.edge.watchdog import Watchdog
from gateway.endpoints.generation import report
from gateway.errors import AnswerFailed, NotHere
from policies.errors import NoTierAvailable
from tests.backends.provider.server import ProviderServer
from tests.backends.remote_kit import HASTY, chat, collect, make
from tests.gateway.harness import assert_error, echo_backends, events, make_settings, running

CANARY = "canary-http://10.0.0.7:8000/v1-ReadError"
# Their messages are ours in full: numbers of tiers, and which part of the server is off.
_OURS = {NoTierAvailable, NotHere}
# What is not the caller's own request; what the caller did wrong may be quoted to it.
INSIDE = [kind for kind, row in TABLE.items() if (row.status >= 500 or not row.is_public) and kind not in _OURS]

_VALUES: dict[str, Any] = {"int": 413, "int | None": 413, "float": 1.5, "float | None": 1.5, "Iterable[str]": (CANARY,)}


def make_canary(kind: type[Exception]) -> Exception:
    """Return an exception of a class with the canary in every field that holds a text."""
    if kind.__init__ is Exception.__init__:
        return kind(CANARY)
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters):
        return kind(CANARY)
    chosen = {each.name: _VALUES.get(str(each.annotation), CANARY) for each in parameters}
    if issubclass(kind, AnswerFailed):
        chosen["model"] = "large"
    return kind(**chosen)


class Sent:
    """Takes what a responder sends."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def __call__(self, message: Any) -> None:
        self.messages.append(message)

    async def receive(self) -> Any:
        return {"type": "http.disconnect"}


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", INSIDE, ids=lambda kind: kind.__name__)
async def test_no_field_of_an_error_of_the_inside_is_sent(
    kind: type[Exception], is_streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    error, sent = make_canary(kind), Sent()
    watchdog = Watchdog(sent.receive, timeout_s=60, stall_timeout_s=60)
    responder = Responder(sent, watchdog)
    if is_streaming:
        await responder.open_stream([])
    with caplog.at_level(logging.INFO):
        report(error, "the-id")
    await responder.error(answer_to(error, "the-id"), [])
    watchdog.close()
    assert "canary" not in repr(sent.messages)
    assert "the-id" in repr(sent.messages) or str(error) == json.loads(_body(sent))["error"]["message"]
    if "canary" in str(error):
        assert CANARY in caplog.text
        assert "the-id" in caplog.text


def _body(sent: Sent) -> bytes:
    body = b"".join(each.get("body", b"") for each in sent.messages)
    return body.removeprefix(b"data: ")


def test_the_classes_of_a_failing_tier_are_among_them() -> None:
    remote = {backends.BackendUnavailable, backends.BackendFailure, backends.RejectedByServer, AnswerFailed}
    assert remote <= set(INSIDE)


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("status", [400, 401, 402, 403, 409, 422])
def test_a_server_chooses_no_word_of_what_callers_read(status: int, is_streaming: bool) -> None:
    error = backends.RejectedByServer(CANARY, status=status, param=CANARY, code=CANARY)
    told = answer_to(error, "the-id")
    assert "canary" not in repr((told.body, told.headers()))
    assert told.body["error"]["param"] is None
    assert (told.status, told.code) == (
        (status, "rejected_by_model") if status in (400, 422) else (502, "model_refused")
    )
    assert row_of(error).retryable is False


BACKEND_ERRORS = [
    make_canary(kind)
    for kind in TABLE
    if issubclass(kind, backends.BackendError) and kind in INSIDE and kind is not backends.BackendError
]


@pytest.mark.parametrize("error", BACKEND_ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
async def test_a_tier_that_fails_is_told_by_its_name(
    tmp_path: Path, error: Exception, is_streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    backends_ = echo_backends(large=Script(fail_before=error))  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        async with running(make_settings(tmp_path), backends_) as gateway:
            response = await gateway.chat("hi", model="expert", stream=is_streamed)
            told = response.json()["error"]
            shown = await gateway.client.get(f"/v1/requests/{response.headers['x-suffice-request-id']}")
            metrics = await gateway.client.get("/metrics")
    assert "canary" not in f"{response.text}{response.headers}{shown.text}{metrics.text}"
    assert response.headers["x-suffice-request-id"] in told["message"]
    assert "'large'" in told["message"] or told["code"] in ("model_not_loaded", "model_misconfigured")
    assert CANARY in caplog.text


# Everything that a failing server here says, and the libraries' words for what it does.
INSIDE_WORDS = (
    "127.0.0.1", "http", "provider-model", "Error", "api_key", "engine died", "internal error", "nonsense", "far",
    "Quota", "Incorrect", "unprocessable", "temperature must be", "injected", "loading model", "Payload",
)  # fmt: skip
FAILING = [
    "400", "401", "404", "422", "429", "500", "503", "529", "redirect", "html", "html_502", "json_error_200",
    "empty_body", "empty_stream", "error_event", "malformed_json", "wrong_types", "hang", "reset_before_head",
    "reset_after_head", "reset_after_3_tokens", "close_after_3_tokens", "done_after_3_tokens", "cut_after_3_tokens",
    "stall_after_3_tokens", "error_after_3_tokens", "malformed_after_3_tokens", "unknown_reason",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", FAILING)
async def test_a_server_that_fails_shows_nothing_of_itself(tmp_path: Path, behaviour: str) -> None:
    with ProviderServer(Script(text="one two three four")) as server:
        large = make(server, behaviour, api_key="sk-inside", retry=RetryConfig(max_attempts=1), timeouts=HASTY)
        async with running(make_settings(tmp_path), echo_backends() | {"large": large}) as gateway:
            whole = await gateway.chat("hi", model="expert")
            streamed = await gateway.chat("hi", model="expert", stream=True)
            told = json.loads(events(streamed.text)[-1]) if streamed.status_code == 200 else streamed.json()
            for message in (whole.json()["error"]["message"], told["error"]["message"]):
                assert "'large'" in message
                assert [word for word in INSIDE_WORDS if word in message.replace("'large'", "")] == []
            assert "sk-inside" not in whole.text + streamed.text


@pytest.mark.parametrize("status", ["401", "402", "403"])
async def test_a_key_that_is_refused_is_told_so_and_not_tried_again(tmp_path: Path, status: str) -> None:
    """(fault review S4)"""
    with ProviderServer() as server:
        large = make(server, status, capabilities=("generate",))
        async with running(make_settings(tmp_path), echo_backends() | {"large": large}) as gateway:
            # More often than a breaker's threshold: it stays what it is.
            for _ in range(5):
                response = await gateway.chat("hi", model="expert")
                assert_error(response, 502, "model_refused")
                assert "retry-after" not in response.headers
        assert server.count(status) == 5


async def test_another_tier_or_replica_answers_where_one_refuses_our_key() -> None:
    with ProviderServer() as server:
        config = RemoteModelConfig(urls=(server.url("401"), server.url("ok")), model="provider-model")
        backend = OpenAIBackend("far", config)
        for _ in range(6):
            await collect(backend, chat())
        await backend.close()
        # The one that refuses looks idle, and is yet asked only while nothing is known of it.
        assert server.count("401") <= 1
        assert server.count("ok") == 6
