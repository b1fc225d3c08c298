"""Sums what one request used and cost, once it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal

from backends.protocol import Finished, Usage
from policies.pricing import measured_cost_usd, price_usd
from policies.types import Tier

_NANO_USD = Decimal("0.000000001")


@dataclass(slots=True)
class Bill:
    """Sums over the choices of a request.

    Attributes
    ----------
    usage : as billed, every choice's prompt counted
    shown_usage : as OpenAI shows it, a prompt counted once however many answers it got
    cost_usd : by the price table; 0 where no tier began
    compute_s : device seconds; None when a part of them is not known
    measured_cost_usd : by the device seconds
    queue_s : longest wait inside the engine
    """

    usage: Usage = field(default_factory=Usage)
    shown_usage: Usage = field(default_factory=Usage)
    cost_usd: Decimal = Decimal(0)
    compute_s: float | None = None
    measured_cost_usd: Decimal | None = None
    queue_s: float = 0.0


def make_single_bill(tier: Tier, ending: Finished) -> Bill:
    """Return what a request's only choice used at the tier that answered it."""
    usage = ending.usage
    compute_s = ending.compute_s if ending.compute_measured else None
    return Bill(
        usage,
        usage,
        _whole_nano(price_usd(tier, usage.prompt_tokens, usage.completion_tokens)),
        compute_s,
        None if compute_s is None else _whole_nano(measured_cost_usd(tier, compute_s)),
        ending.timings.queue_s,
    )


def make_bill(tier: Tier, endings: Sequence[Finished], answers_per_prompt: int) -> Bill:
    """Sum what the choices of a request used at the tier that answered it.

    Parameters
    ----------
    tier : with its prices
    endings : one per choice, those of the same prompt side by side
    answers_per_prompt : the request's ``n``
    """
    compute_s = sum(each.compute_s for each in endings) if all(each.compute_measured for each in endings) else None
    usage = _sum([each.usage for each in endings])
    prices = [price_usd(tier, each.usage.prompt_tokens, each.usage.completion_tokens) for each in endings]
    return Bill(
        usage=usage,
        shown_usage=_shown(usage, [each.usage for each in endings[::answers_per_prompt]]),
        cost_usd=_whole_nano(sum(prices, Decimal(0))),
        compute_s=compute_s,
        measured_cost_usd=None if compute_s is None else _whole_nano(measured_cost_usd(tier, compute_s)),
        queue_s=max([each.timings.queue_s for each in endings]),
    )


def add_earlier(bill: Bill, earlier: Sequence[Bill]) -> Bill:
    """The same answer, with what was spent on answers that were not sent added to its costs.

    Token counts stay the sent answer's own: they are what its caller reads them for.
    """
    if not earlier:
        return bill
    every = [*earlier, bill]
    known = all(each.compute_s is not None for each in every)
    return replace(
        bill,
        cost_usd=_whole_nano(sum((each.cost_usd for each in every), Decimal(0))),
        compute_s=sum(each.compute_s or 0.0 for each in every) if known else None,
        measured_cost_usd=_whole_nano(sum((each.measured_cost_usd or Decimal(0) for each in every), Decimal(0)))
        if known
        else None,
        queue_s=sum(each.queue_s for each in every),
    )


def _whole_nano(amount_usd: Decimal) -> Decimal:
    """The amount as the log keeps it, so that what the caller is told and what is stored are the same number."""
    return amount_usd.quantize(_NANO_USD).normalize()


def _sum(usages: Sequence[Usage]) -> Usage:
    return Usage(
        prompt_tokens=sum(each.prompt_tokens for each in usages),
        completion_tokens=sum(each.completion_tokens for each in usages),
        cached_tokens=sum(each.cached_tokens for each in usages),
        reasoning_tokens=sum(each.reasoning_tokens for each in usages),
        draft_tokens=sum(each.draft_tokens for each in usages),
        accepted_draft_tokens=sum(each.accepted_draft_tokens for each in usages),
        accepted_prediction_tokens=sum(each.accepted_prediction_tokens for each in usages),
        rejected_prediction_tokens=sum(each.rejected_prediction_tokens for each in usages),
    )


def _shown(total: Usage, once: Sequence[Usage]) -> Usage:
    return replace(
        total,
        prompt_tokens=sum(each.prompt_tokens for each in once),
        cached_tokens=sum(each.cached_tokens for each in once),
    )
