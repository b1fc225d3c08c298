"""Decides who goes on with an answer that broke off after its first token.

What it does
    Orders the tiers that may continue it: those that may answer in its tier's place, as for any failure, and the tier
    itself once more; first where it has several servers, of which one has failed, else last.

Why
    What was sent cannot be taken back, and a caller that repeats a request pays for all of it again. Another model
    reads what was sent as if it had written it, and goes on.

Known problems
    Two models wrote the answer, so its quality is neither's: it is not checked, and nothing is learned of it.

Options
    See :class:`OnBreak`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

MAX_RESUMPTIONS = 2
"""How often one answer is gone on with."""


class OnBreak(StrEnum):
    """Says what becomes of an answer whose tier fails after its first token.

    ``resume``: another tier goes on from what was sent, where it can. ``error``: the answer ends with the error.
    """

    RESUME = "resume"
    ERROR = "error"


def resumption_order(
    broken: int, permitted: Sequence[int], asked: Sequence[int], *, is_replicated: bool
) -> tuple[int, ...]:
    """Return the tiers that may go on, in the order in which they are asked.

    Parameters
    ----------
    broken : the tier whose answer broke off
    permitted : the tiers that may answer now, in order; the broken one only if it may
    asked : the tiers of all tries so far, the broken one among them; nobody else is asked twice
    is_replicated : the broken tier's model has several servers
    """
    others = tuple([tier for tier in dict.fromkeys(permitted) if tier not in asked])
    own = (broken,) if broken in permitted and asked.count(broken) < 2 else ()
    return own + others if is_replicated else others + own
