"""Encodes a request of ours as the JSON body an OpenAI-compatible server expects.

Options beyond OpenAI's (``top_k``, ``min_p``, ``repetition_penalty``, ``min_tokens``, ``stop_token_ids``,
``ignore_eos``) go by vLLM's names, which SGLang and llama.cpp share, and only when they differ from their defaults: a
server that knows none of them never sees one it was not asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backends.config import RemoteModelConfig
from backends.errors import UnsupportedByBackend
from backends.protocol import (
    MEDIA_CAPABILITIES,
    PLAIN_TEXT,
    Audio,
    Capability,
    GenerateRequest,
    Image,
    Media,
    Message,
    OutputFormat,
    SamplingParams,
    Thought,
    Tool,
    ToolChoice,
)

# Defaults of OpenAI and vLLM; `temperature` is always sent, because model folders override its default at many servers.
_DEFAULTS = SamplingParams()
_SAME_NAME = (
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
)
# Fields of a caller's request that a server may honour and the protocol does not model.
_FORWARDED = ("user",)


def is_chat(request: GenerateRequest) -> bool:
    """Return whether the request goes to ``chat/completions`` rather than ``completions``."""
    return request.messages is not None


def request_path(request: GenerateRequest) -> str:
    return "/chat/completions" if is_chat(request) else "/completions"


def request_body(request: GenerateRequest, config: RemoteModelConfig, *, with_usage: bool) -> dict[str, Any]:
    """Build the body of a streaming request.

    Parameters
    ----------
    with_usage : whether to ask for token counts at the end (``stream_options.include_usage``)

    Raises
    ------
    UnsupportedByBackend : the request needs a capability the server was not said to have
    """
    check_supported(request, config)
    body: dict[str, Any] = {"model": config.model, **_prompt(request, config), "stream": True}
    if with_usage:
        body["stream_options"] = {"include_usage": True}
    body.update(_sampling(request, config))
    body.update(thinking_body(request, config))
    body.update(_prediction(request, config))
    if request.tools:
        body.update(tools_body(request.tools))
        body.update(_tool_choice(request.tool_choice))
    body.update(_output_format(request.output_format))
    body.update({name: request.extra[name] for name in _FORWARDED if name in request.extra})
    if config.cache_salt and request.extra.get("cache_salt"):
        body["cache_salt"] = request.extra["cache_salt"]
    # Last, so that the operator can overrule what a caller asked for.
    body.update(config.extra_body)
    return body


def check_supported(request: GenerateRequest, config: RemoteModelConfig) -> None:
    """Refuse what the server was not said to offer, by name."""
    sampling = request.sampling
    media = {type(part) for message in request.messages or () for part in message.parts}
    wanted: dict[Capability, bool] = {
        "logprobs": sampling.logprobs is not None,
        "prompt_token_ids": request.prompt_token_ids is not None,
        "thinking": request.thinking is True,
        "tools": bool(request.tools),
        "structured_output": request.output_format is not PLAIN_TEXT,
        "continue": request.continued is not None,
        **{capability: kind in media for kind, capability in MEDIA_CAPABILITIES.items()},
    }
    for capability, is_wanted in wanted.items():
        if is_wanted and capability not in config.capabilities:
            raise UnsupportedByBackend(capability, config.model)
    if request.continued is not None and not can_continue(request):
        raise UnsupportedByBackend("continue", config.model)
    if sampling.prompt_logprobs is not None and config.score_api != "vllm":
        raise UnsupportedByBackend("prompt_logprobs", config.model)
    if request.echo and is_chat(request):
        raise UnsupportedByBackend("echo", config.model)


def can_continue(request: GenerateRequest) -> bool:
    """Return whether a begun answer can be finished without its grammar: a server begins that anew."""
    is_free = request.output_format is PLAIN_TEXT and request.tool_choice.mode != "required"
    return is_free and (request.continued is None or not request.continued.tool_calls)


def begun_text(request: GenerateRequest) -> str:
    """Return the text behind which a server goes on.

    Chat templates cut blanks off, so there it goes without those at its end, and the model may write them again.
    """
    if request.continued is None:
        return ""
    return request.continued.content.rstrip() if is_chat(request) else request.continued.content


def message_body(message: Message, config: RemoteModelConfig) -> dict[str, Any]:
    """Return one chat turn as the server expects it."""
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        body["name"] = message.name
    if message.parts:
        body["content"] = [_part_body(part) for part in message.parts]
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        body["content"] = body["content"] or None
        body["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.thoughts and "thinking_blocks" in config.capabilities:
        body["thinking_blocks"] = [_thought_body(thought) for thought in message.thoughts]
    elif message.tool_calls and message.reasoning:
        # Servers of models that think between calls want it back; the others leave the field.
        body["reasoning_content"] = message.reasoning
    return body


def _thought_body(thought: Thought) -> dict[str, Any]:
    """Return a block as LiteLLM has it, which are Anthropic's."""
    if thought.is_redacted:
        return {"type": "redacted_thinking", "data": thought.signature}
    return {"type": "thinking", "thinking": thought.text, "signature": thought.signature}


def _part_body(part: str | Media) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Image):
        image = {"url": part.url} if part.detail is None else {"url": part.url, "detail": part.detail}
        return {"type": "image_url", "image_url": image}
    if isinstance(part, Audio):
        return {"type": "input_audio", "input_audio": {"data": part.data, "format": part.format}}
    file = {"file_data": part.data} if part.name is None else {"file_data": part.data, "filename": part.name}
    return {"type": "file", "file": file}


def tools_body(given: Sequence[Tool]) -> dict[str, Any]:
    """Return ``tools`` as the server expects them; nothing where there are none."""
    tools = []
    for tool in given:
        function: dict[str, Any] = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        if tool.parameters:
            function["parameters"] = tool.parameters
        if tool.strict:
            function["strict"] = True
        tools.append({"type": "function", "function": function})
    return {"tools": tools} if tools else {}


def _tool_choice(choice: ToolChoice) -> dict[str, Any]:
    body: dict[str, Any] = {} if choice.parallel else {"parallel_tool_calls": False}
    if len(choice.names) == 1 and choice.mode == "required":
        body["tool_choice"] = {"type": "function", "function": {"name": choice.names[0]}}
    elif choice.names:
        allowed = [{"type": "function", "function": {"name": name}} for name in choice.names]
        body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": allowed}}
    elif choice.mode != "auto":
        body["tool_choice"] = choice.mode
    return body


def _output_format(wanted: OutputFormat) -> dict[str, Any]:
    """Return OpenAI's ``response_format`` where it has the kind, else vLLM's ``structured_outputs``."""
    if wanted is PLAIN_TEXT:
        return {}
    if wanted.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if wanted.kind == "json_schema" and isinstance(wanted.spec, Mapping):
        spec = {"name": wanted.name or "response", "schema": wanted.spec, "strict": wanted.strict}
        return {"response_format": {"type": "json_schema", "json_schema": spec}}
    name = "json" if wanted.kind == "json_schema" else wanted.kind
    return {"structured_outputs": {name: list(wanted.spec) if wanted.kind == "choice" else wanted.spec}}


def _prompt(request: GenerateRequest, config: RemoteModelConfig) -> dict[str, Any]:
    begun = begun_text(request)
    if request.messages is not None:
        messages = [message_body(message, config) for message in request.messages]
        if request.continued is None or not begun:
            return {"messages": messages}
        last = {"role": "assistant", "content": begun}
        if request.continued.reasoning:
            last["reasoning_content"] = request.continued.reasoning
        return {"messages": [*messages, last], "continue_final_message": True, "add_generation_prompt": False}
    if request.prompt_token_ids is not None:
        return {"prompt": list(request.prompt_token_ids), **({"echo": True} if request.echo else {})}
    assert request.prompt is not None, "one of messages, prompt and prompt_token_ids is given"
    return {"prompt": request.prompt + begun, **({"echo": True} if request.echo else {})}


def _sampling(request: GenerateRequest, config: RemoteModelConfig) -> dict[str, Any]:
    sampling = request.sampling
    body: dict[str, Any] = {"temperature": sampling.temperature}
    for name in _SAME_NAME:
        value = getattr(sampling, name)
        if value != getattr(_DEFAULTS, name):
            body[name] = value
    if sampling.max_tokens is not None:
        # Only chat/completions knows the newer name.
        name = config.max_tokens_parameter if is_chat(request) else "max_tokens"
        body[name] = sampling.max_tokens
    if sampling.stop:
        # The answer is cut here in any case (backends.remote.stop_cutter); a server that cuts too spares tokens.
        body["stop"] = list(sampling.stop[: config.max_stop])
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    if sampling.prompt_logprobs is not None:
        body["prompt_logprobs"] = sampling.prompt_logprobs
    body.update(_logprobs(request))
    return body


def _logprobs(request: GenerateRequest) -> dict[str, Any]:
    num_top = request.sampling.logprobs
    if num_top is None:
        return {}
    if not is_chat(request):
        return {"logprobs": num_top}
    return {"logprobs": True, "top_logprobs": num_top}


def _prediction(request: GenerateRequest, config: RemoteModelConfig) -> dict[str, Any]:
    """Return the prediction for a server that takes one.

    OpenAI refuses it beside log-probabilities, so there it is left out.
    """
    is_taken = "prediction" in config.capabilities and is_chat(request) and request.sampling.logprobs is None
    if not request.prediction or not is_taken:
        return {}
    return {"prediction": {"type": "content", "content": request.prediction}}


def thinking_body(request: GenerateRequest, config: RemoteModelConfig) -> Mapping[str, Any]:
    """Return what switches the model's thinking on or off; nothing where nobody wants either."""
    thinking = request.thinking if request.thinking is not None else config.thinking
    if thinking is None or not is_chat(request) or config.thinking_parameter == "none":
        return {}
    if config.thinking_parameter == "reasoning_effort":
        return {"reasoning_effort": "medium" if thinking else "none"}
    return {"chat_template_kwargs": {"enable_thinking": thinking}}
