"""Bounds what one call to a model can cost, before it is made; and covers generations by that bound.

A prompt has no more tokens than bytes, with some for the template of each message, tool and call. An answer has no more
than ``max_tokens``, or than the model's context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec

from backends.protocol import Audio, GenerateRequest, Image, Media, Message
from gateway.access.spending_lease import SpendingHold
from policies.pricing import price_usd, to_nano_usd
from policies.types import Tier

_TEMPLATE_TOKENS = 64
_TOKENS_PER_MESSAGE = 16
_TOKENS_PER_TOOL = 64
# More than the largest image costs at today's providers, whatever its address weighs.
_TOKENS_PER_IMAGE = 16_384
# Of base64: the least that speech takes is 8 kbit/s, 1,333 characters a second, and none counts 80 tokens for that.
_CHARS_PER_AUDIO_TOKEN = 16
# A page is read as text and as image, some 3,000 tokens, and even an empty one weighs a kilobyte.
_TOKENS_PER_FILE_CHAR = 3
_LEAST_TOKENS_PER_FILE = 16_384
# Where neither request nor configuration says more: no answer of today's models is longer.
_UNKNOWN_CONTEXT = 131_072
# Of no use as a bound beyond this: a million dollars, which the sums in the database hold many times.
_MOST_NANO_USD = 10**15


def most_generation_nano_usd(tier: Tier, request: GenerateRequest) -> int:
    """Return the most that one generation can cost by the tier's prices."""
    num_prompt = _prompt_tokens(request)
    context, num_output = tier.context_length, request.sampling.max_tokens
    if num_output is None:
        num_output = context or _UNKNOWN_CONTEXT
    elif context is not None:
        num_output = min(num_output, context)
    if request.prediction is not None:
        # OpenAI bills what was predicted in vain as output.
        num_output += _num_bytes(request.prediction)
    if request.echo:
        num_output += num_prompt
    return _most(tier, num_prompt, num_output)


def most_reading_nano_usd(tier: Tier, *texts: str, prompt: GenerateRequest | None = None) -> int:
    """Return the most that one pass over texts can cost, which are scored or made vectors of."""
    num_prompt = sum(map(_num_bytes, texts)) + (_TEMPLATE_TOKENS if prompt is None else _prompt_tokens(prompt))
    return _most(tier, num_prompt, 1)


async def covered(hold: SpendingHold, tier: Tier, requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
    """Cover generations; return them as they are to be made, with every retry covered by itself.

    Raises
    ------
    StoreUnavailable and its kinds
        None of them may begin.
    """
    most = [most_generation_nano_usd(tier, each) for each in requests]
    await hold.cover(sum(most))
    return [
        replace(each, before_retry=partial(hold.cover, amount)) for each, amount in zip(requests, most, strict=True)
    ]


def _most(tier: Tier, num_prompt: int, num_output: int) -> int:
    # Rounded up by one: bills are rounded to the nearest.
    return min(to_nano_usd(price_usd(tier, num_prompt, num_output)) + 1, _MOST_NANO_USD)


def _prompt_tokens(request: GenerateRequest) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids) + _TEMPLATE_TOKENS
    num_begun = 0 if request.continued is None else _message_tokens(request.continued)
    if request.messages is None:
        return _num_bytes(request.prompt or "") + num_begun + _TEMPLATE_TOKENS
    num_asked = sum(map(_message_tokens, request.messages)) + num_begun + _TEMPLATE_TOKENS
    if request.tools:
        num_asked += _TOKENS_PER_TOOL * len(request.tools) + len(msgspec.json.encode(request.tools))
    if request.output_format.spec is not None:
        # Some servers tell the model of the schema.
        num_asked += len(msgspec.json.encode(request.output_format.spec))
    return num_asked


def _message_tokens(message: Message) -> int:
    num_bytes = sum(map(_num_bytes, (message.role, message.content, message.name or "", message.reasoning)))
    for call in message.tool_calls:
        num_bytes += _num_bytes(call.call_id) + _num_bytes(call.name) + _num_bytes(call.arguments) + _TOKENS_PER_TOOL
    num_bytes += sum([_num_bytes(thought.signature) for thought in message.thoughts])
    num_media = sum([_media_tokens(part) for part in message.parts if not isinstance(part, str)])
    return num_bytes + _num_bytes(message.tool_call_id or "") + num_media + _TOKENS_PER_MESSAGE


def _media_tokens(part: Media) -> int:
    if isinstance(part, Image):
        return _TOKENS_PER_IMAGE
    if isinstance(part, Audio):
        return len(part.data) // _CHARS_PER_AUDIO_TOKEN + 1
    return max(_LEAST_TOKENS_PER_FILE, _TOKENS_PER_FILE_CHAR * len(part.data)) + _num_bytes(part.name or "")


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
