"""Draws uniform numbers that depend on (seed, position, stream) and on nothing else.

A draw keyed this way is the same whatever else is in the batch, in however many chunks the prompt was computed and
however often the request was preempted, which a generator with state could not give.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """Mix bits as SplitMix64 does (Steele et al. 2014, "Fast splittable pseudorandom number generators", fig. 18)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """Return a float64 in [0, 1), one of 2**52 values.

    Parameters
    ----------
    seed : any integer, taken modulo 2**64
    position : index in the sequence of the token to be drawn
    stream : tells apart several numbers for the same token
    """
    x = _mix((seed + _GOLDEN) & _MASK)
    x = _mix((x + (position + 1) * _GOLDEN) & _MASK)
    x = _mix((x + (stream + 1) * _GOLDEN) & _MASK)
    # 52 bits: every value is exact in float64, so that a GPU's draw is the same to the bit.
    return (x >> 12) * 2.0**-52
