"""The remote backend against a real server that misbehaves, by name.

Each fault is an ordinary case with the same questions: one ending, the right one, nothing left open.
"""

from __future__ import annotations

import pytest

from backends.config import TimeoutConfig
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
from backends.protocol import FinishReason, GenerateRequest
from backends.remote.openai_backend import OpenAIBackend
from backends.testing import split_tokens
from tests.backends.provider.behaviours import BEHAVIOURS
from tests.backends.provider.server import ProviderServer
from tests.backends.remote_kit import (
    ANSWER,
    HASTY,
    ONCE,
    TIMEOUTS,
    chat,
    collect,
    make,
    text_of,
)

WHOLE = [
    "ok",
    "slow",
    "torn_sse",
    "one_write",
    "crlf",
    "comments",
    "not_streamed",
    "no_done",
    "after_done",
    "no_usage",
    "no_stream_options",
    "usage_never",
    "two_endings",
    "ignores_stop",
    "signs",
    "sets_cookie",
]


@pytest.mark.parametrize("behaviour", WHOLE)
async def test_an_odd_but_whole_answer_is_whole(
    server: ProviderServer, transport: str, behaviour: str, opened: list[OpenAIBackend]
) -> None:
    backend = make(server, behaviour, transport=transport)
    opened.append(backend)
    for request in (chat(), GenerateRequest("r", prompt="2 + 2 =")):
        deltas, ending = await collect(backend, request)
        assert text_of(deltas) == ANSWER
        assert (ending.reason, ending.error) == (FinishReason.STOP, None)
        assert ending.usage.completion_tokens == len(split_tokens(ANSWER))
        assert ending.usage_estimated == (behaviour in ("no_usage", "usage_never", "no_stream_options"))
        assert ending.usage.prompt_tokens > 0
        assert 0 < ending.timings.ttft_s <= ending.timings.total_s
    assert await server.settled()


# Behaviours that show only in how long nothing comes.
SILENT = {"hang", "hang_after_head", "pings_forever", "stall_after_3_tokens", "ping_after_3_tokens"}

BEFORE = {
    "400": RejectedByServer,
    "401": BackendRefused,
    "402": BackendRefused,
    "403": BackendRefused,
    "404": BackendUnavailable,
    "422": RejectedByServer,
    "429": BackendOverloaded,
    "429_for_an_hour": BackendOverloaded,
    "500": BackendFailure,
    "503": BackendUnavailable,
    "503_for_an_hour": BackendUnavailable,
    "529": BackendOverloaded,
    "context_openai": ContextLengthExceeded,
    "context_vllm": ContextLengthExceeded,
    "context_llamacpp": ContextLengthExceeded,
    "redirect": BackendFailure,
    "html": BackendFailure,
    "html_502": BackendFailure,
    "json_error_200": BackendFailure,
    "empty_body": BackendFailure,
    "empty_stream": BackendFailure,
    "error_event": BackendFailure,
    "malformed_json": BackendFailure,
    "wrong_types": BackendFailure,
    "huge_line": BackendFailure,
    "hang": BackendTimeout,
    "hang_after_head": BackendTimeout,
    "pings_forever": BackendTimeout,
    "reset_before_head": BackendFailure,
    "reset_after_head": BackendFailure,
}


def patience(behaviour: str) -> TimeoutConfig:
    return HASTY if behaviour in SILENT else TIMEOUTS


@pytest.mark.parametrize("behaviour", BEFORE)
async def test_a_failure_before_the_first_token_raises_its_type(
    server: ProviderServer, transport: str, behaviour: str, opened: list[OpenAIBackend]
) -> None:
    backend = make(server, behaviour, retry=ONCE, transport=transport, timeouts=patience(behaviour))
    opened.append(backend)
    with pytest.raises(BackendError) as caught:
        await collect(backend, chat())
    assert type(caught.value) is BEFORE[behaviour], caught.value
    assert backend.load().running == 0
    assert await server.settled(), "the server still answers a request nobody waits for"


AFTER = {
    "reset_after_3_tokens": "connection lost",
    "close_after_3_tokens": "in the middle",
    "done_after_3_tokens": "in the middle",
    "cut_after_3_tokens": "expected JSON",
    "stall_after_3_tokens": "no token in 0.5 s",
    "ping_after_3_tokens": "no token in",
    "error_after_3_tokens": "engine died",
    "malformed_after_3_tokens": "expected JSON",
    "unknown_reason": "'abort'",
}


@pytest.mark.parametrize("behaviour", AFTER)
async def test_a_failure_after_the_first_token_ends_with_an_error_once(
    server: ProviderServer, transport: str, behaviour: str, opened: list[OpenAIBackend]
) -> None:
    backend = make(server, behaviour, transport=transport, timeouts=patience(behaviour))
    opened.append(backend)
    before = server.count(behaviour)
    deltas, ending = await collect(backend, chat())
    assert ending.reason is FinishReason.ERROR
    assert ending.error is not None
    assert AFTER[behaviour] in ending.error
    if behaviour != "unknown_reason":
        assert text_of(deltas) == "The naïve 🦊"
        assert (ending.usage.completion_tokens, ending.usage_estimated) == (3, True)
    assert server.count(behaviour) == before + 1, "an answer that has begun is not begun again"
    assert await server.settled()


def test_every_behaviour_is_in_a_test() -> None:
    assert set(BEHAVIOURS) == {*WHOLE, *BEFORE, *AFTER, "slow_tokens", "flaky", "poisoned"}
