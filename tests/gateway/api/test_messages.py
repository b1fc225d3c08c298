"""Answers of ``/v1/messages``: whatever comes from a model, the events are legal and join to the whole message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from backends.protocol import Finished, FinishReason, Thought, TokenDelta, ToolCallDelta, Usage
from gateway.api.answer_encoder import AnswerChoice, AnswerEnd, ResponseHead
from gateway.api.generation_body import BodyLimits
from gateway.api.messages_decoder import MessagesDecoder
from gateway.api.messages_encoder import MessagesEncoder
from gateway.api.request import messages_of
from gateway.config.sections import ServerConfig
from gateway.errors import GatewayError

DECODE = MessagesDecoder(BodyLimits(ServerConfig(), {"small": 1, "large": 2}))
BODY = {"model": "auto", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CONTENT_FILTER: "refusal",
}
_words = st.text('ab "\\é{}', max_size=3)
_thoughts = st.builds(Thought, st.just(""), st.sampled_from(["s", "t"]), st.booleans())
_pieces = st.lists(
    st.one_of(
        st.builds(lambda text: TokenDelta(text=text), _words),
        st.builds(lambda text: TokenDelta(reasoning=text), _words),
        st.builds(lambda text, thought: TokenDelta(reasoning=text, signed=(thought,)), _words, _thoughts),
        st.tuples(st.integers(0, 2), st.integers(1, 6)),
    ),
    max_size=14,
)
ARGUMENTS = ('{"a": "}"}', "{}", '{"b": {"c": [1]}}')


def deltas_of(pieces: list[Any]) -> list[TokenDelta]:
    """Calls are cut anywhere and written at once; what is left of them comes last."""
    sent: dict[int, int] = {}
    found = []

    def call(index: int, size: int) -> TokenDelta:
        begin = sent.get(index, 0)
        name = "" if index in sent else f"tool{index}"
        sent[index] = begin + size
        return TokenDelta(
            tool_calls=(
                ToolCallDelta(index, f"c{index}" if name else "", name, ARGUMENTS[index][begin : begin + size]),
            )
        )

    for piece in pieces:
        found.append(call(*piece) if isinstance(piece, tuple) else piece)
    return found + [call(index, 99) for index in list(sent)]


def frames_of(data: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: ")]


@given(_pieces, st.sampled_from(list(REASONS)), st.booleans())
def test_events_are_legal_and_join_to_the_answer(pieces: Any, reason: FinishReason, shows: bool) -> None:
    deltas = deltas_of(pieces)
    request = DECODE(BODY | ({"thinking": {"type": "adaptive"}} if shows else {}), {})
    encoder, choice = MessagesEncoder(ResponseHead("id", 1, "m", "fp", 7), request), AnswerChoice(0)
    choice.finished = Finished(reason)
    data = b"".join([encoder.add(choice, delta) for delta in deltas])
    events = frames_of(data + encoder.end(AnswerEnd([choice], Usage(7, 2, cached_tokens=3), {})))
    for event in events:
        EVENT.validate_python(event)
    assert [events[0]["type"], *[each["type"] for each in events[-2:]]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["delta"]["stop_reason"] == REASONS[reason]
    assert (events[-2]["usage"]["input_tokens"], events[-2]["usage"]["cache_read_input_tokens"]) == (4, 3)
    blocks: list[Any] = []
    texts: list[str] = []
    is_open = False
    for event in events[1:-2]:
        kind = event["type"].removeprefix("content_block_")
        assert is_open == (kind != "start")
        if kind == "start":
            blocks.append(event["content_block"])
            texts.append("")
        assert event["index"] == len(blocks) - 1
        if kind == "delta":
            told = dict(event["delta"])
            if told.pop("type") == "signature_delta":
                assert (blocks[-1]["type"], blocks[-1]["signature"]) == ("thinking", "")
                blocks[-1]["signature"] = told["signature"]
            else:
                assert not blocks[-1].get("signature"), "a signature ends its block"
                texts[-1] += next(iter(told.values()))
        is_open = kind != "stop"
    assert not is_open
    joined = {
        kind: "".join(t for b, t in zip(blocks, texts, strict=True) if b["type"] == kind)
        for kind in ("text", "thinking")
    }
    assert joined["text"] == "".join(delta.text for delta in deltas)
    assert joined["thinking"] == ("".join(delta.reasoning for delta in deltas) if shows else "")
    calls = {b["id"]: t for b, t in zip(blocks, texts, strict=True) if b["type"] == "tool_use"}
    wanted = {piece.index for delta in deltas for piece in delta.tool_calls}
    assert calls == {f"c{index}": ARGUMENTS[index] for index in wanted}


def test_a_whole_message_has_its_blocks() -> None:
    request = DECODE(BODY | {"thinking": {"type": "enabled", "budget_tokens": 2000}}, {})
    calls = [ToolCallDelta(0, "c0", "look", '{"a": 1}'), ToolCallDelta(1, "c1", "look", '{"a": ')]
    choice = AnswerChoice(0, ["I look."], ["hm"], calls, finished=Finished(FinishReason.TOOL_CALLS))
    encoder = MessagesEncoder(ResponseHead("id", 1, "m", "fp"), request)
    message = json.loads(encoder.whole(AnswerEnd([choice], Usage(3, 2), {})))
    Message.model_validate(message)
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["input"] for block in message["content"][2:]] == [{"a": 1}, {"invalid_json": '{"a": '}]


def test_signed_thinking_is_the_same_streamed_and_whole() -> None:
    request = DECODE(BODY | {"thinking": {"type": "adaptive"}}, {})
    head, choice = ResponseHead("id", 1, "m", "fp"), AnswerChoice(0)
    deltas = [
        TokenDelta(reasoning="a"),
        TokenDelta(reasoning="b", signed=(Thought("", "s1"),)),
        TokenDelta(signed=(Thought("", "x", is_redacted=True),)),
        TokenDelta(reasoning="c"),
        TokenDelta(signed=(Thought("", "s2"),)),
        TokenDelta(reasoning="d"),
        TokenDelta("yes"),
    ]
    encoder = MessagesEncoder(head, request)
    data = b""
    for delta in deltas:
        if delta.reasoning:
            choice.reasonings.append(delta.reasoning)
        if delta.text:
            choice.texts.append(delta.text)
        choice.sign(delta.signed)
        data += encoder.add(choice, delta)
    choice.finished = Finished(FinishReason.STOP)
    end = AnswerEnd([choice], Usage(), {})
    wanted = [
        {"type": "thinking", "thinking": "ab", "signature": "s1"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "c", "signature": "s2"},
        {"type": "thinking", "thinking": "d", "signature": ""},
        {"type": "text", "text": "yes"},
    ]
    assert json.loads(MessagesEncoder(head, request).whole(end))["content"] == wanted
    streamed: list[Any] = []
    for event in frames_of(data + encoder.end(end)):
        if event["type"] == "content_block_start":
            streamed.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            for name, value in event["delta"].items():
                if name != "type":
                    streamed[-1][name] += value
    assert streamed == wanted


def test_thinking_goes_back_without_what_is_hidden() -> None:
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "yes"},
    ]
    request = DECODE(BODY | {"messages": [*BODY["messages"], {"role": "assistant", "content": content}]}, {})  # type: ignore[misc]
    prompt: Any = request.prompts[0]
    assert [part.signature for part in prompt[1].parts[:2]] == ["s", "x"]
    message = messages_of(prompt)[1]
    assert message.reasoning == "hm"
    assert message.thoughts == (Thought("hm", "s"), Thought("", "x", is_redacted=True))


FILE = {"type": "document", "source": {"type": "url", "url": "https://x/a.pdf"}}
USE = {"type": "tool_use", "id": "t", "name": "look", "input": {}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [FILE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [USE | {"input": "x"}]}]}, "messages[0].content[0].input"),
        ({"messages": [{"role": "assistant", "content": [USE]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]}, "messages[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "look"}}, "tool_choice.name"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
    ],
)
def test_what_cannot_be_done_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(GatewayError) as raised:
        DECODE(BODY | change, {})
    assert getattr(raised.value, "param", None) == param
