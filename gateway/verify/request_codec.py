"""Codec of what a check needs of a request: two JSON texts that are kept until it is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from backends.protocol import GenerateRequest, Message, Priority, SamplingParams
from gateway.api.request import Prompt, Turn

# Token ids mean nothing to another tier's tokenizer; probabilities are asked for by the graders themselves.
_LEFT_OUT = frozenset({"logit_bias", "stop_token_ids", "logprobs", "prompt_logprobs"})
_DEFAULTS = SamplingParams()
_NAMES = tuple(name for name in SamplingParams.__struct_fields__ if name not in _LEFT_OUT)


def pack_prompt(prompt: Prompt) -> str:
    """Return a prompt as JSON: ``{"messages": [[role, content, name]]}`` or ``{"prompt": text}``."""
    if isinstance(prompt, str):
        return orjson.dumps({"prompt": _mend(prompt)}).decode()
    turns = [[each.role, _mend(each.text), each.name] for each in prompt if isinstance(each, Turn)]
    return orjson.dumps({"messages": turns}).decode()


def pack_sampling(sampling: SamplingParams, thinking: bool | None) -> dict[str, Any]:
    """Return what differs from the defaults, and whether thinking was asked for."""
    packed = {name: getattr(sampling, name) for name in _NAMES if getattr(sampling, name) != getattr(_DEFAULTS, name)}
    return packed if thinking is None else packed | {"thinking": thinking}


def unpack_request(request_id: str, prompt: str, sampling: Mapping[str, Any]) -> GenerateRequest:
    """Return the same request at background priority, for another tier.

    Raises
    ------
    ValueError
        The texts are not what was packed.
    """
    packed = orjson.loads(prompt)
    chosen = {name: value for name, value in sampling.items() if name in _NAMES}
    if "stop" in chosen:
        chosen["stop"] = tuple(chosen["stop"])
    common: dict[str, Any] = {
        "sampling": SamplingParams(**chosen),
        "priority": Priority.BACKGROUND,
        "thinking": sampling.get("thinking"),
    }
    if not isinstance(packed, dict) or not packed.keys() & {"messages", "prompt"}:
        raise ValueError(f"the kept prompt has neither messages nor prompt: {prompt[:80]!r}")
    if "prompt" in packed:
        return GenerateRequest(request_id, prompt=packed["prompt"], **common)
    messages = tuple(Message(role, content, name) for role, content, name in packed["messages"])
    return GenerateRequest(request_id, messages=messages, **common)


def question_of(request: GenerateRequest) -> str:
    """Return what was asked, as one text: the last user turn, or the prompt."""
    for message in reversed(request.messages or ()):
        if message.role == "user":
            return message.content
    return request.prompt or "\n".join(message.content for message in request.messages or ())


def _mend(text: str) -> str:
    """JSON has no lone surrogates; what a database refuses besides is mended where the row is made."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
