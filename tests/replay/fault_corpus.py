"""Asks servers whose models fail, and one that is full and short of patience."""

from __future__ import annotations

import json
import socket
from typing import Any

from tests.replay.generation_corpus import CHAT, TEXT, USER, VECTORS
from tests.replay.recorder import Recorder

# Behaviours of the provider that end by themselves or by a short timeout.
BEHAVIOURS = (
    "ok",
    "torn_sse",
    "one_write",
    "crlf",
    "comments",
    "not_streamed",
    "no_done",
    "ignores_stop",
    "after_done",
    "no_usage",
    "no_stream_options",
    "400",
    "401",
    "404",
    "422",
    "429",
    "429_for_an_hour",
    "500",
    "503",
    "529",
    "context_openai",
    "context_vllm",
    "context_llamacpp",
    "redirect",
    "html",
    "html_502",
    "json_error_200",
    "empty_body",
    "empty_stream",
    "error_event",
    "malformed_json",
    "wrong_types",
    "hang",
    "reset_before_head",
    "reset_after_head",
    "reset_after_3_tokens",
    "close_after_3_tokens",
    "done_after_3_tokens",
    "cut_after_3_tokens",
    "stall_after_3_tokens",
    "error_after_3_tokens",
    "malformed_after_3_tokens",
    "unknown_reason",
    "two_endings",
)
FALLING_BACK = ("500", "429", "hang", "reset_before_head", "context_openai", "400", "reset_after_3_tokens")


def _tier(behaviour: str) -> str:
    return f"""
[[tiers]]
name = "t-{behaviour}"
model = "{behaviour}"
price_per_request_usd = 0.001
[models.{behaviour}]
urls = ["UPSTREAM/{behaviour}/v1"]
model = "provider-model"
retry.max_attempts = 1
breaker.failure_threshold = 1000
timeouts.first_token_s = 0.8
timeouts.gap_s = 0.8
timeouts.trailer_s = 0.3
capabilities = ["generate", "logprobs", "embed"]
"""


UPSTREAM_CONFIG = (
    "".join(_tier(each) for each in BEHAVIOURS)
    + """
[[tiers]]
name = "last"
model = "last"
price_per_request_usd = 0.01
[models.last]
kind = "echo"
[policy]
exploration_share = 0.0
sampling_share = 0.0
"""
    + "".join(
        f'[policies.down-{each}]\nallowed_tiers = ["t-ok", "t-{each}"]\nfallback = "any"\n'
        f'[policies.up-{each}]\nallowed_tiers = ["t-{each}", "last"]\n'
        for each in FALLING_BACK
    )
    + """
[policies.all-fail]
allowed_tiers = ["t-500", "t-503", "t-429"]
fallback = "any"
[policies.no-fallback]
allowed_tiers = ["t-ok", "t-500"]
fallback = "none"
[verification]
enabled = false
[learning]
enabled = false
[server]
port = PORT
[database]
url = "sqlite:///FOLDER/suffice.db"
"""
)

TIGHT_CONFIG = """
[[tiers]]
name = "slow"
model = "slow"
price_per_request_usd = 0.0001
[[tiers]]
name = "fast"
model = "fast"
price_per_request_usd = 0.01
[models.slow]
kind = "echo"
token_delay_s = 60
[models.fast]
kind = "echo"
[policy]
exploration_share = 0.0
sampling_share = 0.0
[verification]
enabled = false
[admin]
enabled = false
[metrics]
enabled = false
[server]
port = PORT
max_body_bytes = 1024
max_json_depth = 4
max_messages = 1
max_n = 2
max_stop = 1
max_stop_chars = 2
max_logprobs = 1
max_logit_bias = 1
max_concurrency = 1
queue_limit = 0
request_timeout_s = 1.5
slow_client_timeout_s = 0.4
[database]
url = "sqlite:///FOLDER/suffice.db"
"""


def play_upstream(recorder: Recorder) -> None:
    """Ask each behaviour whole and streamed, then policies that fall back from some."""
    for each in BEHAVIOURS:
        for streamed in (False, True):
            asked: dict[str, Any] = {"model": f"t-{each}", "messages": USER, "stream": streamed}
            recorder.call("POST", CHAT, asked, name=f"chat of {each}, stream {streamed}")
    for each in ("ok", "500", "close_after_3_tokens"):
        for streamed in (False, True):
            # Of two choices of which one fails, how far the other comes is chance.
            n = 2 if each == "ok" else 1
            asked = {"model": f"t-{each}", "prompt": "one two three four", "n": n, "stream": streamed}
            recorder.call("POST", TEXT, asked, name=f"completion of {each}, stream {streamed}")
        recorder.call("POST", VECTORS, {"model": f"t-{each}", "input": "one two"}, name=f"vectors of {each}")
    body = {"model": "t-ok", "messages": USER, "logprobs": True, "top_logprobs": 2, "stop": ["two"]}
    recorder.call("POST", CHAT, body, name="logprobs of a remote model")
    for each in FALLING_BACK:
        for direction in ("down", "up"):
            answer = recorder.call("POST", CHAT, {"model": f"{direction}-{each}", "messages": USER})
            request_id = answer.header("x-suffice-request-id")
            recorder.call("GET", f"/v1/requests/{request_id}", name=f"{direction}-{each} explained")
    for policy in ("all-fail", "no-fallback"):
        for streamed in (False, True):
            recorder.call("POST", CHAT, {"model": policy, "messages": USER, "stream": streamed})
    recorder.call("GET", "/admin/v1/usage?group_by=tier")


def play_tight(recorder: Recorder) -> None:
    """Pass each limit of a server that has small ones."""
    for change in (
        {"messages": USER * 2},
        {"messages": [{"role": "user", "content": "x" * 2000}]},
        {"n": 3},
        {"stop": ["a", "b"]},
        {"stop": "abc"},
        {"logprobs": True, "top_logprobs": 2},
        {"logit_bias": {"1": 1, "2": 2}},
        {"metadata": {"a": {"b": {"c": {"d": 1}}}}},
    ):
        name = f"beyond a limit: {json.dumps(change)[:60]}"
        recorder.call("POST", CHAT, {"model": "fast", "messages": USER} | change, name=name)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 100\r\n\r\n".encode()
    recorder.raw("a body that does not come", [head + b'{"model"'], ("POST",))
    for path in ("/metrics", "/admin/v1/tiers", "/admin/v1/nothing", "/openapi.json"):
        recorder.call("GET", path)
    for streamed in (False, True):
        recorder.call("POST", CHAT, {"model": "slow", "messages": USER, "stream": streamed}, name=f"late, {streamed}")
    recorder.call("POST", TEXT, {"model": "slow", "prompt": "a b", "stream": True}, name="late completion")
    _while_full(recorder)
    recorder.call("POST", CHAT, {"model": "fast", "messages": USER}, name="free again")


def _while_full(recorder: Recorder) -> None:
    """Ask while the one place is taken by a stream whose next token is a minute away."""
    body = json.dumps({"model": "slow", "messages": USER, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", recorder.server.port), timeout=30) as holder:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        holder.sendall(head.encode() + body)
        assert holder.recv(100), "the answer has begun"
        recorder.call("POST", CHAT, {"model": "fast", "messages": USER}, name="while full")
        recorder.call("POST", VECTORS, {"model": "fast", "input": "a"}, name="vectors while full")
        recorder.call("GET", "/healthz", name="healthy while full")
        while holder.recv(65_536):
            pass
