"""Counting letters of a code, and adding up what they are worth."""

from __future__ import annotations

from random import Random

from backends.builtin.tasks.types import Problem

_LENGTH = (
    "How many letters are in the code {s}?",
    "Count the letters of {s}.",
    "What is the length of the code {s}?",
)
_OCCURS = (
    "How many times does {x} occur in {s}?",
    "Count the letter {x} in the code {s}.",
    "How often is {x} found in {s}?",
)
_WORTH = (
    "In a game, {v}. How many points is {s} worth?",
    "Letters give points: {v}. What is the score of {s}?",
    "With {v}, add up the points of {s}.",
)
_ALPHABET = "ABCDEFGHKLMNPRST"


def _length(rng: Random) -> Problem:
    code = "".join(rng.choices(_ALPHABET, k=rng.randint(3, 7)))
    numbered = " ".join(f"{place}{letter}" for place, letter in enumerate(code, 1))
    return Problem(f"length {code}", rng.choice(_LENGTH).format(s=code), str(len(code)), numbered)


def _occurrences(rng: Random) -> Problem:
    letters = rng.sample(_ALPHABET, 3)
    code = "".join(rng.choices(letters, k=rng.randint(5, 9)))
    wanted = rng.choice(letters)
    seen, marks = 0, []
    for letter in code:
        seen += letter == wanted
        marks.append(f"{letter}{seen}")
    return Problem(f"{wanted} {code}", rng.choice(_OCCURS).format(x=wanted, s=code), str(seen), " ".join(marks))


def _worth(grade: int, rng: Random) -> Problem:
    kinds, length, most = {3: (2, 4, 9), 4: (3, 6, 20), 5: (4, 9, 40)}[grade]
    letters = rng.sample(_ALPHABET, kinds)
    points = dict(zip(letters, rng.sample(range(2, most + 1), kinds), strict=True))
    code = "".join(rng.choices(letters, k=length))
    total, steps = 0, []
    for letter in code:
        total += points[letter]
        steps.append(f"{letter}={points[letter]}:{total}")
    shown = ", ".join(f"{letter}={value}" for letter, value in points.items())
    return Problem(f"{shown} {code}", rng.choice(_WORTH).format(v=shown, s=code), str(total), "\n".join(steps))


def draw(grade: int, rng: Random) -> Problem:
    """The length of a short code at grade 1, the worth of nine letters at grade 5."""
    if grade == 1:
        return _length(rng)
    return _occurrences(rng) if grade == 2 else _worth(grade, rng)
