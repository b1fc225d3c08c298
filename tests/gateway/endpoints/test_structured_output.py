"""Structured output and tool calls of the built-in models over real HTTP: valid, streamed, and refused by name."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
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
MODELS = ("simple", pytest.param("expert", marks=pytest.mark.slow))
SAVE: dict[str, Any] = {"name": "save", "description": "Save a person.", "parameters": PERSON, "strict": True}


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


UNENFORCEABLE: list[tuple[dict[str, Any], str, str, str]] = [
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
]


async def test_what_cannot_be_enforced_is_refused_by_name(gateway: Gateway) -> None:
    for body, code, param, said in UNENFORCEABLE:
        for stream in (False, True):
            response = await gateway.chat("hi", model="simple", stream=stream, **body)
            error = assert_error(response, 400, code, param)
            assert said in error["message"]
    gateway.assert_idle()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_loop_of_calls_runs_on_chat(gateway: Gateway, model: str, stream: bool) -> None:
    """Each step must call; what was called and what came of it is the next step's history."""
    messages: list[Any] = [{"role": "user", "content": "Save who is 34 and a fish."}]
    asked: dict[str, Any] = {"tools": [{"type": "function", "function": SAVE}], "max_completion_tokens": 400}
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        for seed in range(2):
            asked |= {"messages": messages, "model": model, "tool_choice": "required", "seed": seed}
            if stream:
                async with client.chat.completions.stream(**asked) as events_of:
                    choice = (await events_of.get_final_completion()).choices[0]
            else:
                choice = (await client.chat.completions.create(**asked)).choices[0]
            calls: Any = choice.message.tool_calls
            assert (choice.finish_reason, bool(calls)) == ("tool_calls", True)
            for call in calls:
                assert call.function.name == "save"
                jsonschema.validate(json.loads(call.function.arguments), PERSON)
            messages.append(choice.message.model_dump(include={"role", "content", "tool_calls"}))
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "saved"} for call in calls]
        end = await client.chat.completions.create(messages=messages, model=model, max_completion_tokens=20)
        assert end.choices[0].message.tool_calls is None
    rows = (await gateway.rows())[:3]
    assert [(row.turn, row.step) for row in rows] in ([(1, 2), (1, 1), (1, 0)], [(1, 0), (1, 1), (1, 2)])
    gateway.assert_idle()


async def test_messages_and_responses_are_given_valid_calls(gateway: Gateway) -> None:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        tool: Any = {"name": "save", "input_schema": PERSON, "strict": True}
        hi: Any = [{"role": "user", "content": "Save them."}]
        choice: Any = {"type": "tool", "name": "save"}
        said = await client.messages.create(
            model="simple", max_tokens=400, messages=hi, tools=[tool], tool_choice=choice
        )
        assert said.stop_reason == "tool_use"
        used = [block for block in said.content if block.type == "tool_use"]
        assert used
        for block in used:
            jsonschema.validate(block.input, PERSON)
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as sdk:
        function: Any = {"type": "function", **SAVE}
        answer = await sdk.responses.create(
            model="simple", input="Save them.", tools=[function], tool_choice="required", max_output_tokens=400
        )
        called = [item for item in answer.output if item.type == "function_call"]
        assert called
        for item in called:
            jsonschema.validate(json.loads(item.arguments), PERSON)


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
