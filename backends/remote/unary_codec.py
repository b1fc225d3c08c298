"""Encodes and decodes calls with one whole answer: scoring, embedding, counting."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt
from typing import Any

import orjson

from backends.config import RemoteModelConfig
from backends.errors import BackendFailure, UnsupportedByBackend
from backends.protocol import EmbedResult, GenerateRequest, ScoreResult, TokenLogprob, Usage
from backends.remote.chunk_decoder import UNKNOWN_TOKEN_ID, read_chunk, read_usage
from backends.remote.request_encoder import message_body, thinking_body, tools_body

# Alternatives asked for where a server gives no ranks: a token outside them has at least this rank.
_NUM_RANKED = 5


def embed_body(texts: Sequence[str], config: RemoteModelConfig) -> dict[str, Any]:
    return {"model": config.model, "input": list(texts), "encoding_format": "float", **config.extra_body}


def read_embeddings(data: bytes, num_texts: int) -> EmbedResult:
    """Read OpenAI's embeddings answer: vectors in the order of ``index``, made unit length."""
    try:
        body = orjson.loads(data)
        rows = sorted(body["data"], key=lambda row: row["index"])
        # A missing row would shift every vector after it onto another text.
        if [row["index"] for row in rows] != list(range(num_texts)):
            raise ValueError("rows are missing")
        usage = read_usage(body.get("usage") or {})
        return EmbedResult(tuple(_unit(row["embedding"]) for row in rows), usage)
    except (orjson.JSONDecodeError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise BackendFailure(f"The server's embeddings cannot be read: {error!r}.") from error


def _unit(vector: Sequence[float]) -> tuple[float, ...]:
    norm = sqrt(sum(value * value for value in vector))
    if not isfinite(norm) or norm == 0.0:
        raise ValueError(f"a vector has length {norm}")
    return tuple(value / norm for value in vector)


def tokenize_body(request: GenerateRequest, config: RemoteModelConfig) -> dict[str, Any]:
    """Return the body of vLLM's ``POST /tokenize``."""
    if request.messages is not None:
        body: dict[str, Any] = {
            "model": config.model,
            "messages": [message_body(message, config) for message in request.messages],
        }
        return {**body, **tools_body(request.tools), **thinking_body(request, config)}
    return {"model": config.model, "prompt": request.prompt}


def read_token_count(data: bytes) -> int:
    """Read vLLM's ``count``."""
    try:
        count = orjson.loads(data)["count"]
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError("count is not an integer")
    except (orjson.JSONDecodeError, TypeError, KeyError) as error:
        raise BackendFailure(f"The server's token count cannot be read: {error!r}.") from error
    return count


def score_body(prompt: GenerateRequest, answer: str, config: RemoteModelConfig) -> tuple[str, dict[str, Any]]:
    """Return (path, body) of a request that reads ``answer`` after ``prompt`` instead of writing one.

    Raises
    ------
    UnsupportedByBackend : the server scores nothing, or not this kind of prompt
    """
    body: dict[str, Any] = {"model": config.model, "max_tokens": 1, "temperature": 0.0, **config.extra_body}
    if config.score_api == "none" or prompt.prompt_token_ids is not None:
        raise UnsupportedByBackend("score" if config.score_api == "none" else "prompt_token_ids", config.model)
    if config.score_api == "vllm":
        body["prompt_logprobs"] = 0
        if prompt.messages is None:
            return "/completions", {**body, "prompt": (prompt.prompt or "") + answer}
        messages = [message_body(message, config) for message in prompt.messages]
        messages.append({"role": "assistant", "content": answer})
        # The answer stays open, so that no end-of-turn token is scored with it.
        open_end = {"add_generation_prompt": False, "continue_final_message": True}
        return "/chat/completions", {**body, "messages": messages, **open_end}
    if prompt.messages is not None:
        # Only the server knows its chat template, and echo takes text alone.
        raise UnsupportedByBackend("score of messages", config.model)
    return "/completions", {**body, "prompt": (prompt.prompt or "") + answer, "echo": True, "logprobs": _NUM_RANKED}


def read_score(data: bytes, prompt: GenerateRequest, answer: str, config: RemoteModelConfig) -> ScoreResult:
    """Read the answer to :func:`score_body`.

    Raises
    ------
    BackendFailure : unreadable, or its tokens do not line up with the answer's text
    """
    try:
        body = orjson.loads(data)
        usage = read_usage(body.get("usage") or {})
        if config.score_api == "vllm":
            return _read_vllm(data, body, answer, usage)
        return _read_echo(body, len(prompt.prompt or ""), len(answer), usage)
    except BackendFailure:
        raise
    except Exception as error:
        raise BackendFailure(f"The server's scores cannot be read: {error!r}.") from error


def _read_vllm(data: bytes, body: dict[str, Any], answer: str, usage: Usage) -> ScoreResult:
    entries = read_chunk(data).prompt_logprobs
    if entries is None:
        raise BackendFailure("The server sent no prompt_logprobs.")
    source = body["choices"][0].get("prompt_logprobs") or body["prompt_logprobs"]
    start = find_answer([entry.token if entry is not None else "" for entry in entries], answer)
    scored = [(entry, raw) for entry, raw in zip(entries[start:], source[start:], strict=True) if entry is not None]
    return ScoreResult(
        token_ids=tuple(entry.token_id for entry, _ in scored),
        logprobs=tuple(entry.logprob for entry, _ in scored),
        # vLLM counts ranks from 1.
        ranks=tuple(int(raw[str(entry.token_id)]["rank"]) - 1 for entry, raw in scored),
        usage=usage,
    )


def find_answer(tokens: Sequence[str], answer: str) -> int:
    """Return the index of the first token of ``answer`` at the end of ``tokens``.

    Templates may trim the answer's end, and the first token may begin before the answer where the vocabulary joins the
    two (it then counts as the answer's).

    Raises
    ------
    BackendFailure : the tokens do not end with the answer
    """
    wanted = answer.rstrip()
    text = ""
    for index in range(len(tokens) - 1, -1, -1):
        text = tokens[index] + text
        if len(text.rstrip()) >= len(wanted) and wanted in text:
            return index
        if len(text) > len(answer) + 64:
            break
    raise BackendFailure("The server's prompt tokens do not end with the answer's text.")


def _read_echo(body: dict[str, Any], num_before: int, num_chars: int, usage: Usage) -> ScoreResult:
    found = body["choices"][0]["logprobs"]
    scored: list[TokenLogprob] = []
    ranks: list[int] = []
    tops = found.get("top_logprobs") or [None] * len(found["tokens"])
    for token, offset, value, top in zip(
        found["tokens"], found["text_offset"], found["token_logprobs"], tops, strict=True
    ):
        if value is None or offset < num_before or offset >= num_before + num_chars:
            continue
        scored.append(TokenLogprob(token, UNKNOWN_TOKEN_ID, float(value)))
        better = [other for name, other in (top or {}).items() if name != token and other > value]
        ranks.append(len(better))
    if not scored and num_chars:
        raise BackendFailure("The server's echo has no tokens of the answer.")
    return ScoreResult(
        token_ids=tuple(entry.token_id for entry in scored),
        logprobs=tuple(entry.logprob for entry in scored),
        ranks=tuple(ranks),
        usage=usage,
    )
