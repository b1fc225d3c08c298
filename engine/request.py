"""Defines what an engine is asked for and what it answers. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Protocol

from engine.errors import InvalidRequest

if TYPE_CHECKING:
    from engine.grammar import Grammar

MAX_LOGPROBS = 256


class Priority(IntEnum):
    """Says who goes first; smaller is sooner. Background work ages into ``LIVE`` so that it cannot starve."""

    LIVE = 0
    BACKGROUND = 1


class FinishReason(StrEnum):
    """Says how a request ended; each has exactly one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class StopCheck(Protocol):
    """Looks at each output token on the engine's thread; True ends the request with ``stop`` after that token."""

    def push(self, token_id: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sets how the next token is drawn.

    The order of operations is: repetition, presence and frequency penalties; ``logit_bias``; ``min_tokens``;
    temperature; ``min_p``; ``top_k``; ``top_p``. Temperature 0 takes the likeliest token after penalties and bias.

    Parameters
    ----------
    temperature : 0 is greedy
    top_p : in (0, 1], the smallest set of tokens whose probabilities reach this sum
    top_k : 0 is off
    min_p : in [0, 1], least probability relative to the likeliest token's
    presence_penalty, frequency_penalty : subtracted from logits of tokens in the output, once or per occurrence
    repetition_penalty : > 0, divides positive and multiplies negative logits of tokens in prompt or output
        (Keskar et al. 2019, "CTRL", section 4.1)
    logit_bias : token id -> added to its logit
    seed : the draws depend on it and on the position only; None takes a fresh one per request
    max_tokens : None is "up to the context"
    min_tokens : end-of-sequence and stop ids are ruled out before this many
    logprobs : number of alternatives reported (0 = only the chosen token's, None = none)
    prompt_logprobs : likewise for the prompt

    Raises
    ------
    InvalidRequest
        On a value outside its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in _FLOAT_RANGES:
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise InvalidRequest(name, f"{name} is {value!r}, expected a number from {low:g} to {high:g}.")
        if self.top_p == 0.0 or self.repetition_penalty == 0.0:
            name = "top_p" if self.top_p == 0.0 else "repetition_penalty"
            raise InvalidRequest(name, f"{name} is 0, expected a number above 0.")
        for name, least, most in _INT_RANGES:
            count = getattr(self, name)
            if count is not None and not least <= count <= most:
                raise InvalidRequest(name, f"{name} is {count}, expected an integer from {least} to {most}.")
        for token_id, bias in self.logit_bias.items():
            if not math.isfinite(bias):
                raise InvalidRequest("logit_bias", f"logit_bias of token {token_id} is {bias}, expected a number.")


_FLOAT_RANGES = (
    ("temperature", 0.0, 1e4),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -1e4, 1e4),
    ("frequency_penalty", -1e4, 1e4),
    ("repetition_penalty", 0.0, 1e4),
)
_INT_RANGES = (
    ("top_k", 0, 2**31),
    ("max_tokens", 0, 2**31),
    ("min_tokens", 0, 2**31),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Bounds reasoning: after ``max_tokens`` of it, ``close_ids`` are written as if the model had.

    ``close_id`` is the token whose appearance ends the reasoning by itself.
    """

    close_id: int
    close_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Holds tokens believed to be the answer, or to follow ``after_id`` (the end of the reasoning) in the output."""

    token_ids: tuple[int, ...]
    after_id: int | None = None


@dataclass(frozen=True, slots=True)
class Constraint:
    """Makes the output satisfy a grammar, reasoning before the answer apart.

    Parameters
    ----------
    grammar : compiled for the engine's model
    open_id : the token by which the output may begin reasoning; None: it may not
    close_id : the token that ends reasoning
    in_reasoning : the prompt left the reasoning open
    """

    grammar: Grammar
    open_id: int | None = None
    close_id: int | None = None
    in_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """Holds token ids, and everything else the engine needs to answer.

    ``score_from`` asks for the log-probability and rank of every prompt token from that index on (at least 1).
    ``pooled`` asks for the mean of the prompt's last hidden states. With ``max_tokens`` 0 nothing is generated.
    ``cache_salt`` keeps prefix-cache entries apart: only requests with the same salt share blocks.
    ``speculate`` False turns drafting off for this request. ``prediction`` is checked many tokens at a time; it changes
    how fast the answer comes, never what it is. ``model`` says for which of the models that an engine serves this is,
    where statistics are asked for by model. ``constraint`` is what every token drawn must satisfy; the answer ends when
    nothing can be added to it, ``min_tokens`` or not, and log-probabilities are of what it leaves.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    priority: Priority = Priority.LIVE
    score_from: int | None = None
    pooled: bool = False
    thinking: ThinkingBudget | None = None
    speculate: bool = True
    cache_salt: str = ""
    stop_check: StopCheck | None = None
    prediction: Prediction | None = None
    model: str = ""
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Holds the natural-log probability of one token under the model's own distribution (temperature 1, no filter).

    ``rank`` is the number of tokens that were likelier; ``top`` the likeliest as (id, logprob), best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Holds the tokens one step gave one request; ``logprobs`` is empty unless asked for."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestEnding:
    """Ends a request, once, with its bill.

    Times are seconds: ``queue_s`` from submission to first scheduled, ``ttft_s`` to the first token, ``itl_s`` the mean
    gap after it, ``total_s`` to the end. ``compute_s`` is the request's share, by tokens, of every step it was in.
    ``num_predicted_tokens`` are the prediction's, ``num_accepted_predicted_tokens`` those of them in the answer.
    """

    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_predicted_tokens: int = 0
    num_accepted_predicted_tokens: int = 0
    num_preemptions: int = 0
    queue_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: float = 0.0
    total_s: float = 0.0
    compute_s: float = 0.0
    error: Exception | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    pooled: tuple[float, ...] | None = None


Event = TokenChunk | RequestEnding
