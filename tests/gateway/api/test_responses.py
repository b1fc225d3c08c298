"""Answers of ``/v1/responses``: whatever comes from a model, the events are legal and join to the final object."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from backends.protocol import Finished, FinishReason, TokenDelta, ToolCallDelta, Usage
from gateway.api.answer_encoder import AnswerChoice, AnswerEnd, ResponseHead
from gateway.api.generation_body import BodyLimits
from gateway.api.responses_decoder import ResponsesDecoder
from gateway.api.responses_encoder import ResponsesEncoder
from gateway.config.sections import ServerConfig
from gateway.errors import InvalidRequest, UnsupportedOption

DECODE = ResponsesDecoder(BodyLimits(ServerConfig(), {"small": 1, "large": 2}))
TOOLS = [
    {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "mail", "description": "", "tools": [{"type": "function", "name": "send"}]},
    {"type": "web_search"},
]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ENDINGS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS, FinishReason.CONTENT_FILTER)

_words = st.text('ab "\\é{', max_size=3)
_pieces = st.lists(
    st.one_of(
        st.builds(lambda text: TokenDelta(text=text), _words),
        st.builds(lambda text: TokenDelta(reasoning=text), _words),
        st.tuples(st.integers(0, 2), _words),
    ),
    max_size=12,
)


def deltas_of(pieces: list[Any]) -> list[TokenDelta]:
    """Pieces of calls get their names where they come first; calls may be written at once."""
    begun: set[int] = set()
    found = []
    for piece in pieces:
        if isinstance(piece, tuple):
            index, arguments = piece
            name = "" if index in begun else ("look", "patch", "mail__send")[index]
            begun.add(index)
            piece = TokenDelta(tool_calls=(ToolCallDelta(index, f"call_{index}" if name else "", name, arguments),))
        found.append(piece)
    return found


def play(deltas: list[TokenDelta], reason: FinishReason, summary: str | None) -> tuple[list[Any], dict[str, Any]]:
    body = {"model": "auto", "input": "hi", "tools": TOOLS, "stream": True, "reasoning": {"summary": summary}}
    request, choice = DECODE(body, {}), AnswerChoice(0, finished=Finished(reason))
    encoder = ResponsesEncoder(ResponseHead("id", 1, "m", "fp"), request)
    frames = b"".join([encoder.add(choice, delta) for delta in deltas])
    frames += encoder.end(AnswerEnd([choice], Usage(3, 2), {}))
    events = [json.loads(line[6:]) for line in frames.decode().split("\n") if line.startswith("data: ")]
    return events, events[-1]["response"]


@given(_pieces, st.sampled_from(ENDINGS), st.sampled_from([None, "auto"]))
def test_events_are_legal_and_join_to_the_final_response(pieces: Any, reason: FinishReason, summary: Any) -> None:
    events, final = play(deltas_of(pieces), reason, summary)
    for event in events:
        EVENT.validate_python(event, strict=False)
    Response.model_validate(final)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{final['status']}"
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = {event["output_index"]: event["item"] for event in events if event["type"] == "response.output_item.done"}
    assert [event["output_index"] for event in added] == list(range(len(final["output"])))
    assert [done[place] for place in range(len(added))] == final["output"]
    begun, ended, joined = set(), set(), dict.fromkeys(done, "")
    for event in events[2:-1]:
        place = event["output_index"]
        if event["type"] == "response.output_item.added":
            begun.add(place)
        assert place in begun
        assert place not in ended
        if event["type"].endswith(".delta"):
            assert event["item_id"] == final["output"][place]["id"]
            joined[place] += event["delta"]
        if event["type"] == "response.output_item.done":
            ended.add(place)
    for place, item in enumerate(final["output"]):
        parts = item.get("content") or item.get("summary") or ()
        text = item.get("arguments", item.get("input")) if "call" in item["type"] else "".join(p["text"] for p in parts)
        assert joined[place] == text


def test_a_namespace_and_free_text_come_back() -> None:
    pieces = [
        ToolCallDelta(0, "c0", "patch", '{"input": "*** Be'),
        ToolCallDelta(0, arguments='gin\\n"}'),
        ToolCallDelta(1, "c1", "mail__send", "{}"),
    ]
    _, final = play([TokenDelta(tool_calls=(piece,)) for piece in pieces], FinishReason.TOOL_CALLS, None)
    custom, function = final["output"]
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", "*** Begin\n")
    assert (function["name"], function["namespace"], function["call_id"]) == ("send", "mail", "c1")
    assert function["id"] != function["call_id"]
    assert [tool["type"] for tool in final["tools"]] == ["function", "custom", "namespace"]


def test_a_broken_stream_fails_for_every_client() -> None:
    encoder = ResponsesEncoder(ResponseHead("id", 1, "m", "fp"), DECODE({"model": "auto", "input": "hi"}, {}))
    told = {"message": "gone", "type": "server_error", "param": None, "code": "answer_failed"}
    frames = encoder.error_event(told).decode()
    events = [json.loads(line[6:]) for line in frames.split("\n") if line.startswith("data: ")]
    assert [event["type"] for event in events][-2:] == ["error", "response.failed"]
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "gone"}
    Response.model_validate(events[-1]["response"])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ],
)
def test_what_cannot_be_done_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedOption) as raised:
        DECODE({"model": "auto", "input": "hi"} | change, {})
    assert raised.value.param == param


CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}


@pytest.mark.parametrize(
    ("items", "word"),
    [([CALL], "'c'"), ([CALL, CALL], "second call"), ([{"type": "custom_tool_call_output", "call_id": "x"}], "'x'")],
)
def test_calls_and_results_must_pair(items: list[Any], word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        DECODE({"model": "auto", "input": items}, {})


@pytest.mark.parametrize("deltas", [[], [TokenDelta(text="a")]])
def test_a_withheld_end_leaves_no_gap(deltas: list[TokenDelta]) -> None:
    """An end is encoded before its commit, and is not sent where that fails."""
    choice = AnswerChoice(0, finished=Finished(FinishReason.STOP))
    encoder = ResponsesEncoder(ResponseHead("id", 1, "m", "fp"), DECODE({"model": "auto", "input": "hi"}, {}))
    sent = b"".join([encoder.add(choice, delta) for delta in deltas])
    encoder.end(AnswerEnd([choice], Usage(3, 2), {}))
    sent += encoder.error_event({"code": "log_unavailable", "message": "m", "param": None})
    events = [json.loads(line[6:]) for line in sent.decode().split("\n") if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.failed")
    assert not events[-1]["response"]["store"]
