"""Whose conversation a request continues, where its client does not say it plainly."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.protocol import SamplingParams, Tool, ToolCall
from gateway.api.conversation import ConversationKey, find_key, read_conversation, read_shape, session_of
from gateway.api.request import ConversationHints, InferenceRequest, TextPart, ToolResultPart, Turn


def said(role: str, *texts: str) -> Turn:
    return Turn(role, tuple(TextPart(text) for text in texts))


def called(*ids: str) -> Turn:
    return Turn("assistant", tuple(ToolCall(each, "look", "{}") for each in ids))


def answered(*ids: str, is_error: bool = False) -> Turn:
    return Turn("tool", tuple(ToolResultPart(each, (TextPart("found"),), is_error) for each in ids))


def asked(*turns: Turn, **fields: Any) -> InferenceRequest:
    return InferenceRequest(model="auto", prompts=(turns,), sampling=SamplingParams(), **fields)


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        (json.dumps({"device_id": "d", "session_id": "s-1"}), "s-1"),
        ("user_0f_account__session_s-1", "s-1"),
        ("user_0f_account_a_session_", None),
        ("u-1042", None),
        ("{broken", None),
        ("[1]", None),
        (json.dumps({"session_id": 7}), None),
        (json.dumps({"session_id": "x" * 513}), None),
        ("{" + " " * 5000 + "}", None),
    ],
)
def test_a_session_is_found_in_a_user_id(user_id: str, session: str | None) -> None:
    assert session_of(user_id) == session


def test_names_count_in_their_order() -> None:
    headers = {
        "x-claude-code-session-id": "a",
        "thread-id": "b",
        "session-id": "c",
        "conversation_id": "d",
        "x-opencode-session": "e",
    }
    request = asked(said("user", "hi"), hints=ConversationHints("f", '{"session_id": "g"}'))
    found = []
    while key := find_key(request, headers, has_turns=True):
        found.append(key.name)
        if not headers:
            break
        del headers[next(iter(headers))]
    assert found == ["a", "b", "c", "d", "e", "f"]
    only_user = asked(said("user", "hi"), hints=ConversationHints(user_id='{"session_id": "g"}'))
    assert find_key(only_user, {}, has_turns=True) == ConversationKey("body:metadata.user_id", "g")


def test_an_agent_within_a_session_has_its_own_conversation_however_the_session_is_named() -> None:
    agent = {"x-claude-code-agent-id": "a1"}
    by_header = read_conversation(asked(said("user", "hi")), {"x-claude-code-session-id": "s", **agent}, "acme")
    by_body = read_conversation(asked(said("user", "hi"), hints=ConversationHints(user_id="_session_s")), agent, "acme")
    main = read_conversation(asked(said("user", "hi")), {"x-claude-code-session-id": "s"}, "acme")
    assert by_header.digest == by_body.digest != main.digest


def test_a_prefix_is_all_that_no_later_request_changes() -> None:
    first = (said("system", "be brief"), said("user", "notes"), said("user", "fix it"))
    later = (*first, said("system", "20000 tokens left"), called("c"), answered("c"), said("user", "now the other"))
    other = (said("system", "be brief"), said("user", "notes"), said("user", "write it"))
    digests = [read_conversation(asked(*turns), {}, "acme").digest for turns in (first, later, other)]
    assert digests[0] == digests[1] != digests[2]


def test_a_name_is_no_prefix() -> None:
    named = read_conversation(asked(said("user", "x"), hints=ConversationHints("user\0hi")), {}, "acme")
    assert named.digest != read_conversation(asked(said("user", "hi")), {}, "acme").digest


def test_a_text_that_nobody_named_belongs_to_no_conversation() -> None:
    request = InferenceRequest(model="auto", prompts=("once upon",), sampling=SamplingParams())
    found = read_conversation(request, {}, "acme")
    assert (found.key, found.digest, found.shape.user_turns) == (None, None, 1)


DONE = (said("user", "a"), said("assistant", "b"))


@pytest.mark.parametrize(
    ("turns", "user_turns", "steps", "tail"),
    [
        ((), 0, 0, ()),
        ((said("user", "a"), said("assistant", "b")), 1, 1, ()),
        ((said("user", "# AGENTS.md instructions for /x"), called("c"), answered("c")), 0, 1, ("c",)),
        ((said("user", "a"), called("c"), called("d"), answered("d", "c")), 1, 1, ("d", "c")),
        ((said("user", "a"), called("c"), answered("c"), said("user", "env"), said("user", "more")), 1, 1, ("c",)),
        ((*DONE, said("user", "<environment_context>"), said("user", "c")), 2, 0, ()),
    ],
)
def test_turns_and_steps_are_counted_by_shape(
    turns: tuple[Turn, ...], user_turns: int, steps: int, tail: tuple[str, ...]
) -> None:
    shape = read_shape(turns)
    assert (shape.user_turns, shape.steps_in_turn, shape.tail_results) == (user_turns, steps, tail)


def test_an_output_is_named_by_its_first_call_and_failed_results_are_told() -> None:
    turns = (
        said("user", "a"),
        called("b"),
        answered("b"),
        called("c", "d"),
        answered("d"),
        answered("c", is_error=True),
    )
    shape = read_shape(turns)
    assert (shape.last_call, shape.tail_results, shape.failed_results) == ("c", ("d", "c"), ("c",))


def test_without_tools_and_history_a_session_s_request_is_none_of_its_agent_s() -> None:
    session = {"session-id": "s"}
    title = read_conversation(asked(said("user", "name this")), session, "acme")
    step = read_conversation(asked(said("user", "name this"), tools=(Tool("look"),)), session, "acme")
    unnamed = read_conversation(asked(said("user", "name this")), {}, "acme")
    assert (title.is_side_request, step.is_side_request, unnamed.is_side_request) == (True, False, False)
