"""What a turn of many steps is worth to an estimate: one unit, however many of its answers were checked.

A turn has one random draw, that of its decision. Its steps share it, so what is found of them is not found
independently. The loss of a turn is the mean over its steps. Steps that are faulty for certain are known without the
draw and the others only with it, so that both are brought back to the turn by their own probability
(Horvitz and Thompson 1952); the sum is one bounded number a turn.
"""

from __future__ import annotations

from collections.abc import Sequence


def turn_outcome(
    drawn: Sequence[float], known: Sequence[float], num_steps: int, inclusion: float
) -> tuple[float, float]:
    """Return a turn's loss, 0..1, and the probability to weigh it with.

    Parameters
    ----------
    drawn : losses of the steps that were checked since the turn was drawn
    known : losses of the steps that are known without a draw
    num_steps : of the turn that could be checked, at least as many as those
    inclusion : probability with which the turn was drawn

    Steps of a drawn turn whose checks failed or are to come are taken to be like those that are done.
    """
    num_steps = max(num_steps, len(drawn) + len(known))
    if not drawn:
        return sum(known) / num_steps, 1.0
    by_draw = sum(drawn) / len(drawn) * (num_steps - len(known))
    return (by_draw + inclusion * sum(known)) / num_steps, inclusion
