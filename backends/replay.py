"""Serves answers that were recorded earlier: the same question gets the same answer, at its recorded cost.

For evaluation without a model at hand: a router or a policy is replayed against what each tier really said. One JSON
object a line, with the question (``messages`` or ``prompt``), the ``answer``, and what is known of how it came about.
Sampling options other than ``seed`` change nothing: a recording cannot say what it would have said.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson

from backends.errors import BackendUnavailable, ModelLoadError, RequestRejected, UnsupportedByBackend
from backends.protocol import (
    Capability,
    EmbedResult,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Health,
    Load,
    Message,
    ScoreResult,
    Timings,
    TokenDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
    join_calls,
)
from backends.testing import split_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRecord:
    """Holds one recorded generation. Exactly one of ``messages`` and ``prompt`` is set."""

    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    answer: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    compute_s: float = 0.0
    compute_measured: bool = False

    @property
    def key(self) -> str:
        """Return what a request must match."""
        return _key(self.messages, self.prompt)

    @classmethod
    def of(cls, request: GenerateRequest, deltas: Iterable[TokenDelta], ending: Finished) -> AnswerRecord:
        """Record what a backend yielded."""
        deltas = list(deltas)
        return cls(
            messages=request.messages,
            prompt=request.prompt,
            answer="".join(delta.text for delta in deltas),
            reasoning="".join(delta.reasoning for delta in deltas),
            tool_calls=join_calls(piece for delta in deltas for piece in delta.tool_calls),
            finish_reason=ending.reason,
            usage=ending.usage,
            timings=ending.timings,
            compute_s=ending.compute_s,
            compute_measured=ending.compute_measured,
        )

    def to_json(self) -> bytes:
        """Return the record as one line, newline included; what was not recorded is left out."""
        body = {name: value for name, value in msgspec.to_builtins(self).items() if value is not None}
        return orjson.dumps(body, option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_json(cls, line: bytes) -> AnswerRecord:
        """Read one line.

        Raises
        ------
        ValueError : not a record; says what is wrong with it
        """
        body = orjson.loads(line)
        if not isinstance(body, dict):
            raise ValueError("expected a JSON object")
        _refuse_unknown(body, cls, "record")
        if ("messages" in body) == ("prompt" in body):
            raise ValueError("expected exactly one of messages and prompt")
        if "messages" in body:
            body["messages"] = tuple(_read_part(each, Message) for each in body["messages"])
        body["tool_calls"] = tuple(_read_part(each, ToolCall) for each in body.get("tool_calls", ()))
        body["finish_reason"] = FinishReason(body.get("finish_reason", "stop"))
        body["usage"] = _read_part(body.get("usage", {}), Usage)
        body["timings"] = _read_part(body.get("timings", {}), Timings)
        for name in ("answer", "reasoning", "prompt"):
            if not isinstance(body.get(name, ""), str):
                raise ValueError(f"{name} is not a string")
        return cls(**body)


def read_records(path: Path) -> list[AnswerRecord]:
    """Read a JSON Lines file of records; blank lines are skipped.

    Raises
    ------
    ModelLoadError : names the file, the line and what is wrong with it
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(AnswerRecord.from_json(line))
        except (ValueError, TypeError, KeyError) as error:
            raise ModelLoadError(f"{path}, line {number}: {error}.") from error
    if not records:
        raise ModelLoadError(f"{path} holds no records.")
    return records


class ReplayBackend:
    """Answer from records.

    A question recorded several times is answered by the request's ``seed`` (modulo the number of answers), or in turn
    without one.

    Parameters
    ----------
    model_id : the served model's name
    source : records, or a file of them that :meth:`start` reads
    context_length : the recorded model's, where known
    """

    def __init__(
        self, model_id: str, source: Path | Sequence[AnswerRecord], *, context_length: int | None = None
    ) -> None:
        self.model_id: Final = model_id
        self._source = source
        self.context_length: Final = context_length
        self.capabilities: Final[frozenset[Capability]] = frozenset({"generate"})
        self._records: dict[str, list[AnswerRecord]] | None = None
        self._turns: dict[str, int] = {}
        self._num_running = 0
        self._is_closed = False

    async def start(self) -> None:
        """Read the file. Idempotent."""
        if self._records is not None:
            return
        records = read_records(self._source) if isinstance(self._source, Path) else self._source
        self._records = {}
        for record in records:
            self._records.setdefault(record.key, []).append(record)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Yield the recorded answer word by word, then its recorded ending.

        Raises
        ------
        RequestRejected : the question was not recorded
        BackendUnavailable : not started, or closed
        """
        record = self._find(request)
        self._num_running += 1
        is_ended = False
        try:
            for word in split_tokens(record.reasoning):
                yield TokenDelta(reasoning=word, num_tokens=1)
            for word in split_tokens(record.answer):
                yield TokenDelta(word, num_tokens=1)
            for index, call in enumerate(record.tool_calls):
                piece = ToolCallDelta(index, call.call_id, call.name, call.arguments)
                yield TokenDelta(num_tokens=1, tool_calls=(piece,))
            is_ended = True
            yield _ending(record)
        finally:
            self._num_running -= 1
            if not is_ended and request.on_abandoned is not None:
                # A recording has been paid for whole, whoever stops listening.
                request.on_abandoned(Finished(FinishReason.CANCELLED, record.usage))

    def _find(self, request: GenerateRequest) -> AnswerRecord:
        if self._is_closed or self._records is None:
            raise BackendUnavailable(f"Model {self.model_id!r} is {'closed' if self._is_closed else 'not started'}.")
        key = _key(request.messages, request.prompt)
        found = self._records.get(key)
        if found is None:
            raise RequestRejected(
                f"Model {self.model_id!r} replays recordings, and this question is not among them.",
                status=404,
                code="not_recorded",
            )
        turn = self._turns.get(key, 0) if request.sampling.seed is None else request.sampling.seed
        # A seeded request takes nobody else's turn.
        self._turns[key] = self._turns.get(key, 0) + (request.sampling.seed is None)
        return found[turn % len(found)]

    async def count_tokens(self, request: GenerateRequest, *, limit: int | None = None) -> int | None:
        """Return the recorded prompt's length, None for a question that was not recorded."""
        found = (self._records or {}).get(_key(request.messages, request.prompt))
        return found[0].usage.prompt_tokens or None if found else None

    async def score(self, prompt: GenerateRequest, answer: str) -> ScoreResult:
        raise UnsupportedByBackend("score", self.model_id)

    async def embed(self, texts: Sequence[str]) -> EmbedResult:
        raise UnsupportedByBackend("embed", self.model_id)

    async def health(self) -> Health:
        """Check that there is something to replay."""
        began_s = time.perf_counter()
        ok = bool(self._records) and not self._is_closed
        return Health(ok, time.perf_counter() - began_s, "" if ok else "no recordings")

    def load(self) -> Load:
        return Load(running=self._num_running)

    async def close(self) -> None:
        """Refuse what comes. Idempotent."""
        self._is_closed = True


def _ending(record: AnswerRecord) -> Finished:
    return Finished(
        reason=record.finish_reason,
        usage=record.usage,
        timings=record.timings,
        compute_s=record.compute_s,
        compute_measured=record.compute_measured,
        error="recorded failure" if record.finish_reason is FinishReason.ERROR else None,
    )


def _key(messages: tuple[Message, ...] | None, prompt: str | None) -> str:
    if messages is None:
        return orjson.dumps(["prompt", prompt]).decode()
    asked = [
        [message.role, message.content, *((call.name, call.arguments) for call in message.tool_calls)]
        for message in messages
    ]
    return orjson.dumps(asked).decode()


def _refuse_unknown(body: Mapping[str, Any], kind: type[Any], where: str) -> None:
    known = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else [each.name for each in fields(kind)]
    unknown = sorted(set(body) - set(known))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r} in {where}")


def _read_part(body: Any, kind: type[Any]) -> Any:
    if not isinstance(body, dict):
        raise ValueError(f"expected an object for {kind.__name__.lower()}")
    _refuse_unknown(body, kind, kind.__name__.lower())
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{kind.__name__.lower()}: {error}") from error
