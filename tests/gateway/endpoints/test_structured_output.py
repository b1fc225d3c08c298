"""Structured output of the built-in models over real HTTP: valid, whole and streamed, and refused by name."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from backends.config import LocalModelConfig, SpeculationConfig
from backends.local import LocalBackend
from backends.weights import WeightPool
from tests.gateway.harness import Gateway, assert_error, events, make_settings, running

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "sign": {"enum": ["lion", "fish"]},
    },
    "required": ["name", "age", "sign"],
    "additionalProperties": False,
}
MODELS = ("simple", "expert")


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    """The smallest built-in model, and the one that thinks, with drafts of the smallest."""
    weights = WeightPool()
    thinker = LocalModelConfig(
        path="builtin:tier3",
        device="cpu",
        thinking=True,
        drafter="builtin:tier1",
        speculation=SpeculationConfig(mode="draft"),
    )
    models = {
        "small": LocalBackend("small", LocalModelConfig(path="builtin:tier1", device="cpu"), weights=weights),
        "large": LocalBackend("large", thinker, weights=weights),
    }
    async with running(make_settings(tmp_path), models) as server:
        yield server


def schema(given: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given, "strict": True}}


@pytest.mark.parametrize("model", MODELS)
async def test_answers_satisfy_their_schema_whole_and_streamed(gateway: Gateway, model: str) -> None:
    asked = {"model": model, "response_format": schema(PERSON), "max_tokens": 400, "temperature": 0}
    whole = await gateway.chat("Who is 34 and a fish?", **asked)
    assert whole.status_code == 200, whole.text
    choice = whole.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
    streamed = await gateway.chat("Who is 34 and a fish?", stream=True, **asked)
    chunks = [json.loads(each) for each in events(streamed.text) if each != "[DONE]"]
    text = "".join(each["delta"].get("content") or "" for chunk in chunks for each in chunk["choices"])
    assert text == choice["message"]["content"]
    gateway.assert_idle()


@pytest.mark.parametrize("model", MODELS)
async def test_every_other_format_is_kept_too(gateway: Gateway, model: str) -> None:
    lark = 'start: "(" NUMBER ("," NUMBER)* ")"\nNUMBER: /[0-9]{1,4}/'
    for asked, pattern in (
        ({"regex": "[A-F]{4}-[0-9]{3}"}, "[A-F]{4}-[0-9]{3}"),
        ({"choice": ["yes", "no", "it depends"]}, "yes|no|it depends"),
        ({"grammar": lark}, r"\([0-9]{1,4}(,[0-9]{1,4})*\)"),
        ({"json": {"type": "boolean"}}, "true|false"),
    ):
        answer = await gateway.chat("2 + 2?", model=model, structured_outputs=asked, max_tokens=400, seed=3)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["message"]["content"]), asked
    for seed in range(3):
        answer = await gateway.chat(
            "Any object.", model=model, response_format={"type": "json_object"}, max_tokens=400, seed=seed
        )
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


async def test_several_answers_and_log_probabilities(gateway: Gateway) -> None:
    answer = await gateway.chat(
        "yes or no?",
        model="simple",
        structured_outputs={"choice": ["yes", "no"]},
        n=3,
        temperature=2,
        seed=1,
        logprobs=True,
        top_logprobs=5,
    )
    for choice in answer.json()["choices"]:
        assert choice["message"]["content"] in ("yes", "no")
        for token in choice["logprobs"]["content"]:
            assert token["logprob"] is not None
            assert all(each["logprob"] is not None for each in token["top_logprobs"])


@pytest.mark.parametrize(
    ("body", "code", "param", "said"),
    [
        ({"response_format": schema({"not": {"type": "string"}})}, "unsupported_parameter", "response_format", "'not'"),
        (
            {"response_format": schema({"$ref": "http://127.0.0.1/x"})},
            "unsupported_parameter",
            "response_format",
            "$ref",
        ),
        ({"response_format": schema({"type": "nope"})}, "invalid_value", "response_format", "nope"),
        (
            {"response_format": schema({"properties": {f"k{i}": {"type": "null"} for i in range(5_000)}})},
            "invalid_value",
            "response_format",
            "at most",
        ),
        ({"structured_outputs": {"regex": "("}}, "invalid_value", "structured_outputs", "unclosed"),
        ({"structured_outputs": {"grammar": "start: x"}}, "invalid_value", "structured_outputs", "x"),
    ],
)
async def test_what_cannot_be_enforced_is_refused_by_name(
    gateway: Gateway, body: dict[str, Any], code: str, param: str, said: str
) -> None:
    for stream in (False, True):
        response = await gateway.chat("hi", model="simple", stream=stream, **body)
        error = assert_error(response, 400, code, param)
        assert said in error["message"]
    gateway.assert_idle()


async def test_who_leaves_in_the_middle_leaves_nothing_behind(gateway: Gateway) -> None:
    body = {
        "model": "simple",
        "messages": [{"role": "user", "content": "Go on."}],
        "structured_outputs": {"regex": "[ab]{900}"},
        "max_tokens": 900,
        "stream": True,
    }
    async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for _ in response.aiter_lines():
            break
    async with asyncio.timeout(20):
        while gateway.parts.admission.num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    gateway.assert_idle()
    pool = gateway.backends["small"].engine.scheduler.pool
    assert not pool.num_owned
