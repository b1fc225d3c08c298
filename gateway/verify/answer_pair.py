"""Types of grading: the pair that graders are given, and the grade they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from backends.protocol import Backend, GenerateRequest, ToolCall
from gateway.store.verifications import Spent
from policies.types import Tier

Spend = Callable[[Spent], None]
"""Told what a pass through a model cost, as soon as it is over."""


@dataclass(frozen=True, slots=True)
class TierParty:
    """A tier and the backend behind it."""

    tier: Tier
    backend: Backend


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """A cheap answer and what it is compared with.

    Parameters
    ----------
    request : what both were asked, at background priority
    cheap_answer, cheap : the answer in question and whose it is
    top_answer, top : the dearer tier, and its answer; None where it was not asked to write one
    cheap_calls, top_calls : the calls of tools beside the texts
    """

    request: GenerateRequest
    cheap_answer: str
    cheap: TierParty
    top: TierParty
    top_answer: str | None = None
    cheap_calls: tuple[ToolCall, ...] = ()
    top_calls: tuple[ToolCall, ...] = ()

    @property
    def has_calls(self) -> bool:
        """Return whether either answer calls a tool; the texts beside calls say little then."""
        return bool(self.cheap_calls or self.top_calls)


@dataclass(frozen=True, slots=True)
class Grade:
    """One grader's opinion.

    Parameters
    ----------
    score : in the grader's own scale, higher is better
    details : further numbers that a combination may learn from
    """

    score: float
    details: Mapping[str, float] = field(default_factory=dict)


class Grader(Protocol):
    """Looks at a pair in one way."""

    @property
    def name(self) -> str: ...

    @property
    def needs_top_answer(self) -> bool:
        """Return whether it compares two answers; otherwise the cheap one is enough."""

    @property
    def reads_calls(self) -> bool:
        """Return whether it looks at calls of tools; the others look at texts, and at no pair that has calls."""

    async def grade(self, pair: AnswerPair, spend: Spend) -> Grade | None:
        """Return an opinion, or None where this grader cannot have one about this pair.

        Raises
        ------
        BackendError
            A model it asks does not answer now.
        """
