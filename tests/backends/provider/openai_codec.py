"""Makes the JSON of an OpenAI-compatible server from a script, for :mod:`tests.backends.provider.server`."""

from __future__ import annotations

from typing import Any

from backends.protocol import (
    FinishReason,
    GenerateRequest,
    Message,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
    ToolCallDelta,
)
from backends.testing import Script, count_prompt_tokens, prompt_text, script_answer, split_tokens, token_id


def parse_request(body: dict[str, Any]) -> GenerateRequest:
    """Read a completion request as a server would."""
    sampling = SamplingParams(
        max_tokens=body.get("max_completion_tokens", body.get("max_tokens")),
        stop=_strings(body.get("stop")),
        seed=body.get("seed"),
        ignore_eos=bool(body.get("ignore_eos")),
        logprobs=_num_logprobs(body),
        prompt_logprobs=body.get("prompt_logprobs"),
    )
    thinking = (body.get("chat_template_kwargs") or {}).get("enable_thinking")
    if "messages" in body:
        messages = tuple(Message(each["role"], _content(each["content"])) for each in body["messages"])
        continued = None
        # A scored answer is read, not gone on with.
        if body.get("continue_final_message") and sampling.prompt_logprobs is None:
            assert body["add_generation_prompt"] is False, "vLLM refuses the two together"
            *messages, continued = messages
            assert continued.role == "assistant"
        return GenerateRequest(
            "provider", messages=tuple(messages), sampling=sampling, thinking=thinking, continued=continued
        )
    prompt = body["prompt"]
    if isinstance(prompt, list):
        return GenerateRequest("provider", prompt_token_ids=tuple(prompt), sampling=sampling)
    return GenerateRequest("provider", prompt=prompt, sampling=sampling, echo=bool(body.get("echo")))


def _content(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(part.get("text", "") for part in value)
    return value or ""


def _strings(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _num_logprobs(body: dict[str, Any]) -> int | None:
    value = body.get("logprobs")
    if isinstance(value, bool):
        return int(body.get("top_logprobs", 0)) if value else None
    return value


def answer_chunks(
    request: GenerateRequest, script: Script, body: dict[str, Any], *, is_chat: bool, with_usage: bool
) -> list[dict[str, Any]]:
    """Return the chunks of a streamed answer: role, one per delta, finish reason, usage."""
    plan = script_answer(request, script)
    chunks = []
    if is_chat:
        chunks.append(_chunk(body, is_chat, {"delta": {"role": "assistant", "content": ""}}))
    elif request.echo:
        chunks.append(_chunk(body, is_chat, {"text": prompt_text(request)}))
    chunks += [_chunk(body, is_chat, _choice(delta, is_chat)) for delta in plan.deltas]
    last: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
    # As vLLM has it.
    chunks.append(_chunk(body, is_chat, {**last, "finish_reason": str(plan.reason), "stop_reason": plan.stop_string}))
    if with_usage:
        num_tokens = sum(delta.num_tokens for delta in plan.deltas)
        usage = usage_body(request, script, num_tokens, plan.num_reasoning)
        chunks.append({**_chunk(body, is_chat, {}), "choices": [], "usage": usage})
    return chunks


def whole_answer(request: GenerateRequest, script: Script, body: dict[str, Any], *, is_chat: bool) -> dict[str, Any]:
    """Return an answer that is not streamed."""
    plan = script_answer(request, script)
    text = "".join(delta.text for delta in plan.deltas)
    reasoning = "".join(delta.reasoning for delta in plan.deltas)
    message: dict[str, Any] = {"role": "assistant", "content": text, "reasoning_content": reasoning or None}
    if plan.reason is FinishReason.TOOL_CALLS:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in script.tool_calls
        ]
    entries = [entry for delta in plan.deltas for entry in delta.logprobs]
    choice: dict[str, Any] = {"message": message} if is_chat else {"text": text}
    choice |= {"finish_reason": str(plan.reason), "logprobs": _logprobs(entries, is_chat) if entries else None}
    if request.sampling.prompt_logprobs is not None:
        choice["prompt_logprobs"] = _prompt_logprobs(request)
    if request.echo:
        choice = {**choice, **_echoed(request, text)}
    num_tokens = sum(delta.num_tokens for delta in plan.deltas)
    answer = _chunk(body, is_chat, choice)
    answer["object"] = "chat.completion" if is_chat else "text_completion"
    return {**answer, "usage": usage_body(request, script, num_tokens, plan.num_reasoning)}


def usage_body(request: GenerateRequest, script: Script, num_tokens: int, num_reasoning: int) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    num_prompt = count_prompt_tokens(request) if script.prompt_tokens is None else script.prompt_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": script.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }


def embeddings_body(body: dict[str, Any], vectors: list[list[float]]) -> dict[str, Any]:
    """Return OpenAI's embeddings answer, out of order as a parallel server may send it."""
    rows = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)]
    num_tokens = sum(len(split_tokens(text)) for text in _strings(body["input"]))
    return {"object": "list", "data": rows[::-1], "model": body["model"], "usage": {"prompt_tokens": num_tokens}}


def _chunk(body: dict[str, Any], is_chat: bool, choice: dict[str, Any]) -> dict[str, Any]:
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    choice = {"index": 0, "finish_reason": None, "logprobs": None, **choice}
    return {"id": "cmpl-1", "object": kind, "created": 1, "model": body.get("model"), "choices": [choice]}


def _choice(delta: TokenDelta, is_chat: bool) -> dict[str, Any]:
    logprobs = _logprobs(list(delta.logprobs), is_chat) if delta.logprobs else None
    if not is_chat:
        return {"text": delta.reasoning + delta.text, "logprobs": logprobs}
    if delta.tool_calls:
        return {"delta": {"tool_calls": [_call(piece) for piece in delta.tool_calls]}, "logprobs": logprobs}
    words = {"reasoning_content": delta.reasoning} if delta.reasoning else {"content": delta.text}
    return {"delta": words, "logprobs": logprobs}


def _call(piece: ToolCallDelta) -> dict[str, Any]:
    head = {"id": piece.call_id, "type": "function"} if piece.name else {}
    named = {"name": piece.name} if piece.name else {}
    return {"index": piece.index, **head, "function": {**named, "arguments": piece.arguments}}


def _logprobs(entries: list[TokenLogprob], is_chat: bool) -> dict[str, Any]:
    if is_chat:
        return {"content": [_chat_logprob(entry) for entry in entries]}
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{token: value for token, _, value in entry.top} for entry in entries],
        "text_offset": list(range(len(entries))),
    }


def _chat_logprob(entry: TokenLogprob) -> dict[str, Any]:
    top = [{"token": token, "logprob": value, "bytes": list(token.encode())} for token, _, value in entry.top]
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.token.encode()), "top_logprobs": top}


def _prompt_logprobs(request: GenerateRequest) -> list[dict[str, Any] | None]:
    """Return vLLM's shape: None for the first position, then token id → facts."""
    if request.messages is not None:
        tokens = [token for message in request.messages for token in ("<turn>", *split_tokens(message.content))]
    else:
        tokens = split_tokens(prompt_text(request))
    facts = [
        {str(token_id(token)): {"logprob": -0.5, "rank": 1 + position % 2, "decoded_token": token}}
        for position, token in enumerate(tokens)
    ]
    return [None, *facts[1:]]


def _echoed(request: GenerateRequest, text: str) -> dict[str, Any]:
    tokens = split_tokens(prompt_text(request))
    offsets = [sum(map(len, tokens[:at])) for at in range(len(tokens))]
    logprobs = {
        "tokens": [*tokens, text],
        "token_logprobs": [None, *[-0.5] * len(tokens)],
        "top_logprobs": [None, *[{token: -0.5, "other": -0.1} for token in tokens[1:]], None],
        "text_offset": [*offsets, sum(map(len, tokens))],
    }
    return {"text": prompt_text(request) + text, "logprobs": logprobs, "finish_reason": str(FinishReason.LENGTH)}
