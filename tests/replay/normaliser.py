"""Takes out of an answer what differs from run to run, and nothing else: ids, times, ports, secrets, folders.

An id becomes ``<id-1>``, ``<id-2>`` … by its first appearance in the exchange, so that a header and a body that must
agree still have to. A number becomes ``<number>`` only under a key that :data:`VOLATILE_KEYS` names.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tests.replay.wire_client import Response

_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"sk-suffice-[\w-]{43}"), "<key>"),
    (re.compile(r"sk-suffice-[\w-]{5}"), "<key-prefix>"),
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)"), "<time>"),
    (re.compile(r"\b20\d\d-\d\d-\d\d\b"), "<day>"),
    (re.compile(r"(?<=<key-prefix>… was changed meanwhile: expected x, found )[0-9a-f]{12}"), "<etag>"),
    (re.compile(r"fp_[0-9a-f]{8,}"), "<fingerprint>"),
    (re.compile(r"127\.0\.0\.1:\d+"), "127.0.0.1:<port>"),
    (re.compile(r"\b[\w.-]{1,80}:\d+/(?=<id-)"), "<process>/"),
    (re.compile(r"/\S*suffice-replay-[^/\s\"']+"), "<folder>"),
)

# Measured times, and what is computed from them.
VOLATILE_KEYS = re.compile(r"created|\w+_ms|(ttft|itl|total|queue|overhead|duration)_s|seconds(_since_\w+)?")
_VOLATILE_HEADERS = re.compile(r"date|x-suffice-overhead-ms|x-ratelimit-reset-\w+")
# Metrics that count moments rather than events.
_VOLATILE_METRICS = re.compile(r"(process|python)_\w+|[\w:]+_(bucket|sum|seconds|created)")


class Normaliser:
    """Normalises the responses of one exchange.

    ``joins_deltas`` is for answers that came over a network: how many tokens share a read, and which of several choices
    is first, is chance. Neighbouring texts of a choice become one there, and choices stand in their order.
    """

    def __init__(self, *, joins_deltas: bool = False) -> None:
        self._ids: dict[str, str] = {}
        self._joins_deltas = joins_deltas

    def response(self, response: Response) -> dict[str, Any]:
        """Return a response as it is recorded."""
        headers = [f"{name}: {self._header(name.lower(), value, response)}" for name, value in response.headers]
        found: dict[str, Any] = {"status": response.status, "reason": response.reason, "headers": headers}
        if not response.is_whole:
            found["is_whole"] = False
        return found | self._body(response)

    def text(self, text: str) -> str:
        """Return a text without what differs from run to run."""
        text = _ID.sub(lambda found: self._ids.setdefault(found[0], f"<id-{len(self._ids) + 1}>"), text)
        for pattern, word in _PATTERNS:
            text = pattern.sub(word, text)
        return text

    def value(self, value: Any, key: str = "") -> Any:
        """Return a JSON value without what differs from run to run; the order of members stays."""
        if isinstance(value, dict):
            return {self.text(name): self.value(each, name) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(each, key) for each in value]
        if isinstance(value, str):
            return "<hash>" if key == "config_hash" else self.text(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and VOLATILE_KEYS.fullmatch(key):
            return "<number>"
        return value

    def _header(self, name: str, value: str, response: Response) -> str:
        if name == "content-length":
            # Its digits depend on the ids' and times' own; that it is right is what counts.
            return "<right>" if not response.body or int(value) == len(response.body) else f"<wrong: {value}>"
        if name == "retry-after" and int(value) > 1:
            return "<seconds>"
        if name == "etag" and b'"prefix"' in response.body:
            # A key's version rests on its secret; a policy's, on what the policy says.
            return "<etag>"
        if _VOLATILE_HEADERS.fullmatch(name):
            return "<volatile>"
        return self.text(value)

    def _body(self, response: Response) -> dict[str, Any]:
        kind = response.header("content-type")
        text = response.body.decode("utf-8", "backslashreplace")
        if not text:
            return {}
        if kind.startswith("text/event-stream"):
            events = [self._event(block) for block in text.split("\n\n")]
            return {"events": _join_deltas(events) if self._joins_deltas else events}
        if kind.startswith("application/json"):
            try:
                value = json.loads(text)
            except ValueError:
                return {"text": self.text(text)}
            is_compact = json.dumps(value, ensure_ascii=False, separators=(",", ":")) == text
            return {"json": self.value(value)} | ({} if is_compact else {"is_compact": False})
        if response.reason and "suffice_" in text:
            return {"metrics": [self._metric(line) for line in text.split("\n")]}
        return {"text": self.text(text)}

    def _event(self, block: str) -> Any:
        """Return a block of an event stream: its mark, and its JSON where it has some."""
        for mark in ("data: ", ": suffice "):
            if block.startswith(mark) and "\n" not in block:
                try:
                    return {mark.strip(): self.value(json.loads(block[len(mark) :]))}
                except ValueError:
                    break
        return self.text(block)

    def _metric(self, line: str) -> str:
        name = re.split(r"[{ ]", line, maxsplit=1)[0]
        if line.startswith("#") or not line or not _VOLATILE_METRICS.fullmatch(name):
            return self.text(line)
        return self.text(line.rpartition(" ")[0]) + " <number>"


def _join_deltas(events: list[Any]) -> list[Any]:
    """Put the chunks of each choice together, and neighbouring texts of a choice into one chunk."""
    is_chunk = [isinstance(each, dict) and bool(each.get("data:", {}).get("choices")) for each in events]
    chunks = [each for each, chosen in zip(events, is_chunk, strict=True) if chosen]
    joined: list[Any] = []
    for chunk in sorted(chunks, key=_choice_index):
        if not (joined and _join(joined[-1]["data:"]["choices"][0], chunk["data:"]["choices"][0])):
            joined.append(chunk)
    return joined + [each for each, chosen in zip(events, is_chunk, strict=True) if not chosen]


def _choice_index(event: dict[str, Any]) -> int:
    index: int = event["data:"]["choices"][0]["index"]
    return index


def _join(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Append the text of ``after`` to ``before`` where both have only that; return whether it was done."""
    if before["index"] != after["index"] or after.get("logprobs") or after.get("finish_reason"):
        return False
    for holder, name in (("delta", "content"), ("delta", "reasoning_content"), ("", "text")):
        first, second = (each.get(holder, {}) if holder else each for each in (before, after))
        if name in first and name in second and "role" not in first:
            first[name] += second[name]
            return True
    return False
