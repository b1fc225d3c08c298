"""Asks an open server with the built-in router over four echoes for answers, streams, refusals, in raw bytes."""

from __future__ import annotations

import json
from typing import Any

from tests.replay.recorder import Recorder

CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
USER: list[dict[str, Any]] = [{"role": "user", "content": "one two three"}]
UNKNOWN_ID = "0199aaaa-0000-7000-8000-000000000000"

CONFIG = """
[[tiers]]
name = "simple"
model = "m1"
price_per_request_usd = 0.0001
price_per_compute_hour_usd = 0.04
region = "eu"

[[tiers]]
name = "medium"
model = "m2"
price_per_request_usd = 0.0005
region = "us"

[[tiers]]
name = "complex"
model = "m3"
price_per_request_usd = 0.003
price_per_input_token_usd = 0.000001
context_length = 2000

[[tiers]]
name = "expert"
model = "m4"
price_per_request_usd = 0.01
price_per_output_token_usd = 0.00001
region = "eu"

[models.m1]
kind = "echo"
[models.m2]
kind = "echo"
[models.m3]
kind = "echo"
text = "The answer is 42. END of it."
[models.m4]
kind = "echo"

[router]
artifact = "builtin"
timeout_s = 60

[policy]
mode = "benefit"
quality_floor = 0.97
exploration_share = 0.0
sampling_share = 0.0
sampling.down_share = 0.0
sampling.doubt_share = 0.0

[policies.careful]
allowed_tiers = ["expert"]
[policies.frugal]
allowed_tiers = ["simple"]
mode = "floor"
[policies.floor]
mode = "floor"
quality_floor = 0.8
[policies.european]
allowed_regions = ["eu"]
[policies.capped]
max_cost_usd = 0.0006
[policies.thrifty]
budget_usd_per_day = 0.0002
[policies.unsure]
mode = "floor"
allowed_tiers = [1, 4]
escalation = { mode = "top", least_confidence = { 1 = 0.99 }, hold_back_tokens = 3 }
quality_floor = 0.0
max_novelty = 1.0

[verification]
enabled = false
[learning]
enabled = false
[control]
rollout_every_s = 3600
[server]
port = PORT
[database]
url = "sqlite:///FOLDER/suffice.db"
[metrics]
readiness_ttl_s = 0
"""

CONTENTS = (
    "What is 17 + 25?",
    "hi",
    "Write a proof that the square root of two is irrational, and explain every step to a child.",
    "def f(x):\n    return x\n\nWhat does f(3) give?",
    "Übersetze »Guten Morgen« ins Japanische: 日本語 🎉",
    "one right west END two three",
    " ",
    "",
)

CHAT_OPTIONS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 1},
    {"max_tokens": 1, "max_completion_tokens": 2},
    {"stop": "two"},
    {"stop": ["three", "two"]},
    {"n": 3},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"n": 2, "logprobs": True, "top_logprobs": 1},
    {"seed": 7, "temperature": 0, "top_p": 0, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1},
    {"ignore_eos": True, "max_tokens": 7},
    {"min_tokens": 2, "stop_token_ids": [5]},
    {"user": "u-1", "metadata": {"team": "x"}, "store": False, "parallel_tool_calls": True},
    {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
    {"temperature": None, "top_p": None, "stop": None, "n": None, "seed": None, "stream": None, "tools": None},
    {"logit_bias": {"5": -100, "6": 3.5}},
    {"reasoning_effort": "high"},
    {"reasoning_effort": "none"},
    {"chat_template_kwargs": {"enable_thinking": False, "other": 1}},
    {"prediction": {"type": "content", "content": "one two four"}},
    {"messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi", "name": "ann"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    {"messages": [*USER, {"role": "assistant", "content": "four"}, {"role": "user", "content": "five six"}]},
    {"service_tier": "flex"},
    {"no_such_field": {"deep": [1, 2]}},
)

ROUTING: tuple[dict[str, Any], ...] = (
    {"model": "simple"},
    {"model": "tier-2"},
    {"model": "m3"},
    {"model": "expert"},
    {"model": "careful"},
    {"model": "frugal"},
    {"model": "floor"},
    {"model": "european"},
    {"model": "capped"},
    {"model": "unsure"},
    {"suffice": {"tier": 2}},
    {"suffice": {"tier": "expert", "explore": False, "session_id": "s1", "policy": "careful"}},
    {"suffice": {"min_tier": 2}},
    {"suffice": {"max_tier": "medium"}},
    {"suffice": {"min_tier": 2, "max_tier": 3}},
    {"suffice": {"regions": ["us"]}},
    {"suffice": {"max_cost_usd": 0.001}},
    {"suffice": {"max_cost_usd": "0.004"}},
    {"suffice": {"priority": "background"}},
    {"suffice": {"session_id": "talk-1"}},
    {"suffice": {"session_id": "talk-1", "min_tier": 3}},
    {"suffice": {"session_id": "talk-1"}},
)

# Refused by a field. The first half is shared by chat and plain completions.
WRONG_SHARED: tuple[dict[str, Any], ...] = (
    {"user": 7},
    {"metadata": "m"},
    {"store": "yes"},
    {"service_tier": 1},
    {"model": 5},
    {"model": ""},
    {"model": None},
    {"model": "m" * 5000},
    {"model": "gpt-9"},
    {"temperature": "hot"},
    {"temperature": 2.1},
    {"temperature": True},
    {"top_p": -1},
    {"top_k": 1.5},
    {"top_k": -2},
    {"min_p": 2},
    {"presence_penalty": 3},
    {"frequency_penalty": -3},
    {"repetition_penalty": 0},
    {"max_tokens": -1},
    {"max_tokens": 1.5},
    {"max_tokens": 2**40},
    {"max_tokens": 9000},
    {"min_tokens": -1},
    {"n": 0},
    {"n": 17},
    {"n": "two"},
    {"stop": 5},
    {"stop": ["x"] * 1000},
    {"stop": ["x", 5]},
    {"stop": [""]},
    {"stop": "x" * 1000},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": 5},
    {"ignore_eos": 1},
    {"seed": "dice"},
    {"seed": 2**64},
    {"stream": "yes"},
    {"stream_options": {}},
    {"stream": True, "stream_options": 3},
    {"stream": True, "stream_options": {"include_usage": "y"}},
    {"logit_bias": []},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"5": 101}},
    {"logit_bias": {str(i): 0 for i in range(2000)}},
    {"suffice": []},
    {"suffice": {"teir": 1}},
    {"suffice": {"tier": 9}},
    {"suffice": {"tier": "gold"}},
    {"suffice": {"tier": 1.5}},
    {"suffice": {"explore": "maybe"}},
    {"suffice": {"session_id": ""}},
    {"suffice": {"session_id": "s" * 1000}},
    {"suffice": {"policy": "none such"}},
    {"suffice": {"priority": "urgent"}},
    {"suffice": {"regions": []}},
    {"suffice": {"regions": ["mars"]}},
    {"suffice": {"regions": "eu"}},
    {"suffice": {"max_cost_usd": -1}},
    {"suffice": {"max_cost_usd": "cheap"}},
    {"suffice": {"max_cost_usd": 0.00001}},
    {"suffice": {"min_tier": 2, "max_tier": 1}},
    {"suffice": {"policy": "careful", "max_tier": 1}},
    {"model": "simple", "suffice": {"tier": 2}},
    {"model": "careful", "suffice": {"tier": 1}},
    {"model": "european", "suffice": {"tier": 2}},
    {"tools": [{"type": "function"}]},
    {"functions": [{}]},
    {"tool_choice": "required"},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {}}},
    {"response_format": "json"},
    {"modalities": ["text", "audio"]},
    {"audio": {}},
    {"guided_json": {}},
    {"use_beam_search": True},
)

WRONG_CHAT: tuple[dict[str, Any], ...] = (
    {"messages": []},
    {"messages": "hi"},
    {"messages": {}},
    {"messages": None},
    {"messages": USER * 3000},
    {"messages": ["hi"]},
    {"messages": [{"content": "hi"}]},
    {"messages": [{"role": "wizard", "content": "hi"}]},
    {"messages": [{"role": 3, "content": "hi"}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [{"role": "user", "content": ["x"]}]},
    {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"messages": [*USER, {"role": "user", "content": "x", "name": 7}]},
    {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
    {"messages": [{"role": "user", "content": "word " * 9000}]},
    {"max_tokens": 0},
    {"max_completion_tokens": -5},
    {"logprobs": 3},
    {"top_logprobs": 3},
    {"logprobs": True, "top_logprobs": 21},
    {"reasoning_effort": "extreme"},
    {"chat_template_kwargs": {"enable_thinking": 1}},
    {"chat_template_kwargs": 3},
    {"prediction": {"type": "guess"}},
    {"prediction": {"type": "content", "content": 7}},
)

TEXT_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"max_tokens": 1},
    {"max_tokens": 0},
    {"max_tokens": 0, "echo": True, "logprobs": 2},
    {"echo": True},
    {"echo": True, "logprobs": 2},
    {"logprobs": 0},
    {"logprobs": 2},
    {"stop": ["two"]},
    {"n": 2},
    {"n": 2, "best_of": 2},
    {"prompt": ["one two", "three four"]},
    {"prompt": ["one two", "three four"], "n": 2, "echo": True},
    {"prompt": [1, 2, 3]},
    {"prompt": [[1, 2], [3]]},
    {"model": "tier-3", "max_tokens": 20},
    {"suffice": {"session_id": "talk-2"}},
    {"prompt": ""},
)

WRONG_TEXT: tuple[dict[str, Any], ...] = (
    {"prompt": None},
    {"prompt": 5},
    {"prompt": {}},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": ["a", 5]},
    {"prompt": [-1]},
    {"prompt": ["x"] * 3000},
    {"prompt": ["a"] * 200, "n": 16},
    {"prompt": "word " * 9000},
    {"echo": "yes"},
    {"logprobs": True},
    {"logprobs": 99},
    {"best_of": 3},
    {"suffix": "after"},
)

VECTOR_BODIES: tuple[dict[str, Any], ...] = (
    {},
    {"input": ["one", "two"]},
    {"encoding_format": "base64"},
    {"encoding_format": "float"},
    {"dimensions": 16},
    {"model": "m1"},
    {"model": "simple"},
    {"model": "careful"},
    {"suffice": {"regions": ["eu"]}},
    {"suffice": {"session_id": "s", "explore": False, "priority": "live"}},
    {"dimensions": 5},
    {"dimensions": "many"},
    {"encoding_format": "int8"},
    {"input": None},
    {"input": 5},
    {"input": ""},
    {"input": []},
    {"input": [""]},
    {"input": ["x", 5]},
    {"input": [1, 2]},
    {"input": ["x"] * 5000},
    {"model": None},
    {"model": "gpt-9"},
    {"suffice": {"tier": 1}},
    {"suffice": {"regions": ["mars"]}},
    {"suffice": 5},
    {"user": 7},
)

WRONG_JSON: tuple[bytes, ...] = (
    b"",
    b"{",
    b"nope",
    b'{"model": "auto", "temperature": NaN}',
    b'{"model": "auto", "temperature": 1e999}',
    b'{"model": "auto", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "\xff"}',
    b"[" * 10_000,
    b'{"a":' * 40 + b"1" + b"}" * 40,
    b'{"model": "auto"} trailing',
    b"[]",
    b"3",
    b"null",
)

HEADERS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("x-suffice-tier", "2"),),
    (("x-suffice-tier", "expert"),),
    (("x-suffice-min-tier", "3"),),
    (("x-suffice-max-tier", "medium"),),
    (("x-suffice-explore", "false"),),
    (("x-suffice-session-id", "talk-3"),),
    (("x-suffice-policy", "frugal"),),
    (("x-suffice-priority", "background"),),
    (("x-suffice-regions", "us, eu"),),
    (("x-suffice-max-cost-usd", "0.002"),),
    (("x-suffice-tier", "1"), ("x-suffice-tier", "1")),
    (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),),
    (("traceparent", "nonsense"),),
    (("content-type", "text/plain"),),
    (("content-type", "application/json; charset=latin-1"),),
    (("accept-encoding", "gzip"),),
    (("origin", "http://localhost:3000"),),
    (("origin", "https://evil.example"),),
    (("authorization", "Bearer whatever"),),
    (("authorization", "Bearer sk-suffice-" + "x" * 43),),
    (("x-suffice-tier", "1"), ("x-suffice-tier", "2")),
    (("x-suffice-teir", "1"),),
    (("x-suffice-tier", "gold"),),
    (("x-suffice-min-tier", "4"), ("x-suffice-max-tier", "1")),
    (("x-suffice-explore", "maybe"),),
    (("x-suffice-priority", "urgent"),),
    (("x-suffice-regions", ""),),
    (("x-suffice-regions", "mars"),),
    (("x-suffice-max-cost-usd", "cheap"),),
    (("x-suffice-policy", "none"),),
    (("x-suffice-session-id", "s" * 1000),),
)

FEEDBACK: tuple[dict[str, Any], ...] = (
    {"kind": "correct", "value": True},
    {"kind": "rating", "value": 0.25, "comment": "so so", "metadata": {"page": "search"}},
    {"kind": "preferred_tier", "value": 2},
    {"kind": "reference", "reference": "5"},
    {"kind": "correct", "value": False, "reference": "5"},
    {"request_id": None},
    {"request_id": 7},
    {"request_id": UNKNOWN_ID},
    {"request_id": "chatcmpl-none"},
    {"kind": None},
    {"kind": "like"},
    {"kind": "rating", "value": None},
    {"kind": "rating", "value": 2},
    {"kind": "correct", "value": 1},
    {"kind": "preferred_tier", "value": 9},
    {"kind": "reference", "value": None},
    {"kind": "reference", "value": True, "reference": "5"},
    {"kind": "correct", "value": True, "comment": ""},
    {"kind": "correct", "value": True, "metadata": []},
    {"kind": "correct", "value": True, "metadata": {"big": "x" * 20_000}},
)

PATHS: tuple[tuple[str, str], ...] = (
    ("GET", "/v1/models"),
    ("GET", "/v1/models/auto"),
    ("GET", "/v1/models/tier-2"),
    ("GET", "/v1/models/m3"),
    ("GET", "/v1/models/careful"),
    ("GET", "/v1/models/gpt-9"),
    ("GET", "/v1/models/a/b%20c"),
    ("GET", f"/v1/requests/{UNKNOWN_ID}"),
    ("GET", "/v1/requests/none"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/"),
    ("GET", "/v1/nothing"),
    ("GET", "/v1/chat/completions/"),
    ("GET", CHAT),
    ("PUT", CHAT),
    ("DELETE", TEXT),
    ("PATCH", VECTORS),
    ("GET", "/v1/feedback"),
    ("POST", "/v1/models"),
    ("POST", "/healthz"),
    ("HEAD", "/healthz"),
    ("HEAD", "/v1/models"),
    ("HEAD", CHAT),
    ("OPTIONS", CHAT),
    ("OPTIONS", "/v1/models"),
    ("HEAD", "/metrics"),
    ("BREW", "/v1/models"),
)


def play(recorder: Recorder) -> None:
    """Play all of it to one server."""
    _answers(recorder)
    _refusals(recorder)
    _embeddings(recorder)
    _headers(recorder)
    _raw_bytes(recorder)
    _explanations(recorder)
    for method, path in PATHS:
        recorder.call(method, path)
    recorder.call("GET", "/metrics")


def _named(path: str, body: dict[str, Any]) -> str:
    return f"{path} {json.dumps(body, ensure_ascii=False)[:120]}"


def _chat(recorder: Recorder, change: dict[str, Any]) -> Any:
    body = {"model": "auto", "messages": USER} | change
    return recorder.call("POST", CHAT, body, name=_named(CHAT, change))


def _text(recorder: Recorder, change: dict[str, Any]) -> Any:
    body = {"model": "auto", "prompt": "one two three"} | change
    return recorder.call("POST", TEXT, body, name=_named(TEXT, change))


def _answers(recorder: Recorder) -> None:
    for content in CONTENTS:
        messages = {"messages": [{"role": "user", "content": content}]}
        _chat(recorder, messages)
        _chat(recorder, messages | {"stream": True})
        _text(recorder, {"prompt": content})
    for options in CHAT_OPTIONS:
        _chat(recorder, options)
        if len(options) <= 2 and "messages" not in options:
            _chat(recorder, {"stream": True, "stream_options": {"include_usage": True}} | options)
    for options in ROUTING:
        _chat(recorder, options)
    for model in ("unsure", "tier-3", "careful", "floor"):
        _chat(recorder, {"model": model, "stream": True})
        _chat(recorder, {"model": model, "stream": True, "stop": ["answer", "two"], "n": 2})
    for options in TEXT_OPTIONS:
        _text(recorder, options)
        _text(recorder, {"stream": True} | options)
    _text(recorder, {"stream": True, "stream_options": {"include_usage": True}})
    for _ in range(3):
        _chat(recorder, {"model": "thrifty", "suffice": {"tier": 1}})


def _refusals(recorder: Recorder) -> None:
    for change in (*WRONG_SHARED, *WRONG_CHAT):
        _chat(recorder, change)
    for change in (*WRONG_TEXT, *WRONG_SHARED[::6]):
        _text(recorder, change)
    for content in WRONG_JSON:
        recorder.call("POST", CHAT, content=content, name=f"{CHAT} {content[:60]!r}")
    for path in (TEXT, VECTORS, "/v1/feedback"):
        recorder.call("POST", path, content=b"{", name=f"{path} broken JSON")
        recorder.call("POST", path, content=b"[]", name=f"{path} no object")
        recorder.call("POST", path, {}, name=f"{path} an empty object")
    _chat(recorder, {"stream": True, "temperature": 9})
    _chat(recorder, {"stream": True, "model": "gpt-9"})


def _embeddings(recorder: Recorder) -> None:
    for change in VECTOR_BODIES:
        recorder.call("POST", VECTORS, {"model": "auto", "input": "one two"} | change, name=_named(VECTORS, change))


def _headers(recorder: Recorder) -> None:
    for headers in HEADERS:
        words = "; ".join(f"{name}: {value[:40]}" for name, value in headers)
        recorder.call("POST", CHAT, {"model": "auto", "messages": USER}, headers=headers, name=f"{CHAT} with {words}")
    body = {"model": "auto", "messages": USER, "suffice": {"tier": 1}}
    recorder.call("POST", CHAT, body, headers={"x-suffice-tier": "2"}, name="body over header")
    origin = {"origin": "https://evil.example"}
    for method, path in (("POST", TEXT), ("POST", VECTORS), ("GET", "/v1/models"), ("GET", "/healthz")):
        recorder.call(method, path, {} if method == "POST" else None, headers=origin, name=f"{path} from a web page")


def _raw_bytes(recorder: Recorder) -> None:
    body = json.dumps({"model": "simple", "messages": USER}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
    length = b"content-length: %d\r\n" % len(body)
    close = b"connection: close\r\n"
    whole = head + length + close + b"\r\n" + body
    kept = head + length + b"\r\n" + body
    post = ("POST",)
    chunks = b"5\r\n" + body[:5] + b"\r\n%x\r\n" % (len(body) - 5) + body[5:] + b"\r\n0\r\n\r\n"
    recorder.raw("chunked body", [head + close + b"transfer-encoding: chunked\r\n\r\n" + chunks], post)
    recorder.raw("no length and no body", [head + close + b"\r\n"], post)
    recorder.raw("HTTP/1.0", [whole.replace(b"HTTP/1.1", b"HTTP/1.0")], post)
    recorder.raw("HTTP/1.0 stream", [_streamed(body).replace(b"HTTP/1.1", b"HTTP/1.0")], post)
    recorder.raw("no host", [whole.replace(b"host: localhost\r\n", b"")], post)
    expecting = head + length + close + b"expect: 100-continue\r\n\r\n"
    recorder.raw("expect 100-continue", [expecting, body], post, pause_s=0.3)
    recorder.raw(
        "pipelined", [kept + kept + b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" + whole], ("POST",) * 4
    )
    recorder.raw("stream, then another", [_streamed(body, is_kept=True), whole], ("POST", "POST"), pause_s=0.2)
    recorder.raw("refused, then another", [kept.replace(b'"simple"', b'"nosuch"') + whole], ("POST", "POST"))
    recorder.raw("no HTTP", [b"\x00\x01garbage\r\n\r\n"])
    recorder.raw("HTTP/9.9", [b"GET / HTTP/9.9\r\n\r\n"])
    recorder.raw("a negative length", [head + b"content-length: -5\r\n\r\n"], post)
    recorder.raw("two lengths", [head + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcdef"], post)
    recorder.raw(
        "upgrade", [b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"]
    )
    recorder.raw("absolute form", [b"GET http://x/healthz HTTP/1.1\r\nhost: localhost\r\n" + close + b"\r\n"])
    recorder.raw("a path with a query", [b"GET /healthz?a=b HTTP/1.1\r\nhost: localhost\r\n" + close + b"\r\n"])
    recorder.raw("a head too large", [head + b"x-big: " + b"a" * 66_000 + b"\r\n"], post)
    huge = head + close + b"content-length: 10000000\r\n\r\n"
    recorder.raw("a body too large, announced", [huge], post)
    # One byte over the limit in one chunk: the server has read all that was sent when it refuses.
    recorder.raw(
        "a body too large, in chunks",
        [head + close + b"transfer-encoding: chunked\r\n\r\n400001\r\n" + b"x" * 0x400001],
        post,
    )


def _streamed(body: bytes, *, is_kept: bool = False) -> bytes:
    content = body[:-1] + b', "stream": true}'
    end = b"" if is_kept else b"connection: close\r\n"
    return (
        b"POST %s HTTP/1.1\r\nhost: localhost\r\n%scontent-length: %d\r\n\r\n"
        % (
            CHAT.encode(),
            end,
            len(content),
        )
        + content
    )


def _explanations(recorder: Recorder) -> None:
    for body in (
        {"model": "auto", "messages": USER},
        {"model": "unsure", "messages": USER, "n": 2},
        {"model": "simple", "messages": USER, "stream": True},
    ):
        answer = recorder.call("POST", CHAT, body, name=_named("asked to be explained", body))
        request_id = answer.header("x-suffice-request-id")
        for path in (f"/v1/requests/{request_id}", f"/v1/requests/chatcmpl-{request_id}"):
            name = _named(path.replace(request_id, "ID"), body)
            recorder.call("GET", path, name=name)
            recorder.call("GET", f"/admin{path}", name=f"/admin {name}")
    for change in FEEDBACK:
        sent = {"request_id": request_id} | change
        recorder.call("POST", "/v1/feedback", sent, name=_named("/v1/feedback", change))
    once = {"request_id": request_id, "kind": "correct", "value": True}
    key = {"idempotency-key": "once"}
    recorder.call("POST", "/v1/feedback", once, headers=key, name="feedback under a key")
    recorder.call("POST", "/v1/feedback", once | {"idempotency_key": "once"}, name="the same feedback again")
    recorder.call("POST", "/v1/feedback", once | {"value": False}, headers=key, name="other feedback, same key")
    other = once | {"idempotency_key": "other"}
    recorder.call("POST", "/v1/feedback", other, headers=key, name="two keys")
