"""From a finished exchange to its row, and to the note and the headers its caller gets."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

from backends.protocol import FinishReason
from gateway.access.authenticator import Caller
from gateway.answering.domain import domain_of
from gateway.answering.exchange import Exchange
from gateway.api.embedding_decoder import EmbeddingRequest
from gateway.api.request import prompt_text
from gateway.config.sections import Retention
from gateway.store.records import RequestRecord

Digest = Callable[[str], str]


class Recorder:
    """Makes rows. Pure but for the keyed digest it is given.

    Parameters
    ----------
    config_hash : of the settings in force
    retention : what is kept of prompts and answers
    digest : keyed hash of a text
    """

    def __init__(self, config_hash: str, retention: Retention, digest: Digest) -> None:
        self._config_hash = config_hash
        self._retention = retention
        self._digest = digest

    def row(
        self,
        exchange: Exchange,
        reason: FinishReason,
        status: int,
        error_code: str | None,
        verify_probability: float | None = None,
    ) -> RequestRecord:
        """The row of a request that has ended; ``verify_probability`` where its answer may be drawn for a check."""
        request = exchange.request
        record = RequestRecord(
            request_id=exchange.request_id,
            created_at=exchange.created_at,
            endpoint=exchange.endpoint,
            model_requested=request.model,
            finish_reason=reason,
            status_code=status,
            error_code=error_code,
            tenant=exchange.caller.tenant,
            key_id=exchange.caller.key_id,
            session_id=request.preferences.overrides.session_id,
            stream=request.stream,
            num_choices=request.num_choices,
            router_version=exchange.router_version,
            config_hash=self._config_hash,
            overrides=request.preferences.given,
            attempts=tuple(exchange.attempts),
            ttft_s=exchange.ttft_s,
            itl_s=exchange.itl_s,
            total_s=exchange.clock() - exchange.accepted_s,
            overhead_s=exchange.overhead_s,
            verify_probability=verify_probability,
            traceparent=exchange.traceparent,
        )
        _add_decision(record, exchange)
        _add_bill(record, exchange)
        if self._retention != "none":
            prompt = "\n".join(map(prompt_text, request.prompts))
            self._keep(record, prompt, "\n".join([answer.text for answer in exchange.answers]))
        return record

    def embedding_row(
        self, request_id: str, request: EmbeddingRequest, caller: Caller, created_at: datetime, **known: Any
    ) -> RequestRecord:
        """The row of a request for vectors: it needed no decision, so it has no tier and nothing a router said."""
        record = RequestRecord(
            request_id=request_id,
            created_at=created_at,
            endpoint="/v1/embeddings",
            model_requested=request.model,
            tenant=caller.tenant,
            key_id=caller.key_id,
            config_hash=self._config_hash,
            **known,
        )
        if self._retention != "none":
            self._keep(record, "\n".join(request.texts), None)
        return record

    def _keep(self, record: RequestRecord, prompt: str, answer: str | None) -> None:
        """Digests and texts, as far as retention allows."""
        record.prompt_digest = self._digest(prompt)
        record.answer_digest = None if answer is None else self._digest(answer)
        if self._retention == "full":
            record.prompt_text, record.answer_text = prompt, answer


def _add_decision(record: RequestRecord, exchange: Exchange) -> None:
    """What was decided, by what, and who answered, as far as the request came."""
    if exchange.policy is not None:
        record.policy_name, record.policy_version = exchange.policy.name, exchange.policy.version
    if (estimate := exchange.sufficiency) is not None:
        record.features = estimate.features
        record.sufficiency = estimate.tiers
        record.novelty = estimate.novelty
        record.domain = domain_of(estimate.features)
    if (decision := exchange.decision) is not None:
        record.decided_tier = decision.tier
        record.ladder = decision.ladder
        record.propensity = decision.propensity
        record.propensities = decision.propensities
        record.reason = decision.reason.value
        record.explored = decision.explored
        record.confidence = decision.confidence
        record.barred = decision.barred
    if exchange.tier is not None:
        record.final_tier, record.model_served = exchange.tier.index, exchange.tier.model


def _add_bill(record: RequestRecord, exchange: Exchange) -> None:
    bill = exchange.bill()
    usage = bill.usage
    record.prompt_tokens = usage.prompt_tokens
    record.completion_tokens = usage.completion_tokens
    record.cached_tokens = usage.cached_tokens
    record.reasoning_tokens = usage.reasoning_tokens
    record.draft_tokens = usage.draft_tokens
    record.accepted_draft_tokens = usage.accepted_draft_tokens
    record.compute_s = bill.compute_s
    record.cost_usd = bill.cost_usd
    record.measured_cost_usd = bill.measured_cost_usd
    record.queue_s = exchange.waited_s + bill.queue_s


def note(exchange: Exchange) -> dict[str, Any]:
    """The ``suffice`` object at the end of an answer: what the headers say, and the cost that they cannot know yet."""
    decision, tier, policy = exchange.decision, exchange.tier, exchange.policy
    assert decision is not None, "only answers carry a note"
    assert tier is not None
    assert policy is not None
    bill = exchange.bill()
    measured = bill.measured_cost_usd
    return {
        "request_id": exchange.request_id,
        "tier": tier.index,
        "tier_name": tier.name,
        "model": tier.model,
        "reason": exchange.reason,
        "confidence": decision.confidence,
        "cost_usd": format(bill.cost_usd, "f"),
        "measured_cost_usd": None if measured is None else format(measured, "f"),
        "router_version": exchange.router_version,
        "policy": policy.name,
        "policy_version": policy.version,
    }


def headers(exchange: Exchange, *, with_cost: bool) -> list[tuple[bytes, bytes]]:
    """The ``x-suffice-*`` response headers; the cost of a stream is known only at its end."""
    decision, tier, policy = exchange.decision, exchange.tier, exchange.policy
    request_id = exchange.request_id.encode()
    # OpenAI's clients read the second name and show it with every error.
    found: list[tuple[bytes, bytes]] = [(b"x-suffice-request-id", request_id), (b"x-request-id", request_id)]
    if tier is not None:
        found.append((b"x-suffice-tier", b"%d" % tier.index))
        found.append((b"x-suffice-model", _latin(tier.model)))
    if decision is not None and policy is not None:
        found.append((b"x-suffice-reason", exchange.reason.encode()))
        if decision.confidence is not None:
            found.append((b"x-suffice-confidence", b"%.4f" % decision.confidence))
        found.append((b"x-suffice-router-version", _latin(exchange.router_version)))
        found.append((b"x-suffice-policy-version", _latin(f"{policy.name}@{policy.version}")))
    if with_cost:
        found.append((b"x-suffice-cost", format(exchange.bill().cost_usd, "f").encode()))
    if exchange.grant is not None:
        found += exchange.grant.headers
    found.append((b"x-suffice-overhead-ms", b"%.3f" % (exchange.overhead_s * 1e3)))
    return found


@lru_cache(1024)
def _latin(text: str) -> bytes:
    """Names from a configuration file may hold anything; a header may not."""
    return text.encode("ascii", "backslashreplace").replace(b"\n", b" ").replace(b"\r", b" ")
