"""The look of ``/v1/completions``: ``text_completion`` objects, streamed or whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from backends.protocol import FinishReason, TokenDelta, TokenLogprob
from gateway.api.answer_encoder import AnswerEncoder, ResponseHead, finite
from gateway.api.choice import AnswerChoice


class CompletionEncoder(AnswerEncoder):
    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, head: ResponseHead, *, include_usage: bool = False, holds_back: bool = False) -> None:
        super().__init__(head, include_usage=include_usage, holds_back=holds_back)
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> bytes:
        return b""

    def delta(self, index: int, delta: TokenDelta) -> bytes:
        if not (delta.text or delta.logprobs):
            return b""
        if not delta.logprobs:
            return self._frame(index, orjson.dumps(delta.text))
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(delta.text)
        return self._frame(index, orjson.dumps(delta.text), orjson.dumps(_logprobs_json(delta.logprobs, offset)))

    def ending(self, index: int, reason: FinishReason) -> bytes:
        return self._frame(index, b'""', reason=b'"' + reason.value.encode() + b'"')

    def _frame(self, index: int, text: bytes, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (index, text, logprobs, reason)
        return self._before + choice + self._after

    def held(self, answer: AnswerChoice) -> bytes:
        logprobs = _logprobs_json(_entries(answer), 0)
        return self._frame(answer.index, orjson.dumps(answer.text), orjson.dumps(logprobs))

    def choice(self, answer: AnswerChoice) -> dict[str, Any]:
        entries = _entries(answer)
        return {
            "index": answer.index,
            "text": answer.text,
            "logprobs": _logprobs_json(entries, 0) if entries else None,
            "finish_reason": answer.finish_reason.value,
        }


def _entries(answer: AnswerChoice) -> Sequence[TokenLogprob | None]:
    """The tokens of an echoed prompt, then the answer's own."""
    assert answer.finished is not None, "only finished answers are shown whole"
    return [*(answer.finished.prompt_logprobs or ()), *answer.logprobs]


def _logprobs_json(entries: Sequence[TokenLogprob | None], offset: int) -> dict[str, Any]:
    """The older form: parallel arrays. The first token of an echoed prompt has no probability."""
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for entry in entries:
        offsets.append(offset)
        tokens.append(entry.token if entry else "")
        logprobs.append(finite(entry.logprob) if entry else None)
        tops.append({token: finite(logprob) for token, _, logprob in entry.top} if entry else None)
        offset += len(tokens[-1])
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
