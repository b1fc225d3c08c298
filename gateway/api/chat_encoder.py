"""The look of ``/v1/chat/completions``: ``chat.completion`` and ``chat.completion.chunk`` objects."""

from __future__ import annotations

from typing import Any

import orjson

from backends.protocol import FinishReason, TokenDelta
from gateway.api.answer_encoder import AnswerEncoder, logprob_json
from gateway.api.choice import AnswerChoice


class ChatEncoder(AnswerEncoder):
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def opening(self, index: int) -> bytes:
        return self._frame(index, b'{"role":"assistant","content":""}')

    def delta(self, index: int, delta: TokenDelta) -> bytes:
        if delta.reasoning:
            parts: dict[str, str] = {"reasoning_content": delta.reasoning}
            if delta.text:
                parts["content"] = delta.text
            shown = orjson.dumps(parts)
        elif delta.text:
            shown = b'{"content":' + orjson.dumps(delta.text) + b"}"
        elif delta.logprobs:
            shown = b"{}"
        else:
            return b""
        if not delta.logprobs:
            return self._frame(index, shown)
        content = [logprob_json(entry) for entry in delta.logprobs]
        return self._frame(index, shown, b'{"content":' + orjson.dumps(content) + b',"refusal":null}')

    def ending(self, index: int, reason: FinishReason) -> bytes:
        return self._frame(index, b"{}", reason=b'"' + reason.value.encode() + b'"')

    def _frame(self, index: int, delta: bytes, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (index, delta, logprobs, reason)
        return self._before + choice + self._after

    def choice(self, answer: AnswerChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasonings:
            message["reasoning_content"] = answer.reasoning
        logprobs = None
        if answer.logprobs:
            logprobs = {"content": [logprob_json(entry) for entry in answer.logprobs], "refusal": None}
        return {
            "index": answer.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason.value,
        }
