"""What a turn's decision binds: inside a loop of tool calls the tier that began the turn goes on."""

from __future__ import annotations

from msgspec import Struct

from policies.sampling import DrawnCheck


class TurnLock(Struct, frozen=True):
    """Holds the decision that a step of a tool loop stands under.

    Parameters
    ----------
    tier : whose model made the calls that were answered
    turn_id : the request that the tier was decided for; it is the unit of sampling and of every estimate
    confidence : P(as good as the top tier) at that decision
    probability : with which the turn was to be drawn for checks; None where it could not be
    drawn : the check that was drawn for the turn; its steps share it
    """

    tier: int
    turn_id: str
    confidence: float | None = None
    probability: float | None = None
    drawn: DrawnCheck | None = None
