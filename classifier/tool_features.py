"""Computes what a request says of tools as dense features: pure, bounded, and nothing at all for one without tools.

How many tools and how large, which names (hashed), how far the prompt speaks of what they do, whether a call is asked
for, how deep the loop of calls and results is and what came back last. They stand behind a request's other features,
in routers that were fitted on requests with tools; every row of the log keeps those that are not 0.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from classifier.text import clip
from classifier.types import RouterRequest

NUM_NAME_BUCKETS = 8
"""Few: with 32 a router of some hundred labels learnt names by heart (see docs/evaluation.md)."""

TOOL_FEATURES: tuple[str, ...] = (
    "num_tools",
    "num_tool_chars",
    "num_parameters",
    "num_required_parameters",
    "best_tool_overlap",
    "second_tool_overlap",
    "best_name_overlap",
    "is_call_required",
    "is_call_forbidden",
    "is_tool_named",
    "loop_depth",
    "num_calls",
    "last_result_chars",
    "is_last_result_json",
    "is_last_result_error",
    *(f"tool_name_{bucket}" for bucket in range(NUM_NAME_BUCKETS)),
)
"""Order of the tools' features in every vector; part of an artifact's schema."""

# What is read of all tools together; agents offer hundreds of kilobytes.
_MAX_CHARS = 24_000
_MAX_TOOL_CHARS = 2_000
_MAX_NODES = 2_000
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]{2,}|\d+")
_ERROR = re.compile(r"\A\W*(?:\w+\W+){0,3}?(?:\w*error|exception|traceback|failed|not found|denied)\b", re.IGNORECASE)
_MIN_WORD_CHARS = 3


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool by name, what it does, and the JSON Schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Holds what a request says of tools.

    Parameters
    ----------
    tools : those offered
    mode : ``auto``, ``none`` or ``required``
    is_named : the choice is limited to some of them
    loop_depth : the assistant's outputs since the user's turn, where it ends with results; else 0
    num_calls : calls in the whole conversation
    last_result : text of the last of these results; None without any
    is_error : it is marked as an error
    """

    tools: Sequence[OfferedTool] = ()
    mode: str = "auto"
    is_named: bool = False
    loop_depth: int = 0
    num_calls: int = 0
    last_result: str | None = None
    is_error: bool = False


def tool_features(use: ToolUse, text: str) -> tuple[float, ...]:
    """Return the features of :data:`TOOL_FEATURES`, in order; none for a request that has nothing to do with tools.

    Parameters
    ----------
    use : what it says of tools
    text : its last user turn
    """
    if not use.tools:
        return ()
    found = dict.fromkeys(TOOL_FEATURES, 0.0)
    found |= {
        "num_tools": math.log1p(len(use.tools)),
        "is_call_required": float(use.mode == "required"),
        "is_call_forbidden": float(use.mode == "none"),
        "is_tool_named": float(use.is_named),
        "loop_depth": math.log1p(use.loop_depth),
        "num_calls": math.log1p(use.num_calls),
    }
    found |= _offer(use.tools, text)
    if use.last_result is not None:
        found |= _result(use.last_result, use.is_error)
    return tuple(found.values())


def _offer(tools: Sequence[OfferedTool], text: str) -> dict[str, float]:
    asked = _words(clip(text))
    overlaps, names, chars, sizes = [0.0, 0.0], [0.0], 0, [0, 0]
    found: dict[str, float] = {}
    left = _MAX_NODES
    for tool in tools:
        bucket = f"tool_name_{zlib.crc32(tool.name.encode('utf-8', 'replace')) % NUM_NAME_BUCKETS}"
        found[bucket] = found.get(bucket, 0.0) + 1.0
        if chars > _MAX_CHARS or left <= 0:
            continue
        said = _Parameters.read(tool.parameters, left)
        left -= said.num_nodes
        sizes = [sizes[0] + said.num_properties, sizes[1] + said.num_required]
        written = " ".join((tool.name, tool.description, *said.texts))[:_MAX_TOOL_CHARS]
        chars += len(written)
        overlaps.append(_share(asked, _words(written)))
        names.append(_share(_words(tool.name), asked))
    overlaps.sort(reverse=True)
    return found | {
        "num_tool_chars": math.log1p(chars),
        "num_parameters": math.log1p(sizes[0]),
        "num_required_parameters": math.log1p(sizes[1]),
        "best_tool_overlap": overlaps[0],
        "second_tool_overlap": overlaps[1],
        "best_name_overlap": max(names),
    }


@dataclass(frozen=True, slots=True)
class _Parameters:
    """What of a schema is looked at: its properties, how many are required, and their names and descriptions."""

    num_nodes: int
    num_properties: int
    num_required: int
    texts: tuple[str, ...]

    @classmethod
    def read(cls, schema: Mapping[str, Any], max_nodes: int) -> _Parameters:
        left: list[Any] = [schema]
        num_nodes = num_properties = num_required = 0
        texts: list[str] = []
        while left and num_nodes < max_nodes:
            node = left.pop()
            num_nodes += 1
            if isinstance(node, list):
                left += node[:max_nodes]
                continue
            if not isinstance(node, Mapping):
                continue
            properties, required = node.get("properties"), node.get("required")
            if isinstance(properties, Mapping):
                num_properties += len(properties)
                texts += list(properties)[:max_nodes]
            num_required += len(required) if isinstance(required, list) else 0
            if isinstance(description := node.get("description"), str):
                texts.append(description[:_MAX_TOOL_CHARS])
            left += [each for each in node.values() if isinstance(each, (Mapping, list))]
        return cls(num_nodes, num_properties, num_required, tuple(texts))


def _result(text: str, is_error: bool) -> dict[str, float]:
    head = text.lstrip()[:200]
    return {
        "last_result_chars": math.log1p(len(text)),
        "is_last_result_json": float(head.startswith(("{", "["))),
        "is_last_result_error": float(is_error or _ERROR.search(head) is not None),
    }


def _words(text: str) -> frozenset[str]:
    """Return a text's words in lower case, those of names in camel case and with underscores apart."""
    return frozenset(word for each in _WORD.findall(text) if len(word := each.lower()) >= _MIN_WORD_CHARS)


def _share(words: frozenset[str], others: frozenset[str]) -> float:
    """Return the share of words that are among others; 0 without any."""
    return len(words & others) / len(words) if words else 0.0


def chat_tool_use(
    messages: Iterable[Mapping[str, Any]], tools: Iterable[Mapping[str, Any]], choice: Any = None
) -> ToolUse:
    """Return what a chat completion's body says of tools, given its ``messages``, ``tools`` and ``tool_choice``."""
    depth, num_calls, result, before = 0, 0, None, "user"
    for message in messages:
        role = message.get("role")
        if role == "assistant":
            depth, num_calls, result = depth + (before != role), num_calls + len(message.get("tool_calls") or ()), None
        elif role == "tool":
            result = content_text(message.get("content"))
        elif role == "user" and before == "assistant":
            depth = 0
        elif role in ("system", "developer") or before == "tool":
            # Some clients tell of the surroundings behind a result: that opens no turn.
            continue
        before = str(role)
    functions = [each.get("function", each) for each in tools]
    return ToolUse(
        tuple(
            OfferedTool(each.get("name", ""), each.get("description") or "", each.get("parameters") or {})
            for each in functions
        ),
        _mode(choice),
        isinstance(choice, Mapping),
        depth if result is not None else 0,
        num_calls,
        result,
    )


def _mode(choice: Any) -> str:
    """Return whether ``tool_choice`` leaves calls free, forbids or requires them; naming a tool requires it."""
    if isinstance(choice, Mapping):
        allowed = choice.get("allowed_tools")
        return str(allowed.get("mode")) if isinstance(allowed, Mapping) else "required"
    return "auto" if choice is None else str(choice)


def chat_request(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], choice: Any = None
) -> RouterRequest:
    """Return a chat completion's body as a router is asked about it."""
    plain = RouterRequest(tuple((each["role"], content_text(each.get("content"))) for each in messages))
    return replace(plain, tools=tool_features(chat_tool_use(messages, tools, choice), plain.text))


def content_text(content: Any) -> str:
    """Return the text of a chat message's ``content``: text, or parts of which some are text."""
    if isinstance(content, str):
        return content
    parts = [each.get("text") for each in content if isinstance(each, Mapping)] if isinstance(content, list) else ()
    return "\n".join([text for text in parts if isinstance(text, str)])
