"""Draws codes whose letters are to be counted, or added up by what they are worth."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from backends.builtin.tasks.solution_checks import numbered, spelled
from backends.builtin.tasks.types import TaskProblem
from backends.builtin.tasks.worked_solution import think

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


def _length(rng: Random) -> TaskProblem:
    code = "".join(rng.choices(_ALPHABET, k=rng.randint(3, 7)))
    return TaskProblem(f"length {code}", rng.choice(_LENGTH).format(s=code), str(len(code)), work_length(code))


def work_length(code: str) -> str:
    """Return the worked solution of how many letters a code has."""
    return think(
        code,
        asked=f"how many letters {code} has.",
        plan="number the letters.",
        steps=[" ".join(f"{place}{letter}" for place, letter in enumerate(code, 1))],
        answer=str(len(code)),
        checks=_sure_of_length(code),
    )


def _sure_of_length(code: str) -> Iterator[str]:
    half = len(code) // 2
    front, back = code[:half], code[half:]
    yield f"In two parts: {front} has {len(front)}, {back} has {len(back)}, {len(front)}+{len(back)}={len(code)}."
    yield f"Backwards: {numbered(code[::-1])}."
    yield f"Spelled: {spelled(code)}."
    yield f"Number {len(code)} is {code[-1]}, the last letter."
    yield f"Without {code[0]} there are {len(code) - 1}: {spelled(code[1:])}."
    yield f"With one more letter there would be {len(code) + 1}."
    yield f"Without {code[0]} and {code[-1]} there are {len(code) - 2}, and {len(code) - 2}+2={len(code)}."
    yield f"In pairs: {', '.join(code[i : i + 2] for i in range(0, len(code), 2))}."


def _occurrences(rng: Random) -> TaskProblem:
    letters = rng.sample(_ALPHABET, 3)
    code = "".join(rng.choices(letters, k=rng.randint(5, 9)))
    wanted = rng.choice(letters)
    seen, marks = 0, []
    for letter in code:
        seen += letter == wanted
        marks.append(f"{letter}{seen}")
    reasoning = think(
        f"{wanted} {code}",
        asked=f"how many times {wanted} is in {code}.",
        plan="go through the letters and count.",
        steps=[" ".join(marks)],
        answer=str(seen),
        checks=_sure_of_occurrences(code, wanted),
    )
    return TaskProblem(f"{wanted} {code}", rng.choice(_OCCURS).format(x=wanted, s=code), str(seen), reasoning)


def _sure_of_occurrences(code: str, wanted: str) -> Iterator[str]:
    rest, seen = code.replace(wanted, ""), code.count(wanted)
    yield f"Without {wanted} {len(rest)} of {len(code)} letters are left: {len(code)}-{len(rest)}={seen}."
    for letter in sorted(set(rest)):
        yield f"{letter} is there {code.count(letter)} times."
    yield f"Numbered: {numbered(code)}."
    yield f"Places of {wanted}: {', '.join(str(place) for place, x in enumerate(code, 1) if x == wanted)}."
    yield f"Sorted: {spelled(''.join(sorted(code)))}."


def _worth(grade: int, rng: Random) -> TaskProblem:
    kinds, length, most = {3: (2, 4, 9), 4: (3, 6, 20), 5: (4, 9, 40)}[grade]
    letters = rng.sample(_ALPHABET, kinds)
    points = dict(zip(letters, rng.sample(range(2, most + 1), kinds), strict=True))
    code = "".join(rng.choices(letters, k=length))
    total, steps = 0, []
    for letter in code:
        total += points[letter]
        steps.append(f"{letter}={points[letter]}:{total}")
    shown = ", ".join(f"{letter}={value}" for letter, value in points.items())
    reasoning = think(
        f"{shown} {code}",
        asked=f"the worth of {code} with {shown}.",
        plan="add letter by letter.",
        steps=steps,
        answer=str(total),
        checks=_sure_of_worth(code, points),
    )
    return TaskProblem(f"{shown} {code}", rng.choice(_WORTH).format(v=shown, s=code), str(total), reasoning)


def _sure_of_worth(code: str, points: dict[str, int]) -> Iterator[str]:
    """Yield the worth by kinds of letters instead of by places."""
    total, products = 0, []
    for letter, value in points.items():
        if count := code.count(letter):
            products.append(f"{count}*{value}={count * value}")
            total += count * value
    yield f"By kind: {', '.join(products)}, in all {total}."
    yield f"{len(code)} letters: {numbered(code)}."
    yield f"Backwards: {', '.join(_running_back(code, points))}."
    for letter, value in points.items():
        yield f"{letter} is there {code.count(letter)} times, at {value} each."


def _running_back(code: str, points: dict[str, int]) -> Iterator[str]:
    total = 0
    for letter in reversed(code):
        total += points[letter]
        yield f"{letter}{total}"


def draw(grade: int, rng: Random) -> TaskProblem:
    """Draw the length of a short code at grade 1, the worth of nine letters at grade 5."""
    if grade == 1:
        return _length(rng)
    return _occurrences(rng) if grade == 2 else _worth(grade, rng)
