"""Estimates what a request will use and cost, for its reservation."""

from __future__ import annotations

from gateway.api.request import InferenceRequest, prompt_size
from policies.pricing import price_usd, to_nano_usd
from policies.types import Tier

_CHARS_PER_TOKEN = 4


def wanted_tokens(request: InferenceRequest, expected_output_tokens: int) -> int:
    """Tokens of all prompts and answers; an answer without ``max_tokens`` counts as long as the policy expects."""
    num_prompt = sum(prompt_size(prompt) // _CHARS_PER_TOKEN + 1 for prompt in request.prompts)
    num_output = request.sampling.max_tokens
    return (num_prompt + (expected_output_tokens if num_output is None else num_output) * len(request.prompts)) * (
        request.n
    )


def wanted_nano_usd(request: InferenceRequest, tier: Tier, expected_output_tokens: int) -> int:
    """Price of all answers at a tier, each no longer than the policy expects and the request allows."""
    num_output = expected_output_tokens
    if request.sampling.max_tokens is not None:
        num_output = min(num_output, request.sampling.max_tokens)
    prices = [price_usd(tier, prompt_size(each) // _CHARS_PER_TOKEN + 1, num_output) for each in request.prompts]
    return to_nano_usd(sum(prices) * request.n)  # type: ignore[arg-type]  # there is always a prompt
