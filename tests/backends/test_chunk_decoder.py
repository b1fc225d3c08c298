"""Chunks of servers that differ in small ways read the same; whatever else they send is refused by type."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.protocol import FinishReason, Thought, TokenLogprob, Usage
from backends.remote.chunk_decoder import UNKNOWN_TOKEN_ID, AnswerChunk, ErrorChunk, MalformedChunk, read_chunk


def read(**body: Any) -> AnswerChunk:
    return read_chunk(orjson.dumps(body))


def chunk_of(**choice: Any) -> AnswerChunk:
    return read(object="chat.completion.chunk", choices=[{"index": 0, **choice}])


# --- content ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "text", "reasoning"),
    [
        ({"delta": {"content": "a"}}, "a", ""),
        ({"delta": {"role": "assistant", "content": ""}}, "", ""),
        ({"delta": {"role": "assistant", "content": None}}, "", ""),
        ({"delta": {}}, "", ""),
        # Azure sends null where OpenAI sends an empty object.
        ({"delta": None, "text": "a"}, "a", ""),
        ({"message": {"role": "assistant", "content": "whole"}}, "whole", ""),
        ({"text": "completion"}, "completion", ""),
        # DeepSeek, llama.cpp and SGLang name it so; newer vLLM and OpenRouter the other way; some send both.
        ({"delta": {"reasoning_content": "why"}}, "", "why"),
        ({"delta": {"reasoning": "why"}}, "", "why"),
        ({"delta": {"reasoning": "why", "reasoning_content": "why"}}, "", "why"),
        ({"delta": {"content": "a", "reasoning_content": None}}, "a", ""),
        ({"delta": {"content": "a", "tool_calls": None, "refusal": None, "audio": None}}, "a", ""),
        ({"delta": {"content": "🦊\u2028\u0000"}}, "🦊\u2028\u0000", ""),
    ],
)
def test_content_is_found_wherever_a_server_puts_it(choice: dict[str, Any], text: str, reasoning: str) -> None:
    chunk = chunk_of(**choice)
    assert (chunk.text, chunk.reasoning) == (text, reasoning)
    assert chunk.has_content == bool(text or reasoning)
    assert (chunk.reason, chunk.usage, chunk.prompt_logprobs) == (None, None, None)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("stop", FinishReason.STOP),
        ("eos", FinishReason.STOP),
        ("eos_token", FinishReason.STOP),
        ("stop_sequence", FinishReason.STOP),
        ("end_turn", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("max_tokens", FinishReason.LENGTH),
        ("tool_calls", FinishReason.TOOL_CALLS),
        ("function_call", FinishReason.TOOL_CALLS),
        ("content_filter", FinishReason.CONTENT_FILTER),
        (None, None),
        ("", None),
    ],
)
def test_finish_reasons_of_every_server(said: str | None, reason: FinishReason | None) -> None:
    chunk = chunk_of(delta={}, finish_reason=said)
    assert (chunk.reason, chunk.unknown_reason) == (reason, None)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"stop_reason": "END"}, "END"),
        ({"matched_stop": "END"}, "END"),
        ({"stop_reason": 128009, "matched_stop": None}, None),
        ({}, None),
    ],
)
def test_the_stop_string_that_vllm_and_sglang_name(said: dict[str, Any], found: str | None) -> None:
    assert chunk_of(delta={}, finish_reason="stop", **said).stop_string == found


@pytest.mark.parametrize(
    ("blocks", "signed"),
    [
        (None, ()),
        ([{"type": "thinking", "thinking": "hm", "signature": ""}], ()),
        ([{"type": "thinking", "thinking": "", "signature": "s"}], (Thought("", "s"),)),
        ([{"type": "redacted_thinking", "data": "x"}], (Thought("", "x", is_redacted=True),)),
        ([{"type": "thinking", "thinking": "a", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}], ()),
    ],
)
def test_signatures_as_litellm_sends_them(blocks: Any, signed: tuple[Thought, ...]) -> None:
    assert chunk_of(delta={"thinking_blocks": blocks, "reasoning_content": "hm"}).signed == signed


def test_a_reason_nobody_documented_is_an_error_that_quotes_it() -> None:
    chunk = chunk_of(delta={"content": "half"}, finish_reason="abort" * 100)
    assert chunk.reason is FinishReason.ERROR
    assert chunk.unknown_reason == ("abort" * 100)[:100]


# --- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}, Usage(9, 4)),
        ({"prompt_tokens": 9, "completion_tokens": None}, Usage(9, 0)),
        ({}, Usage()),
        (
            {
                "prompt_tokens": 9,
                "completion_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 8, "audio_tokens": 0},
                "completion_tokens_details": {
                    "reasoning_tokens": 3,
                    "accepted_prediction_tokens": 2,
                    "rejected_prediction_tokens": 1,
                },
            },
            Usage(9, 4, 8, 3, accepted_prediction_tokens=2, rejected_prediction_tokens=1),
        ),
        ({"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": None}, Usage(9, 4)),
        # DeepSeek, Moonshot, and proxies of Anthropic; OpenAI's name goes before them.
        ({"prompt_tokens": 9, "prompt_cache_hit_tokens": 5, "prompt_cache_miss_tokens": 4}, Usage(9, cached_tokens=5)),
        ({"prompt_tokens": 9, "cached_tokens": 5}, Usage(9, cached_tokens=5)),
        ({"prompt_tokens": 9, "cache_read_input_tokens": 5}, Usage(9, cached_tokens=5)),
        (
            {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}, "cache_read_input_tokens": 5},
            Usage(9, cached_tokens=0),
        ),
        # Details are parts of their whole, whatever a server says: a bill must not go below nothing.
        (
            {
                "prompt_tokens": 9,
                "completion_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 64},
                "completion_tokens_details": {"reasoning_tokens": 40},
            },
            Usage(9, 4, 9, 4),
        ),
    ],
)
def test_token_counts_are_read_and_kept_within_their_whole(body: dict[str, Any], usage: Usage) -> None:
    assert read(object="chat.completion.chunk", choices=[], usage=body).usage == usage
    assert read(choices=[{"delta": {"content": "a"}}], usage=body) == AnswerChunk("a", usage=usage)


# The last ones are beyond what a column holds (security review L8).
@pytest.mark.parametrize("count", [-1, 1.5, "7", True, [], {}, 2**31, 2**62, 10**30])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
def test_a_count_that_is_none_is_ignored(name: str, count: Any) -> None:
    body = b'{"choices": [], "usage": {"%s": %s}}' % (name.encode(), str(count).encode())
    if not isinstance(count, int) or isinstance(count, bool):
        body = orjson.dumps({"choices": [], "usage": {name: count}})
    chunk = read_chunk(body)
    assert (chunk.usage, chunk.has_bad_usage) == (None, True)


# --- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_of_chats_and_of_completions() -> None:
    top = [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -1.5, "bytes": None}]
    chat = chunk_of(
        delta={"content": "a"}, logprobs={"content": [{"token": "a", "logprob": -0.5, "top_logprobs": top}]}
    )
    text = chunk_of(
        text="a", logprobs={"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -1.5}]}
    )
    alternatives = (("a", UNKNOWN_TOKEN_ID, -0.5), ("b", UNKNOWN_TOKEN_ID, -1.5))
    assert chat.logprobs == text.logprobs == (TokenLogprob("a", UNKNOWN_TOKEN_ID, -0.5, alternatives),)


@pytest.mark.parametrize(
    ("logprobs", "tokens"),
    [
        (None, []),
        ({"content": None, "refusal": None}, []),
        ({"content": []}, []),
        ({"content": [{"token": "a", "logprob": -1, "top_logprobs": None}]}, [("a", UNKNOWN_TOKEN_ID)]),
        # llama.cpp names the id as well.
        ({"content": [{"token": "a", "logprob": -1.0, "id": 7, "top_logprobs": []}]}, [("a", 7)]),
        ({"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0], "top_logprobs": None}, [("a", -1), ("b", -1)]),
        # The first token of an echoed prompt has none.
        ({"tokens": ["a", "b"], "token_logprobs": [None, -2.0], "top_logprobs": [None, {"b": -2.0}]}, [("b", -1)]),
    ],
)
def test_shapes_of_logprobs(logprobs: Any, tokens: list[tuple[str, int]]) -> None:
    entries = chunk_of(text="", logprobs=logprobs).logprobs
    assert [(entry.token, entry.token_id) for entry in entries] == tokens


@pytest.mark.parametrize(
    "logprobs",
    [
        [],
        "none",
        {"content": [{"logprob": -1.0}]},
        {"content": [{"token": "a"}]},
        {"content": [{"token": "a", "logprob": None}]},
        {"content": [{"token": "a", "logprob": "Infinity"}]},
        {"content": [{"token": "a", "logprob": "-inf"}]},
        {"content": [{"token": 5, "logprob": -1.0}]},
        {"content": [{"token": "a", "logprob": -1.0, "id": "7"}]},
        {"content": [{"token": "a", "logprob": -1.0, "top_logprobs": [{"token": None, "logprob": -1.0}]}]},
        {"tokens": ["a", "b"], "token_logprobs": [-1.0]},
        {"tokens": ["a"]},
        {"tokens": [7], "token_logprobs": [-1.0]},
        {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [["a", -1.0]]},
    ],
)
def test_broken_logprobs_are_refused(logprobs: Any) -> None:
    with pytest.raises(MalformedChunk):
        chunk_of(text="a", logprobs=logprobs)


def test_prompt_logprobs_as_vllm_sends_them() -> None:
    """The prompt's own token comes first, whatever its rank; alternatives are sorted; the first position has none."""
    positions = [
        None,
        {"12": {"logprob": -3.0, "rank": 2, "decoded_token": " b"}, "7": {"logprob": -0.1, "decoded_token": " c"}},
        {"9": {"logprob": -0.2, "rank": 1, "decoded_token": None}},
    ]
    expected = (
        None,
        TokenLogprob(" b", 12, -3.0, ((" c", 7, -0.1), (" b", 12, -3.0))),
        TokenLogprob("", 9, -0.2, (("", 9, -0.2),)),
    )
    # Chats have them beside the choices, completions within.
    assert read(choices=[{"message": {"content": "x"}}], prompt_logprobs=positions).prompt_logprobs == expected
    assert chunk_of(text="x", prompt_logprobs=positions).prompt_logprobs == expected
    for broken in ([{}], [{"x": {"logprob": -1.0}}], [{"1": {}}], [7], 7):
        with pytest.raises(MalformedChunk):
            chunk_of(text="x", prompt_logprobs=broken)


# --- what is no chunk ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense",
        b'{"choices": [{"delta": {"con',
        b"[]",
        b"7",
        b'"text"',
        b"null",
        b"{}",
        b'{"id": "x"}',
        b'{"choices": {}, "object": 7, "x": {"choices": 1}, "choices": {"a": 1}}',
        b'{"choices": [7]}',
        b'{"choices": [[]]}',
        b'{"choices": "abc"}',
        b'{"choices": [{"delta": {"content": 7}}]}',
        b'{"choices": [{"delta": {"content": ["a"]}}]}',
        b'{"choices": [{"delta": {"reasoning_content": {}}}]}',
        b'{"choices": [{"delta": "text"}]}',
        b'{"choices": [{"finish_reason": {}}]}',
        b"\xff\xfe{}",
        b"[" * 100_000,
    ],
)
def test_what_is_no_chunk_is_refused_with_its_beginning(data: bytes) -> None:
    with pytest.raises(MalformedChunk) as caught:
        read_chunk(data)
    assert "got " in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_keep_alive_object_is_an_empty_chunk() -> None:
    assert read(object="chat.completion.chunk", choices=[]) == AnswerChunk()
    assert read(object="ping") == AnswerChunk()
    assert read(choices=None, usage={"prompt_tokens": 1}) == AnswerChunk(usage=Usage(1))
    # Some proxies send null in every good chunk.
    assert read(error=None, choices=[{"delta": {"content": "a"}}]).text == "a"


@pytest.mark.parametrize(
    "body", [{"error": {"message": "died", "code": 500}}, {"error": "died"}, {"object": "error", "message": "died"}]
)
def test_an_error_object_is_handed_on_whole(body: dict[str, Any]) -> None:
    with pytest.raises(ErrorChunk) as caught:
        read_chunk(orjson.dumps(body))
    assert caught.value.body == body


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["token", "logprob", "content", "id"]) | st.text(max_size=3), inner, max_size=3
        )
    ),
    max_leaves=8,
)
FIELDS = ("content", "text", "reasoning", "reasoning_content", "logprobs", "finish_reason", "delta", "message")


@pytest.mark.slow
@given(
    st.dictionaries(st.sampled_from([*FIELDS, "prompt_logprobs"]), JSON, max_size=4),
    st.dictionaries(st.sampled_from(["usage", "error", "object", "prompt_logprobs"]), JSON, max_size=3),
)
def test_any_json_is_a_typed_chunk_or_refused(choice: dict[str, Any], rest: dict[str, Any]) -> None:
    try:
        chunk = read_chunk(orjson.dumps({"choices": [choice], **rest}))
    except (MalformedChunk, ErrorChunk):
        return
    assert isinstance(chunk.text + chunk.reasoning, str)
    assert all(isinstance(entry.token, str) and isinstance(entry.token_id, int) for entry in chunk.logprobs)
    assert all(
        isinstance(token, str) and isinstance(number, int) for entry in chunk.logprobs for token, number, _ in entry.top
    )
    if chunk.usage is not None:
        assert 0 <= chunk.usage.cached_tokens <= chunk.usage.prompt_tokens
        assert 0 <= chunk.usage.reasoning_tokens <= chunk.usage.completion_tokens
