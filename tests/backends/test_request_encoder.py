"""Requests become the JSON a server expects: by its names, and nothing it was not asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.config import RemoteModelConfig
from backends.errors import BackendFailure, UnsupportedByBackend
from backends.protocol import (
    Audio,
    File,
    GenerateRequest,
    Image,
    Media,
    Message,
    OutputFormat,
    SamplingParams,
    Thought,
    Tool,
    ToolCall,
    ToolChoice,
)
from backends.remote.request_encoder import request_body, request_path
from backends.remote.unary_codec import (
    embed_body,
    find_answer,
    read_embeddings,
    read_score,
    read_token_count,
    score_body,
    tokenize_body,
)

CHAT = GenerateRequest("r", messages=(Message("user", "q"),))
TEXT = GenerateRequest("r", prompt="q")
ALL = ("generate", "score", "embed", "thinking", "logprobs", "prompt_token_ids", "prediction", "tokenize")


def config_of(**options: Any) -> RemoteModelConfig:
    return RemoteModelConfig(
        urls=("http://far/v1",), model="m", **{"capabilities": ALL, "score_api": "vllm", **options}
    )


def body_of(request: GenerateRequest, *, with_usage: bool = False, **options: Any) -> dict[str, Any]:
    return request_body(request, config_of(**options), with_usage=with_usage)


def sampled(request: GenerateRequest = CHAT, **sampling: Any) -> GenerateRequest:
    return replace(request, sampling=SamplingParams(**sampling))


# --- generation ------------------------------------------------------------------------------------------------------


def test_a_plain_request_carries_nothing_beyond_openais_least() -> None:
    assert body_of(CHAT) == {
        "model": "m",
        "messages": [{"role": "user", "content": "q"}],
        "stream": True,
        "temperature": 1.0,
    }
    assert body_of(TEXT, with_usage=True) == {
        "model": "m",
        "prompt": "q",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 1.0,
    }
    assert (request_path(CHAT), request_path(TEXT)) == ("/chat/completions", "/completions")


OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "temperature": (0.0, {"temperature": 0.0}),
    "top_p": (0.5, {"top_p": 0.5}),
    "top_k": (3, {"top_k": 3}),
    "min_p": (0.1, {"min_p": 0.1}),
    "presence_penalty": (1.0, {"presence_penalty": 1.0}),
    "frequency_penalty": (-1.0, {"frequency_penalty": -1.0}),
    "repetition_penalty": (1.1, {"repetition_penalty": 1.1}),
    "logit_bias": ({7: -100.0}, {"logit_bias": {"7": -100.0}}),
    "seed": (0, {"seed": 0}),
    "max_tokens": (5, {"max_tokens": 5}),
    "min_tokens": (2, {"min_tokens": 2}),
    "stop": (("a", "b"), {"stop": ["a", "b"]}),
    "stop_token_ids": ((1, 2), {"stop_token_ids": [1, 2]}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "logprobs": (3, {"logprobs": True, "top_logprobs": 3}),
    "prompt_logprobs": (0, {"prompt_logprobs": 0}),
}


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_every_sampling_option_travels_by_itself(name: str) -> None:
    """An option that is added to the protocol and forgotten here fails this test."""
    value, sent = OPTIONS[name]
    assert body_of(sampled(**{name: value})) == {**body_of(CHAT), **sent}


def test_completions_have_their_own_shape_of_logprobs_and_limit() -> None:
    body = body_of(sampled(TEXT, logprobs=0, max_tokens=5), max_tokens_parameter="max_completion_tokens")
    assert (body["logprobs"], body["max_tokens"]) == (0, 5)
    assert "top_logprobs" not in body
    assert body_of(sampled(max_tokens=5), max_tokens_parameter="max_completion_tokens")["max_completion_tokens"] == 5


def test_more_stop_strings_than_a_server_takes_are_kept_for_us() -> None:
    assert body_of(sampled(stop=tuple("abcdef")))["stop"] == list("abcd")
    assert body_of(sampled(stop=tuple("abcdef")), max_stop=1)["stop"] == ["a"]


@pytest.mark.parametrize(
    ("thinking", "default", "parameter", "sent"),
    [
        (None, None, "chat_template_kwargs", {}),
        (None, True, "chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": True}}),
        (False, True, "chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": False}}),
        (True, False, "reasoning_effort", {"reasoning_effort": "medium"}),
        (False, None, "reasoning_effort", {"reasoning_effort": "none"}),
        (True, None, "none", {}),
    ],
)
def test_thinking_is_told_in_the_servers_way(
    thinking: bool | None, default: bool | None, parameter: str, sent: dict[str, Any]
) -> None:
    request = replace(CHAT, thinking=thinking)
    assert body_of(request, thinking=default, thinking_parameter=parameter) == {**body_of(CHAT), **sent}
    # Text completions know no template to tell it to.
    assert body_of(replace(TEXT, thinking=thinking), thinking=default, thinking_parameter=parameter) == body_of(TEXT)


def test_names_ids_echo_and_forwarded_fields() -> None:
    named = replace(CHAT, messages=(Message("user", "q", name="ann"), Message("assistant", "")))
    assert body_of(named)["messages"] == [
        {"role": "user", "content": "q", "name": "ann"},
        {"role": "assistant", "content": ""},
    ]
    assert body_of(replace(TEXT, echo=True))["echo"] is True
    ids = GenerateRequest("r", prompt_token_ids=(1, 2), echo=True)
    assert (body_of(ids)["prompt"], body_of(ids)["echo"]) == ([1, 2], True)
    extra = {"user": "u", "speculate": False, "cache_salt": "s"}
    assert body_of(replace(CHAT, extra=extra)) == {**body_of(CHAT), "user": "u"}


def test_calls_results_and_images_of_a_conversation() -> None:
    call = ToolCall("call_1", "look", '{"at": 1}')
    turns = (
        Message("user", "see", parts=("see", Image("https://x/y.png"), Image("data:image/png;base64,AA", "low"))),
        Message("assistant", "", tool_calls=(call,), reasoning="Hm."),
        Message("tool", "a cat", tool_call_id="call_1"),
    )
    assert body_of(replace(CHAT, messages=turns), capabilities=("generate", "images"))["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
            ],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "a cat", "tool_call_id": "call_1"},
    ]
    with pytest.raises(UnsupportedByBackend, match="images"):
        body_of(replace(CHAT, messages=turns), capabilities=("generate", "audio", "files"))


@pytest.mark.parametrize(
    ("part", "capability", "body"),
    [
        (Audio("AA==", "mp3"), "audio", {"type": "input_audio", "input_audio": {"data": "AA==", "format": "mp3"}}),
        (File("data:,", "a"), "files", {"type": "file", "file": {"file_data": "data:,", "filename": "a"}}),
        (File("data:,"), "files", {"type": "file", "file": {"file_data": "data:,"}}),
    ],
)
def test_media_are_sent_to_servers_that_take_them(part: Media, capability: str, body: dict[str, Any]) -> None:
    asked = replace(CHAT, messages=(Message("user", "", parts=(part,)),))
    assert body_of(asked, capabilities=("generate", capability))["messages"][0]["content"] == [body]
    others = {"images", "audio", "files"} - {capability}
    with pytest.raises(UnsupportedByBackend, match=capability):
        body_of(asked, capabilities=("generate", *others))


def test_signed_thoughts_go_to_servers_that_check_them() -> None:
    thoughts = (Thought("hm", "s"), Thought("", "x", is_redacted=True))
    call = ToolCall("1", "look", "{}")
    thinking = Message("assistant", "", tool_calls=(call,), reasoning="hm", thoughts=thoughts)
    asked = replace(CHAT, messages=(thinking, Message("tool", "a", tool_call_id="1")))
    (message, _) = body_of(asked, capabilities=("generate", "thinking_blocks"))["messages"]
    assert message["thinking_blocks"] == [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
    ]
    assert "reasoning_content" not in message
    (message, _) = body_of(asked)["messages"]
    assert (message["reasoning_content"], "thinking_blocks" in message) == ("hm", False)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (ToolChoice(), {}),
        (ToolChoice("none"), {"tool_choice": "none"}),
        (ToolChoice("required", parallel=False), {"tool_choice": "required", "parallel_tool_calls": False}),
        (
            ToolChoice("required", ("f",)),
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        (
            ToolChoice("auto", ("f",)),
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
                }
            },
        ),
    ],
)
def test_tools_and_the_choice_among_them(choice: ToolChoice, said: dict[str, object]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = (Tool("f", "does f", schema, strict=True), Tool("g"))
    assert body_of(replace(CHAT, tools=tools, tool_choice=choice), capabilities=("generate", "tools")) == {
        **body_of(CHAT),
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "description": "does f", "parameters": schema, "strict": True},
            },
            {"type": "function", "function": {"name": "g"}},
        ],
        **said,
    }


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (OutputFormat("json_object"), {"response_format": {"type": "json_object"}}),
        (
            OutputFormat("json_schema", {"type": "array"}, strict=True, name="list"),
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "list", "schema": {"type": "array"}, "strict": True},
                }
            },
        ),
        (OutputFormat("regex", "a+", strict=True), {"structured_outputs": {"regex": "a+"}}),
        (OutputFormat("choice", ("a", "b"), strict=True), {"structured_outputs": {"choice": ["a", "b"]}}),
        (OutputFormat("json_schema", "{}", strict=True), {"structured_outputs": {"json": "{}"}}),
    ],
)
def test_what_the_answer_must_be(wanted: OutputFormat, said: dict[str, object]) -> None:
    found = body_of(replace(CHAT, output_format=wanted), capabilities=("generate", "structured_output"))
    assert found == {**body_of(CHAT), **said}


def test_tenants_are_apart_in_the_cache_of_a_server_that_can() -> None:
    """(security review H3)"""
    salted = replace(CHAT, extra={"cache_salt": "s"})
    assert body_of(salted, cache_salt=True)["cache_salt"] == "s"
    assert "cache_salt" not in body_of(replace(CHAT, extra={"cache_salt": ""}), cache_salt=True)


def test_the_operators_fields_have_the_last_word() -> None:
    body = body_of(sampled(temperature=0.2), extra_body={"temperature": 0.7, "service_tier": "flex"})
    assert (body["temperature"], body["service_tier"]) == (0.7, "flex")


@pytest.mark.parametrize(
    ("request_", "options", "sent"),
    [
        (replace(CHAT, prediction="so"), {}, True),
        (replace(CHAT, prediction=""), {}, False),
        (replace(TEXT, prediction="so"), {}, False),
        (replace(sampled(logprobs=0), prediction="so"), {}, False),
        (replace(CHAT, prediction="so"), {"capabilities": ("generate",), "score_api": "none"}, False),
    ],
)
def test_a_prediction_goes_only_where_it_is_taken(
    request_: GenerateRequest, options: dict[str, Any], sent: bool
) -> None:
    body = body_of(request_, **options)
    assert body.get("prediction") == ({"type": "content", "content": "so"} if sent else None)


@pytest.mark.parametrize(
    ("request_", "options", "option"),
    [
        (sampled(logprobs=0), {"capabilities": ("generate",), "score_api": "none"}, "logprobs"),
        (replace(CHAT, thinking=True), {"capabilities": ("generate",), "score_api": "none"}, "thinking"),
        (GenerateRequest("r", prompt_token_ids=(1,)), {"capabilities": ("generate",)}, "prompt_token_ids"),
        (sampled(prompt_logprobs=0), {"score_api": "echo"}, "prompt_logprobs"),
        (replace(CHAT, echo=True), {}, "echo"),
    ],
)
def test_what_was_not_offered_is_refused_by_name(
    request_: GenerateRequest, options: dict[str, Any], option: str
) -> None:
    with pytest.raises(UnsupportedByBackend) as caught:
        body_of(request_, **options)
    assert caught.value.option == option
    # Not to think needs no capability.
    assert body_of(replace(CHAT, thinking=False), **options)


# --- embeddings and counts -------------------------------------------------------------------------------------------


def embeddings(*rows: Any, **usage: Any) -> bytes:
    return orjson.dumps({"data": [{"index": index, "embedding": vector} for index, vector in rows], "usage": usage})


def test_vectors_are_put_in_order_and_made_unit_length() -> None:
    result = read_embeddings(embeddings((1, [0.0, -2.0]), (0, [3, 4]), prompt_tokens=5), 2)
    assert result.vectors == ((0.6, 0.8), (0.0, -1.0))
    assert result.usage.prompt_tokens == 5
    assert embed_body(("a", "b"), config_of(extra_body={"dimensions": 2})) == {
        "model": "m",
        "input": ["a", "b"],
        "encoding_format": "float",
        "dimensions": 2,
    }


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), min_size=1, max_size=5), st.randoms())
def test_any_order_of_rows_gives_the_same_vectors(vectors: list[list[float]], rng: Any) -> None:
    rows = [(index, [*vector, 1.0]) for index, vector in enumerate(vectors)]
    shuffled = rng.sample(rows, len(rows))
    result = read_embeddings(embeddings(*shuffled), len(rows))
    assert result == read_embeddings(embeddings(*rows), len(rows))
    assert all(sum(value * value for value in vector) == pytest.approx(1) for vector in result.vectors)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"data": null}',
        b'{"data": [{"index": 0}]}',
        b'{"data": [{"embedding": [1.0]}]}',
        b'{"data": [7]}',
        embeddings((0, "AAAA")),
        embeddings((0, [0.0, 0.0])),
        embeddings((0, [])),
        embeddings((0, [1e200, 1e200])),
        embeddings((0, [None])),
        embeddings((1, [1.0])),
        embeddings((0, [1.0]), (1, [1.0])),
        embeddings((0, [1.0]), (0, [1.0])),
        embeddings((0, [1.0]), prompt_tokens=-1),
    ],
)
def test_embeddings_that_are_none_are_a_failure(data: bytes) -> None:
    with pytest.raises(BackendFailure, match="embeddings cannot be read"):
        read_embeddings(data, 1)


def test_token_counts() -> None:
    assert read_token_count(b'{"count": 7, "tokens": [1]}') == 7
    assert tokenize_body(CHAT, config_of()) == {"model": "m", "messages": [{"role": "user", "content": "q"}]}
    assert tokenize_body(TEXT, config_of()) == {"model": "m", "prompt": "q"}
    for data in (b"", b"7", b"[]", b"{}", b'{"count": "7"}', b'{"count": true}', b'{"count": 1.5}'):
        with pytest.raises(BackendFailure, match="token count cannot be read"):
            read_token_count(data)


# --- scoring ---------------------------------------------------------------------------------------------------------


def test_bodies_of_a_score() -> None:
    assert score_body(TEXT, " a", config_of()) == (
        "/completions",
        {"model": "m", "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "prompt": "q a"},
    )
    path, body = score_body(CHAT, "a", config_of(extra_body={"x": 1}))
    assert (path, body["x"], body["messages"][-1]) == ("/chat/completions", 1, {"role": "assistant", "content": "a"})
    assert (body["add_generation_prompt"], body["continue_final_message"]) == (False, True)
    path, body = score_body(TEXT, " a", config_of(score_api="echo"))
    assert (path, body["echo"], body["logprobs"], body["prompt"]) == ("/completions", True, 5, "q a")


@pytest.mark.parametrize(
    ("request_", "options", "option"),
    [
        (TEXT, {"score_api": "none", "capabilities": ("generate",)}, "score"),
        (GenerateRequest("r", prompt_token_ids=(1,)), {}, "prompt_token_ids"),
        (CHAT, {"score_api": "echo"}, "score of messages"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(
    request_: GenerateRequest, options: dict[str, Any], option: str
) -> None:
    with pytest.raises(UnsupportedByBackend) as caught:
        score_body(request_, "a", config_of(**options))
    assert caught.value.option == option


@pytest.mark.parametrize(
    ("tokens", "answer", "start"),
    [
        (["q", " one", " two"], " one two", 1),
        (["q", " one", " two"], "one two", 1),
        # The answer's first token begins before it, where the vocabulary joins the two.
        (["q: one", " two"], " one two", 0),
        # A template may trim the answer's end.
        (["q", " one", " two"], " one two \n", 1),
        (["<|assistant|>", "a", "b", "\n"], "ab", 1),
        (["x", "x", "x"], "x", 2),
    ],
)
def test_the_answers_tokens_are_found_from_the_end(tokens: list[str], answer: str, start: int) -> None:
    assert find_answer(tokens, answer) == start


@pytest.mark.parametrize("tokens", [[], ["q"], ["one", " two", "x" * 200], ["y"] * 500])
def test_tokens_that_do_not_end_with_the_answer_are_a_failure(tokens: list[str]) -> None:
    with pytest.raises(BackendFailure, match="do not end with the answer"):
        find_answer(tokens, "one two")


@given(
    st.lists(st.text("ab ", min_size=1, max_size=3), max_size=5),
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=5),
)
def test_the_tokens_found_hold_the_whole_answer(before: list[str], after: list[str]) -> None:
    answer = "".join(after)
    start = find_answer([*before, *after], answer)
    found = "".join([*before, *after][start:])
    assert answer in found
    assert start >= len(before)


def vllm(*positions: Any) -> bytes:
    return orjson.dumps({"choices": [{"text": "", "prompt_logprobs": positions}], "usage": {"prompt_tokens": 3}})


def test_a_score_of_vllm_counts_ranks_from_nothing() -> None:
    data = vllm(
        None,
        {"5": {"logprob": -2.0, "rank": 4, "decoded_token": " one"}},
        {"6": {"logprob": -0.1, "rank": 1, "decoded_token": " two"}, "9": {"logprob": -3.0, "decoded_token": " x"}},
    )
    result = read_score(data, TEXT, " one two", config_of())
    assert (result.token_ids, result.logprobs, result.ranks) == ((5, 6), (-2.0, -0.1), (3, 0))
    assert result.usage.prompt_tokens == 3


def test_a_score_by_echo_takes_the_answers_characters_only() -> None:
    logprobs = {
        "tokens": ["q", " one", " two", "!"],
        "token_logprobs": [None, -1.0, -0.5, -9.0],
        "top_logprobs": [None, {" a": -0.2, " one": -1.0, " c": -0.9}, {" two": -0.5}, None],
        "text_offset": [0, 1, 5, 9],
    }
    data = orjson.dumps({"choices": [{"logprobs": logprobs}]})
    result = read_score(data, TEXT, " one two", config_of(score_api="echo"))
    assert (result.logprobs, result.ranks, result.token_ids) == ((-1.0, -0.5), (2, 0), (-1, -1))
    with pytest.raises(BackendFailure, match="no tokens of the answer"):
        read_score(data, replace(TEXT, prompt="q" * 50), " one", config_of(score_api="echo"))


@pytest.mark.parametrize("score_api", ["vllm", "echo"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [{"text": "x"}]}',
        b'{"choices": [{"logprobs": {"tokens": ["a"]}}]}',
        b'{"choices": [{"prompt_logprobs": [{"1": {"logprob": -1.0, "decoded_token": "a"}}]}]}',
        b'{"choices": [{"prompt_logprobs": [{"x": {"logprob": -1.0, "decoded_token": "a", "rank": 1}}]}]}',
    ],
)
def test_a_score_that_is_none_is_a_failure(data: bytes, score_api: str) -> None:
    with pytest.raises(BackendFailure):
        read_score(data, TEXT, "a", config_of(score_api=score_api))
