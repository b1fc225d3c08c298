"""Bodies to requests: what chat, completions and embeddings make of them, and no JSON makes one fall over."""

from __future__ import annotations

from typing import Any

import jsonschema
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.protocol import Priority, SamplingParams
from gateway.api.chat_codec import ChatBody, ChatDecoder
from gateway.api.completion_codec import CompletionBody, CompletionDecoder
from gateway.api.declaration import schema_of
from gateway.api.embedding_decoder import EmbeddingBody, EmbeddingRequest, decode_embedding_request
from gateway.api.generation_body import BodyLimits
from gateway.api.request import NO_PREFERENCES, TextPart, Turn
from gateway.config.sections import ServerConfig
from gateway.errors import InvalidRequest, UnsupportedOption

LIMITS = BodyLimits(ServerConfig(max_n=4, max_messages=3, max_stop=2), {"small": 1, "large": 2})
chat, completion = ChatDecoder(LIMITS), CompletionDecoder(LIMITS)
MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_plain_chat_takes_every_default() -> None:
    request = chat({"model": "auto", "messages": MESSAGES}, {})
    assert request.prompts == ((Turn("user", (TextPart("hi"),)),),)
    assert request.sampling == SamplingParams()
    assert request.preferences is NO_PREFERENCES
    assert (request.n, request.stream, request.thinking, request.prediction) == (1, False, None, None)


def test_parts_roles_and_names_keep_their_order() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]
    messages = [{"role": "developer", "content": "be brief", "name": "ann"}, {"role": "assistant", "content": content}]
    request = chat({"model": "auto", "messages": messages}, {})
    assert request.prompts[0] == (
        Turn("system", (TextPart("be brief"),), "ann"),
        Turn("assistant", (TextPart("a"), TextPart("no", is_refusal=True))),
    )


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        ({"top_p": 0, "top_k": -1}, SamplingParams(top_p=1e-9, top_k=0)),
        ({"temperature": 1, "seed": 2**63 - 1}, SamplingParams(temperature=1.0, seed=2**63 - 1)),
        ({"max_tokens": 5, "max_completion_tokens": 7}, SamplingParams(max_tokens=7)),
        ({"max_completion_tokens": None, "max_tokens": 5}, SamplingParams(max_tokens=5)),
        ({"stop": "END"}, SamplingParams(stop=("END",))),
        ({"stop": ["a", "b"], "stop_token_ids": [1]}, SamplingParams(stop=("a", "b"), stop_token_ids=(1,))),
        ({"logit_bias": {"007": 3, "5": -100}}, SamplingParams(logit_bias={7: 3.0, 5: -100.0})),
        ({"logprobs": True}, SamplingParams(logprobs=0)),
        ({"logprobs": True, "top_logprobs": 3}, SamplingParams(logprobs=3)),
        ({"temperature": None, "min_p": None, "stop": None, "logit_bias": None}, SamplingParams()),
    ],
)
def test_sampling_is_read(body: dict[str, Any], sampling: SamplingParams) -> None:
    assert chat({"model": "auto", "messages": MESSAGES} | body, {}).sampling == sampling


def test_preferences_of_the_body_win_over_the_headers() -> None:
    own = {"tier": "large", "regions": "eu", "max_cost_usd": 0.5}
    headers = {"tier": "1", "explore": "false", "regions": "us"}
    body = {"model": "auto", "messages": MESSAGES, "suffice": own, "service_tier": "flex"}
    preferences = chat(body, headers).preferences
    assert preferences.given == {
        "priority": "background",
        "tier": 2,
        "explore": False,
        "regions": ("eu",),
        "max_cost_usd": "0.5",
    }
    assert preferences.priority is Priority.BACKGROUND


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("x", ("x",)),
        (["x", ""], ("x", "")),
        ([1, 2], ((1, 2),)),
        ([[1], "x"], ((1,), "x")),
    ],
)
def test_prompts_are_text_or_token_ids(prompt: Any, prompts: Any) -> None:
    assert completion({"model": "auto", "prompt": prompt}, {}).prompts == prompts


@pytest.mark.parametrize(
    ("prompt", "param", "message"),
    [
        (None, "prompt", "expected a string, an array of strings or an array of token ids, got null"),
        ([], "prompt", "'prompt' is an empty array"),
        ([1, "x"], "prompt[1]", "expected a token id, got a string"),
        (["x", 1], "prompt[1]", "expected an array of token ids, got an integer"),
        ([True], "prompt[0]", "expected a token id, got a boolean"),
        ([[-1]], "prompt[0][0]", "expected a token id from 0, got -1"),
        ([["x"], []], "prompt[0][0]", "expected a token id, got a string"),
        (["x", []], "prompt[1]", "'prompt[1]' is empty; expected at least one token id"),
        (["x"] * 129, "prompt", "expected at most 128 prompts, got '129 prompts'"),
    ],
)
def test_wrong_prompts_are_named(prompt: Any, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        completion({"model": "auto", "prompt": prompt}, {})
    assert raised.value.param == param
    assert message in str(raised.value)


def test_what_is_unsupported_is_told_before_what_is_wrong() -> None:
    old_turn = {"role": "function", "content": "x", "name": "f"}
    with pytest.raises(UnsupportedOption) as raised:
        chat({"model": "auto", "messages": [*MESSAGES, old_turn]}, {})
    assert raised.value.param == "messages[1]"
    with pytest.raises(UnsupportedOption) as raised:
        chat({"model": "auto", "messages": 5, "temperature": 9, "functions": [{}]}, {})
    assert raised.value.param == "functions"


def test_an_embedding_request_takes_its_regions_from_body_or_header() -> None:
    body = {"model": "e", "input": "x", "encoding_format": "base64", "suffice": {"explore": 5}}
    assert decode_embedding_request(body, {}) == EmbeddingRequest("e", ("x",), as_base64=True)
    assert decode_embedding_request(body, {"regions": "eu, us"}).regions == ("eu", "us")
    with pytest.raises(InvalidRequest, match=r"no option 'suffice\.tier'"):
        decode_embedding_request(body | {"suffice": {"tier": 1}}, {})
    with pytest.raises(InvalidRequest, match="no option 'x-suffice-tier'"):
        decode_embedding_request(body, {"tier": "1"})


_texts = st.sampled_from(["", "user", "auto", "text", "content", "x", "5", "tier-1", "large", "flex", "none"])
_names = st.sampled_from(["role", "content", "type", "text", "name", "tier", "regions", "include_usage", "5", "zzz"])
_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=4),
    max_leaves=8,
)
_fields = st.sampled_from([*{*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}, "input", "dimensions"])
_all_fields = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, *EmbeddingBody.__struct_fields__}


_SCHEMAS = {
    each: jsonschema.Draft202012Validator(schema)
    for each, schema in (
        (chat, chat.schema()),
        (completion, completion.schema()),
        (decode_embedding_request, schema_of(EmbeddingBody)),
    )
}


@given(st.dictionaries(_fields, _values, max_size=5), st.sampled_from([chat, completion, decode_embedding_request]))
def test_any_json_is_served_as_the_schema_says_or_blamed(changes: dict[str, Any], decode: Any) -> None:
    parsed = orjson.loads(orjson.dumps({"model": "auto", "messages": MESSAGES, "prompt": "x", "input": "x"} | changes))
    error = _error_of(decode, parsed)
    if error is None:
        # The words of an amount of dollars say more than its schema.
        assert _SCHEMAS[decode].is_valid(parsed) or "max_cost_usd" in str(changes)
    else:
        assert error.param is not None
        assert error.param.partition(".")[0].partition("[")[0] in _all_fields
        # A member that does not exist is named by itself, below the object that lacks it.
        named = (error.param, error.param.rpartition(".")[2], "You must give")
        assert any(name in str(error) for name in named)
        assert "another value" not in str(error)


def _error_of(decode: Any, body: dict[str, Any]) -> InvalidRequest | None:
    try:
        decode(body, {})
    except InvalidRequest as error:
        return error
    return None
