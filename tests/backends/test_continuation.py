"""Answers that somebody else began: what is sent stays, and what is new follows on its last character."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from backends.config import LocalModelConfig
from backends.continuation import Seam
from backends.errors import BackendFailure, UnsupportedByBackend
from backends.local import LocalBackend
from backends.protocol import (
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Message,
    OutputFormat,
    SamplingParams,
    TokenDelta,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    join_calls,
)
from backends.remote.openai_backend import OpenAIBackend
from backends.testing import Script
from tests.backends.provider.server import ProviderServer
from tests.backends.remote_kit import EVERYTHING, chat, collect, make, text_of

ABLE = (*EVERYTHING, "continue", "tools", "structured_output")
MAX_TOKENS = 48
WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
CALLS = ToolChoice("required", names=("get_weather",), parallel=False)
ARGUMENTS = '{"city": "Oslo", "days": 3}'


@given(pieces=st.lists(st.text("ab \n", max_size=4), max_size=6), held=st.text("ab \n", max_size=6))
def test_a_seam_leaves_out_what_comes_again_and_nothing_else(pieces: list[str], held: str) -> None:
    seam, text = Seam(held), "".join(pieces)
    joined = "".join(map(seam.take, pieces))
    assert text.endswith(joined)
    assert held.startswith(text[: len(text) - len(joined)])
    assert not joined or not held.startswith(text[: len(text) - len(joined) + 1])


# A remote server


def saying(whole: str) -> Any:
    return ProviderServer(Script(text=whole))


async def go_on(backend: OpenAIBackend, request: GenerateRequest, sent: str) -> tuple[str, Finished]:
    try:
        deltas, ending = await collect(backend, replace(request, continued=Message("assistant", sent)))
    finally:
        await backend.close()
    return text_of(deltas), ending


async def test_a_server_gets_what_was_sent_as_the_last_message() -> None:
    with saying("one two three four") as server:
        text, ending = await go_on(make(server, "ok", capabilities=ABLE), chat(max_tokens=9), "one two ")
        body = server.requests[-1].body
    # Templates cut blanks off, so the server does not see the last one and writes it again: it is not sent twice.
    assert (text, ending.reason) == ("three four", FinishReason.STOP)
    assert body["messages"][-1] == {"role": "assistant", "content": "one two"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert ending.usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("sent", "stop", "text"),
    [
        ("one two", "o th", ""),
        ("one t", "two", ""),
        ("one two", " four", " three"),
        ("one two", "xyz", " three four"),
    ],
)
async def test_a_stop_string_may_have_begun_in_what_was_sent(sent: str, stop: str, text: str) -> None:
    with saying("one two three four") as server:
        backend = make(server, "ignores_stop", capabilities=ABLE)
        assert (await go_on(backend, chat(stop=(stop,)), sent))[0] == text


async def test_half_a_stop_string_is_not_shown_by_an_answer_that_broke() -> None:
    with saying("one two three four") as server:
        backend = make(server, "reset_after_3_tokens", capabilities=ABLE)
        deltas, ending = await collect(backend, chat(stop=("three four five",)))
        assert (text_of(deltas), ending.reason) == ("one two ", FinishReason.ERROR)
        assert (await go_on(make(server, "ok", capabilities=ABLE), chat(), "one two "))[0] == "three four"
        await backend.close()


async def test_a_plain_prompt_needs_no_template() -> None:
    with saying("unused") as server:
        backend = make(server, "ok", capabilities=ABLE)
        request = GenerateRequest("plain", prompt="Say: ", continued=Message("assistant", "so "))
        await collect(backend, request)
        await backend.close()
        assert server.requests[-1].body["prompt"] == "Say: so "
        assert "continue_final_message" not in server.requests[-1].body


@pytest.mark.parametrize(
    ("changes", "calls"),
    [
        ({"output_format": OutputFormat("json_object")}, ()),
        ({"tools": (WEATHER,), "tool_choice": CALLS}, ()),
        ({"tools": (WEATHER,)}, (ToolCall("c", "get_weather", "{"),)),
    ],
    ids=["format", "required", "begun call"],
)
async def test_a_server_is_not_asked_to_finish_what_has_a_grammar(
    changes: dict[str, Any], calls: tuple[ToolCall, ...]
) -> None:
    with saying("so be it") as server:
        backend = make(server, "ok", capabilities=ABLE)
        with pytest.raises(UnsupportedByBackend):
            await collect(backend, replace(chat(), continued=Message("assistant", "so", tool_calls=calls), **changes))
        await backend.close()
        assert not server.requests


async def test_a_server_that_was_not_said_to_be_able_is_not_asked() -> None:
    with saying("so be it") as server:
        backend = make(server, "ok")
        with pytest.raises(UnsupportedByBackend):
            await collect(backend, replace(chat(), continued=Message("assistant", "so")))
        await backend.close()
        assert not server.requests


# A model in this process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local() -> AsyncIterator[LocalBackend]:
    backend = LocalBackend("tier-1", LocalModelConfig(path="builtin:tier1", device="cpu", cpu_compute="exact"))
    await backend.start()
    yield backend
    await backend.close()


def ask(max_tokens: int = MAX_TOKENS, stop: tuple[str, ...] = (), **changes: Any) -> GenerateRequest:
    question = (Message("user", "Tell me about yourself."),)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=stop)
    return GenerateRequest("local", messages=question, sampling=sampling, **changes)


async def answer(backend: LocalBackend, request: GenerateRequest) -> tuple[list[TokenDelta], Finished]:
    events: list[Event] = [event async for event in backend.generate(request)]
    assert isinstance(events[-1], Finished)
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    assert sum(delta.num_tokens for delta in deltas) == events[-1].usage.completion_tokens
    return deltas, events[-1]


def text(deltas: list[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_goes_on_as_it_would_have_itself(local: LocalBackend) -> None:
    deltas, whole = await answer(local, ask())
    said = text(deltas)
    assert said
    sent, num_sent = "", 0
    for delta in deltas[:-1]:
        sent, num_sent = sent + delta.text, num_sent + delta.num_tokens
        more, ending = await answer(local, ask(MAX_TOKENS - num_sent, continued=Message("assistant", sent)))
        assert sent + text(more) == said
        assert ending.reason is whole.reason


@pytest.mark.asyncio(loop_scope="module")
async def test_a_models_stop_string_may_have_begun_in_what_was_sent(local: LocalBackend) -> None:
    said = text((await answer(local, ask()))[0])
    for cut in range(1, len(said) - 1):
        stop = said[cut - 1 : cut + 1]
        if said.find(stop) < cut - 1:
            continue
        more, ending = await answer(local, ask(stop=(stop,), continued=Message("assistant", said[:cut])))
        assert (text(more), ending.reason) == ("", FinishReason.STOP), (said[:cut], stop)
        return
    pytest.fail("the answer has no pair of characters that is new")


@pytest.mark.asyncio(loop_scope="module")
async def test_text_of_a_format_is_finished_by_its_grammar(local: LocalBackend) -> None:
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer"}, "colours": {"type": "array", "items": {"enum": ["red", "blue"]}}},
        "required": ["sum", "colours"],
        "additionalProperties": False,
    }
    wanted = OutputFormat("json_schema", schema)
    whole = '{"sum": 42, "colours": ["red", "blue"]}'
    for cut in range(1, len(whole) + 1):
        more, ending = await answer(local, ask(output_format=wanted, continued=Message("assistant", whole[:cut])))
        if ending.reason is FinishReason.STOP:
            value = json.loads(whole[:cut] + text(more))
            assert set(value) == {"sum", "colours"}
        else:
            # A small model may count or repeat without end; what it wrote is a beginning all the same.
            assert ending.reason is FinishReason.LENGTH
            await answer(local, ask(output_format=wanted, continued=Message("assistant", whole[:cut] + text(more))))
    with pytest.raises(BackendFailure):
        await answer(local, ask(output_format=wanted, continued=Message("assistant", '{"product"')))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_call_half_sent_is_finished_by_its_grammar(local: LocalBackend) -> None:
    base = ask(400, tools=(WEATHER,), tool_choice=CALLS)
    for cut in range(len(ARGUMENTS) + 1):
        begun = Message("assistant", "", tool_calls=(ToolCall("call_1", "get_weather", ARGUMENTS[:cut]),))
        deltas, ending = await answer(local, replace(base, continued=begun))
        pieces = [piece for delta in deltas for piece in delta.tool_calls]
        assert text(deltas) == ""
        assert all(piece.index == 0 and not piece.name for piece in pieces)
        (call,) = join_calls([ToolCallDelta(0, "call_1", "get_weather", ARGUMENTS[:cut]), *pieces])
        assert call.arguments.startswith(ARGUMENTS[:cut])
        assert ending.reason is FinishReason.TOOL_CALLS
        value = json.loads(call.arguments)
        assert value["city"] in ("Paris", "Oslo")
        assert 1 <= value["days"] <= 9


@pytest.mark.asyncio(loop_scope="module")
async def test_a_call_that_its_grammar_does_not_permit_is_not_finished(local: LocalBackend) -> None:
    begun = Message("assistant", "", tool_calls=(ToolCall("call_1", "get_weather", '{"town": "'),))
    with pytest.raises(BackendFailure):
        await answer(local, ask(tools=(WEATHER,), tool_choice=CALLS, continued=begun))
