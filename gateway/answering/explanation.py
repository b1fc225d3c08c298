"""Tells callers why a request went where it went: headers, the ``suffice`` object, ``GET /v1/requests/{id}``."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from gateway.answering.phases import AdmittedRequest, Answer
from gateway.edge.error_format import error_format
from gateway.store.records import RequestRecord
from policies.ladder import Ladder
from policies.pricing import from_nano_usd, price_usd
from policies.types import Tier


def answer_note(answer: Answer, tier: Tier) -> dict[str, Any]:
    """Return the ``suffice`` object at the end of an answer: what the headers say, and the cost at its end."""
    routed = answer.routed
    basis = routed.basis
    bill = answer.bill()
    measured = bill.measured_cost_usd
    return {
        "request_id": routed.admitted.request_id,
        "tier": tier.index,
        "tier_name": tier.name,
        "model": tier.model,
        "reason": answer.reason,
        "confidence": routed.decision.confidence,
        "cost_usd": format(bill.cost_usd, "f"),
        "measured_cost_usd": None if measured is None else format(measured, "f"),
        "router_version": basis.router_version,
        "policy": basis.policy.name,
        "policy_version": basis.policy.version,
    }


def answer_headers(admitted: AdmittedRequest, answer: Answer | None, *, with_cost: bool) -> list[tuple[bytes, bytes]]:
    """Return the ``x-suffice-*`` response headers; the cost of a stream is known only at its end."""
    found = error_format(admitted.endpoint).id_headers(admitted.request_id)
    overhead_s = max(0.0, admitted.clock() - admitted.accepted_s - admitted.waited_s)
    if answer is not None:
        basis, confidence, overhead_s = answer.routed.basis, answer.routed.decision.confidence, answer.overhead_s
        if (tier := answer.tier) is not None:
            found += ((b"x-suffice-tier", b"%d" % tier.index), (b"x-suffice-model", _latin(tier.model)))
        found.append((b"x-suffice-reason", answer.reason.encode()))
        if confidence is not None:
            found.append((b"x-suffice-confidence", b"%.4f" % confidence))
        found.append((b"x-suffice-router-version", _latin(basis.router_version)))
        found.append((b"x-suffice-policy-version", _latin(f"{basis.policy.name}@{basis.policy.version}")))
        if with_cost:
            found.append((b"x-suffice-cost", format(answer.bill().cost_usd, "f").encode()))
    if (conversation := admitted.conversation.keyed_digest) is not None:
        found.append((b"x-suffice-affinity", conversation[:16].encode()))
    if admitted.reservation is not None:
        found += admitted.reservation.headers
    found.append((b"x-suffice-overhead-ms", b"%.3f" % (overhead_s * 1e3)))
    return found


@lru_cache(1024)
def _latin(text: str) -> bytes:
    """Names from a configuration file may hold anything; a header may not."""
    return text.encode("ascii", "backslashreplace").replace(b"\n", b" ").replace(b"\r", b" ")


def explain(record: RequestRecord, ladder: Ladder) -> dict[str, Any]:
    """A row as its caller may see it. Costs of other tiers assume the same tokens, also of those that were barred."""
    return {
        "id": record.request_id,
        "object": "suffice.request",
        "created_at": record.created_at.isoformat(),
        "endpoint": record.endpoint,
        "model_requested": record.model_requested,
        "model_served": record.model_served,
        "stream": record.stream,
        "session_id": record.session_id,
        "conversation": {
            "id": record.conversation,
            "turn": record.turn,
            "step": record.step,
            "locked": record.turn_id is not None,
            "turn_id": record.turn_id,
        },
        "decision": _decision(record),
        "tiers": [_tier(record, tier) for tier in ladder],
        "attempts": [
            {
                "tier": each.tier,
                "model": each.model,
                "duration_s": each.duration_s,
                "error": each.error,
                "confidence": each.confidence,
                "cost_usd": None if each.cost_nano_usd is None else format(from_nano_usd(each.cost_nano_usd), "f"),
            }
            for each in record.attempts
        ],
        "usage": _usage(record),
        "cost_usd": format(record.cost_usd, "f"),
        "measured_cost_usd": None if record.measured_cost_usd is None else format(record.measured_cost_usd, "f"),
        "compute_s": record.compute_s,
        "timings": {
            "queue_s": record.queue_s,
            "ttft_s": record.ttft_s,
            "itl_s": record.itl_s,
            "total_s": record.total_s,
            "overhead_s": record.overhead_s,
        },
        "finish_reason": record.finish_reason.value,
        "status": record.status_code,
        "error": record.error_code,
    }


def _decision(record: RequestRecord) -> dict[str, Any]:
    return {
        "tier": record.decided_tier,
        "final_tier": record.final_tier,
        "reason": record.reason,
        "explored": record.explored,
        "propensity": record.propensity,
        "confidence": record.confidence,
        "novelty": record.novelty,
        "fallback_order": list(record.ladder),
        "overrides": dict(record.overrides),
        "policy": {"name": record.policy_name, "version": record.policy_version},
        "router_version": record.router_version,
        "config_hash": record.config_hash,
        "features": dict(record.features),
    }


def _tier(record: RequestRecord, tier: Tier) -> dict[str, Any]:
    estimate = next((each for each in record.sufficiency if each.tier == tier.index), None)
    cost_usd = price_usd(tier, record.prompt_tokens, record.completion_tokens, record.cached_tokens)
    cost_usd += tier.price_per_request_usd * (record.num_choices - 1)
    return {
        "tier": tier.index,
        "name": tier.name,
        "model": tier.model,
        "p_right": None if estimate is None else estimate.p_right,
        "p_as_good": None if estimate is None else estimate.p_as_good,
        "propensity": record.propensities.get(tier.index, 0.0),
        "barred_by": record.barred.get(tier.index),
        "cost_usd": format(cost_usd, "f"),
        "answered": tier.index == record.final_tier,
    }


def _usage(record: RequestRecord) -> dict[str, int]:
    return {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        "reasoning_tokens": record.reasoning_tokens,
        "draft_tokens": record.draft_tokens,
        "accepted_draft_tokens": record.accepted_draft_tokens,
    }
