"""Requests of agent clients are read as their fixtures state, in every field."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest

from backends.protocol import PLAIN_TEXT, Image
from gateway.api.chat_codec import ChatDecoder
from gateway.api.conversation import SESSION_HEADERS, Conversation, read_conversation, turns_of
from gateway.api.generation_body import BodyLimits
from gateway.api.messages_decoder import CountBody, MessagesDecoder
from gateway.api.request import InferenceRequest, TextPart, ToolResultPart
from gateway.api.responses_decoder import ResponsesDecoder, ResponsesRequest
from gateway.api.responses_tools import ClientTool
from gateway.config.sections import ServerConfig
from gateway.errors import GatewayError
from tests.shared_data import shared_data

COUNTS = "/v1/messages/count_tokens"
LIMITS = BodyLimits(ServerConfig(), {"small": 1, "large": 2})
DECODERS: Mapping[str, Callable[[Any, Any], InferenceRequest]] = {
    "/v1/chat/completions": ChatDecoder(LIMITS),
    "/v1/messages": MessagesDecoder(LIMITS),
    COUNTS: MessagesDecoder(LIMITS, CountBody),
    "/v1/responses": ResponsesDecoder(LIMITS),
}
FOLDERS = ("chat", "messages", "responses")


@cache
def fixtures() -> dict[str, Any]:
    folder = shared_data("agent_requests")
    files = [file for name in FOLDERS for file in sorted((folder / name).glob("*.json"))]
    return {file.stem: json.loads(file.read_text()) for file in files}


def read(fixture: Any, tenant: str = "acme") -> tuple[InferenceRequest, Conversation]:
    asked = fixture["request"]
    request = DECODERS[asked["path"].partition("?")[0]](asked["body"], {})
    headers = {name: value for name, value in asked["headers"].items() if name in SESSION_HEADERS}
    return request, read_conversation(request, headers, tenant)


def images_in(parts: Any) -> int:
    return sum(
        1 if isinstance(part, Image) else images_in(part.parts) if isinstance(part, ToolResultPart) else 0
        for part in parts
    )


def format_name(form: Any) -> str:
    """A schema has a name inside, whether its protocol names it or not."""
    return (form["name"] or "response") if "name" in form else ""


def stated(fixture: Any) -> dict[str, Any]:
    """What a fixture states, in the words of the internal form."""
    expected = fixture["expected"]
    choice, form = expected["tool_choice"], expected["output_format"]
    return {
        "source": expected["key"]["source"],
        "name": expected["key"]["value"],
        "user_turns": expected["user_turns"],
        "steps_in_turn": expected["steps_in_turn"],
        "in_tool_loop": expected["in_tool_loop"],
        "tail_results": tuple(expected["tail_results"]),
        "failed_results": tuple(expected.get("failed_results", ())),
        "tool_calls": expected["tool_calls"],
        "side_request": expected.get("side_request", False),
        "tool_names": [each for each in expected["tool_names"] if each not in expected.get("deferred_tools", ())],
        "tool_choice": {"name": choice["name"]} if isinstance(choice, dict) else choice or "auto",
        "parallel_tool_calls": expected["parallel_tool_calls"] is not False,
        "output_format": None if form is None else (form["type"], format_name(form), form.get("strict", False)),
        "system_parts": expected["system_parts"],
        "stream": expected["stream"],
        "images": expected["images"],
        "max_output_tokens": expected.get("max_output_tokens"),
    }


def client_name(request: InferenceRequest, name: str) -> str:
    """What a fixture calls a tool: by its client's name, and in a namespace."""
    tool = request.clients[name] if isinstance(request, ResponsesRequest) else ClientTool(name)
    return tool.name if tool.namespace is None else f"{tool.namespace}/{tool.name}"


def found(request: InferenceRequest, conversation: Conversation, *, is_counted: bool) -> dict[str, Any]:
    """The same of what was read."""
    key, shape, turns = conversation.key, conversation.shape, turns_of(request.prompts[0])
    choice, form = request.tool_choice, request.output_format
    assert key is not None
    return {
        "source": key.source,
        "name": key.name,
        "user_turns": shape.user_turns,
        "steps_in_turn": shape.steps_in_turn,
        "in_tool_loop": shape.in_tool_loop,
        "tail_results": shape.tail_results,
        "failed_results": shape.failed_results,
        "tool_calls": shape.num_calls,
        # A count is a step of no conversation, whatever it looks like: its endpoint asks for none.
        "side_request": conversation.is_side_request or is_counted,
        "tool_names": [client_name(request, tool.name) for tool in request.tools],
        "tool_choice": {"name": choice.names[0]} if choice.names else choice.mode,
        "parallel_tool_calls": choice.parallel,
        "output_format": None if form is PLAIN_TEXT else (form.kind, form.name, form.strict),
        "system_parts": [
            part.text for turn in turns if turn.role == "system" for part in turn.parts if isinstance(part, TextPart)
        ],
        "stream": request.stream,
        "images": images_in(part for turn in turns for part in turn.parts),
        "max_output_tokens": request.sampling.max_tokens,
    }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        try:
            names = sorted(fixtures())
        except pytest.skip.Exception:
            names = []
        metafunc.parametrize("name", names)


def test_a_request_is_read_as_stated(name: str) -> None:
    fixture = fixtures()[name]
    expected = fixture["expected"]
    if expected["accept"]:
        is_counted = fixture["request"]["path"].startswith(COUNTS)
        assert found(*read(fixture), is_counted=is_counted) == stated(fixture)
        return
    with pytest.raises(GatewayError) as refusal:
        read(fixture)
    for word in expected["error"]["mentions"]:
        assert word in str(refusal.value)


def test_requests_belong_together_exactly_as_labelled() -> None:
    accepted = {name: each for name, each in fixtures().items() if each["expected"]["accept"]}
    digests = defaultdict(set)
    for each in accepted.values():
        digests[each["expected"]["conversation"]].add(read(each)[1].digest)
    assert all(len(found) == 1 for found in digests.values()), digests
    assert len({next(iter(found)) for found in digests.values()}) == len(digests)


def test_no_conversation_reaches_over_two_tenants() -> None:
    accepted = [each for each in fixtures().values() if each["expected"]["accept"]]
    ours, theirs = ({read(each, tenant)[1].digest for each in accepted} for tenant in ("acme", "other"))
    assert not ours & theirs
