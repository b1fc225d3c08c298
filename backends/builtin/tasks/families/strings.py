"""Draws edits of short codes of capital letters, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from backends.builtin.tasks.solution_checks import numbered, spelled
from backends.builtin.tasks.types import TaskProblem
from backends.builtin.tasks.worked_solution import think

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NUM_EDITS = {1: 1, 2: 2, 3: 3, 4: 5, 5: 7}

# The short name used in the key, the effect, and two ways to say it.
Edit = tuple[str, Callable[[str], str], tuple[str, ...]]

_EDITS: tuple[Edit, ...] = (
    ("reverse", lambda s: s[::-1], ("reverse it", "write it backwards")),
    ("rotate", lambda s: s[1:] + s[0], ("move the first letter to the end", "put the first letter last")),
    ("unrotate", lambda s: s[-1] + s[:-1], ("move the last letter to the front", "put the last letter first")),
    ("swap", lambda s: s[-1] + s[1:-1] + s[0], ("swap the first and the last letter", "exchange the two end letters")),
    ("swap12", lambda s: s[1] + s[0] + s[2:], ("swap the first two letters", "exchange the first two letters")),
    ("swapend", lambda s: s[:-2] + s[-1] + s[-2], ("swap the last two letters", "exchange the last two letters")),
)
_SHRINKS: tuple[Edit, ...] = (
    ("behead", lambda s: s[1:], ("remove the first letter", "drop the first letter")),
    ("curtail", lambda s: s[:-1], ("remove the last letter", "drop the last letter")),
)
_GROWS: tuple[Edit, ...] = (
    ("double", lambda s: s + s[-1], ("repeat the last letter", "write the last letter once more")),
    ("stutter", lambda s: s[0] + s, ("repeat the first letter", "write the first letter once more at the front")),
)
_ONE = ("Take the code {s} and {e}.", "Given the code {s}, {e}.", "Start from {s} and {e}. What do you get?")
_MANY = (
    "Take the code {s}. {e}. What is the result?",
    "Start from the code {s}. {e}. What do you get?",
    "The code is {s}. {e}. Write the final code.",
)
_LINKS = ("Then {e}", "Next, {e}", "After that, {e}", "Now {e}")


def _replacement(code: str, rng: Random) -> Edit:
    old, new = rng.choice(code), rng.choice(LETTERS)
    said = (f"replace every {old} with {new}", f"change each {old} to {new}")
    return f"{old}>{new}", lambda s: s.replace(old, new), said


def _edit(code: str, rng: Random) -> Edit:
    roll = rng.random()
    if roll < 0.12 and len(code) > 4:
        return rng.choice(_SHRINKS)
    if roll < 0.24 and len(code) < 7:
        return rng.choice(_GROWS)
    if roll < 0.4:
        return _replacement(code, rng)
    return rng.choice(_EDITS)


def draw(grade: int, rng: Random) -> TaskProblem:
    """Draw one edit at grade 1, seven at grade 5; the reasoning writes the code after each."""
    code = "".join(rng.choices(LETTERS, k=rng.randint(4, 5) if grade == 1 else rng.randint(5, 6)))
    key, said, steps, now = [code], [], [], code
    for _ in range(NUM_EDITS[grade]):
        name, effect, phrases = _edit(now, rng)
        now = effect(now)
        key.append(name)
        said.append(rng.choice(phrases))
        steps.append(now)
    if grade == 1:
        question = rng.choice(_ONE).format(s=code, e=said[0])
    else:
        first, *rest = said
        told = ". ".join([first[0].upper() + first[1:], *(rng.choice(_LINKS).format(e=e) for e in rest)])
        question = rng.choice(_MANY).format(s=code, e=told)
    return TaskProblem(" ".join(key), question, now, work(" ".join(key), code, said, steps))


def work(key: str, code: str, said: list[str], steps: list[str]) -> str:
    """Return the worked solution: the code after each edit, then the edits once more with their results."""
    return think(
        key,
        asked=f"{code}, {len(said)} edit{'s' if len(said) > 1 else ''}.",
        plan="write the code after each edit.",
        steps=steps,
        answer=steps[-1],
        checks=_sure(code, said, steps),
    )


def _sure(code: str, said: list[str], steps: list[str]) -> Iterator[str]:
    yield f"The result has {len(steps[-1])} letters: {spelled(steps[-1])}."
    for before, edit, after in zip([code, *steps], said, steps, strict=False):
        yield f"From {before}, {edit}: {after}."
    yield f"The code was {numbered(code)}."
    yield f"It became {numbered(steps[-1])}."
    yield f"Sorted, the letters were {spelled(''.join(sorted(code)))}."
    yield f"Now they are {spelled(''.join(sorted(steps[-1])))}."
    yield f"It began with {code[0]} and ended with {code[-1]}."
    yield f"Now it begins with {steps[-1][0]} and ends with {steps[-1][-1]}."
