"""The nouns of the log: one row a request, and what lives beside it. Pure data; ids and clocks are the caller's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any

from msgspec import Struct

from backends.protocol import FinishReason
from classifier.types import TierSufficiency
from policies.sampling import Direction, DrawnCheck

VALIDATOR, VALIDATOR_VERSION = "validator", "1"
"""What says that an answer is of no use without asking anyone: see :mod:`gateway.outcomes.answer_validator`."""

BROKEN = "broken"
"""The code of an attempt that wrote the beginning of an answer and failed; another went on with it."""

CALLS_MARK = "\x1d"
"""Begins the kept text of an answer that holds calls of tools: see :func:`gateway.verify.request_codec.pack_answer`."""


class Attempt(Struct, frozen=True):
    """One try of one tier. ``error`` is None for the try that answered, else the error code that ended it.

    ``doubted`` is the code of a try that answered and whose answer a higher tier's took the place of: ``cost_nano_usd``
    is what it cost by the price table, and is part of the row's cost. ``confidence`` is the tier's own in its answer,
    where the policy asked for it. ``faulty`` is the same of an answer whose calls or form were wrong for certain.
    ``broken`` is the code of one that wrote the beginning of the answer and failed; its cost is part of the row's too.
    """

    tier: int
    model: str
    duration_s: float
    error: str | None = None
    confidence: float | None = None
    cost_nano_usd: int | None = None


# Not frozen: each of fifty fields would be set at four times the price, and a request makes one of these.
@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One finished request, whatever its ending: enough to replay the decision and to price another one.

    Parameters
    ----------
    request_id : uuidv7, so rows sort by time
    created_at : when the request was accepted, timezone aware
    tenant, key_id : whose request it was; key_id None on an open server
    session_id : the conversation it belongs to, as the caller names it
    endpoint : path without host, ``/v1/chat/completions``
    model_requested : the body's ``model``
    num_choices : the body's ``n``; the tokens and costs below are sums over the choices
    policy_name, policy_version, router_version, config_hash : what was active
    features : what the router measured on the prompt
    sufficiency : per tier, calibrated P(right) and P(as good as the top tier)
    novelty : 0 (familiar) to 1 (foreign to the router)
    decided_tier : the policy's choice; None when the request failed before one was made
    final_tier, model_served : who answered; None when nobody did
    ladder : the fallback order after ``decided_tier``
    propensity, propensities : chance of ``decided_tier``, and of every tier, given the facts
    overrides : what the request asked for (``min_tier`` ...), only what was given; and its key's ``permissions``
    attempts : every tier tried, in order
    compute_s : device seconds; None when the backend cannot measure them
    cost_usd : by the price table
    measured_cost_usd : by the device seconds; None when unknown
    ttft_s, itl_s : None when no token was sent, or only one
    queue_s, total_s, overhead_s : waiting for a place, accepted to ended, spent by the gateway itself
    finish_reason : the one ending (of the first choice, where there are several)
    status_code, error_code : what HTTP said; error_code None on success
    prompt_digest, answer_digest : keyed hashes, see ``Store.digest``
    prompt_text, answer_text : kept in a table of their own, only where retention says so
    verify_probability : chance with which this answer was to be drawn for verification, against the top tier or, where
        there is none above, downward; None when it could not be
    traceparent : W3C trace context of the caller
    domain : what the prompt is about, empty when nothing says so
    barred : tiers that a limit kept from the request -> which: ``region``, ``cost`` or ``key``
    conversation : keyed hash of the conversation and its tenant
    turn, step : the user's turn in it, from 1, and the model's outputs before this one in that turn; None of requests
        that are no step of their conversation
    turn_id : the request whose decision this one followed, inside a loop of tool calls; None where it was decided anew
    call_digest : keyed hash that the results of its calls will name; None without calls
    """

    request_id: str
    created_at: datetime
    endpoint: str
    model_requested: str
    finish_reason: FinishReason
    status_code: int
    error_code: str | None = None
    tenant: str = "default"
    key_id: str | None = None
    session_id: str | None = None
    stream: bool = False
    num_choices: int = 1

    policy_name: str = ""
    policy_version: str = ""
    router_version: str = ""
    config_hash: str = ""

    features: Mapping[str, float] = field(default_factory=dict)
    sufficiency: tuple[TierSufficiency, ...] = ()
    novelty: float | None = None
    decided_tier: int | None = None
    final_tier: int | None = None
    model_served: str | None = None
    ladder: tuple[int, ...] = ()
    propensity: float | None = None
    propensities: Mapping[int, float] = field(default_factory=dict)
    reason: str = ""
    explored: bool = False
    confidence: float | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    attempts: tuple[Attempt, ...] = ()

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    compute_s: float | None = None
    cost_usd: Decimal = Decimal(0)
    measured_cost_usd: Decimal | None = None

    ttft_s: float | None = None
    itl_s: float | None = None
    queue_s: float = 0.0
    total_s: float = 0.0
    overhead_s: float = 0.0

    prompt_digest: str | None = None
    answer_digest: str | None = None
    prompt_text: str | None = None
    answer_text: str | None = None
    verify_probability: float | None = None
    traceparent: str | None = None
    domain: str = ""
    barred: Mapping[int, str] = field(default_factory=dict)
    is_side_request: bool = False  # not stored
    conversation: str | None = None
    turn: int | None = None
    step: int | None = None
    turn_id: str | None = None
    call_digest: str | None = None


# Not frozen, as above: with a router most answers of foreign prompts are drawn.
@dataclass(slots=True, kw_only=True)
class VerificationJob:
    """An answer that was drawn to be checked, with what the check reads; committed together with its request's row.

    Parameters
    ----------
    direction : ``up``: against the top tier; ``down``: whether the next lower tier would have done
    tier, against_tier : whose answer it is, and who is asked as well
    inclusion_probability, stratum : the chance with which it was drawn, and why that chance
    domain : what the prompt is about, empty when nothing says so
    prompt, sampling, answer : see :mod:`gateway.verify.request_codec`
    regions : those that the prompt may be sent to; anywhere when None
    known_fault : what is wrong with the answer for certain. Such a job is done as it is made, with the verdict 0, and
        keeps no texts; empty where it is still to be done
    ended_at : when the answer was complete; needed with ``known_fault``
    turn_id : as of the request
    """

    verification_id: str
    request_id: str
    created_at: datetime
    direction: Direction
    tier: int
    against_tier: int
    inclusion_probability: float
    stratum: str
    prompt: str
    answer: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    tenant: str = "default"
    domain: str = ""
    policy_name: str = ""
    policy_version: str = ""
    router_version: str = ""
    regions: tuple[str, ...] | None = None
    known_fault: str = ""
    ended_at: datetime | None = None
    turn_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRecord:
    """An answer of ``/v1/responses`` that is kept, written with its request's row.

    Parameters
    ----------
    previous_id : the request whose response it goes on from
    num_chained : responses that it goes on from, and itself
    chained_bytes : of the items of all of these
    conversation : digest of the conversation, not keyed
    regions : those that its text may be sent to; anywhere when None
    input : its own items, a JSON array
    response : as it was answered, a JSON object
    """

    request_id: str
    created_at: datetime
    tenant: str
    previous_id: str | None
    num_chained: int
    chained_bytes: int
    conversation: str | None
    regions: tuple[str, ...] | None
    input: str
    response: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A caller's key: never the key itself, only its SHA-256 (hex) and the prefix that people recognise it by.

    ``limits`` are the key's own (requests per minute, budget ...), named as the policies name them. ``scope`` is what
    it opens: ``use`` the API, ``admin`` the administration, ``admin-read`` what of that only reads. ``permissions`` are
    the policies, tiers and regions that its requests may use, any of a kind that is not there. From ``expires_at`` on
    it opens nothing.
    """

    key_id: str
    name: str
    key_hash: str
    prefix: str
    created_at: datetime
    tenant: str = "default"
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    scope: str = "use"
    permissions: Mapping[str, Any] = field(default_factory=dict)
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """The tier that served a conversation last, and how many of its tokens that tier's cache may still hold."""

    tenant: str
    session_id: str
    tier: int
    model: str
    cached_tokens: int
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """An answer with calls as a later step of its turn reads it back: who gave it, and what its turn was drawn for."""

    tier: int
    turn_id: str
    prompt_tokens: int
    completion_tokens: int
    turn: int | None
    step: int | None
    confidence: float | None
    probability: float | None
    drawn: DrawnCheck | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """An immutable version of a named policy, as given; ``body`` is its JSON form."""

    name: str
    version: str
    created_at: datetime
    body: Mapping[str, Any]
    author: str = ""
    note: str = ""
