"""Draws stories in which someone's heap of things grows and shrinks."""

from __future__ import annotations

from random import Random

from backends.builtin.tasks.solution_checks import check_sums
from backends.builtin.tasks.types import TaskProblem
from backends.builtin.tasks.wording import NAMES, THINGS
from backends.builtin.tasks.worked_solution import think

NUM_STEPS = {1: 1, 2: 2, 3: 3, 4: 5, 5: 7}
_MOST = 400

_GAIN = ("buys {n} more", "gets {n} more from {o}", "finds {n} more", "wins {n}", "is given {n} by {o}")
_LOSS = ("gives {n} to {o}", "loses {n}", "sells {n}", "uses {n}", "throws away {n}")
_BOXES = ("buys {k} boxes of {m}", "gets {k} bags with {m} in each", "finds {k} packs of {m}")
_DOUBLE = ("doubles the number", "ends up with twice as many")
_TRIPLE = ("triples the number", "ends up with three times as many")
_HALVE = ("gives half of them to {o}", "loses half of them", "sells half of them")
_SHARE = ("shares them equally among {k} friends, who each put theirs in a box, and keeps just one box",)

_STARTS = ("{p} has {n} {t}.", "{p} starts with {n} {t}.", "At first, {p} owns {n} {t}.")
_ASKS = (
    "How many {t} does {p} have now?",
    "How many {t} are left in the end?",
    "What is the number of {t} {p} has at the end?",
    "How many {t} does that make?",
)
_ASIDES = ("{o} has {n} {t}.", "{o} likes {t} very much.", "It is a sunny day.", "A bag costs {n} dollars.")
_LINKS = ("Then {p} {c}.", "Next, {p} {c}.", "Later {p} {c}.", "After that, {p} {c}.", "{p} {c}.")


# Its clause, the new count, its reasoning, its key and the numbers in the clause.
HeapEvent = tuple[str, int, str, str, dict[str, int]]


def _gain(have: int, n: int, rng: Random) -> HeapEvent:
    return rng.choice(_GAIN), have + n, f"{have}+{n}={have + n}", f"+{n}", {"n": n}


def _loss(have: int, n: int, rng: Random) -> HeapEvent:
    return rng.choice(_LOSS), have - n, f"{have}-{n}={have - n}", f"-{n}", {"n": n}


def _event(have: int, rng: Random) -> HeapEvent:
    """Draw one event that the heap allows."""
    roll = rng.random()
    if roll < 0.1 and have % 2 == 0 and have > 20:
        return rng.choice(_HALVE), have // 2, f"{have}/2={have // 2}", "/2", {}
    if roll < 0.2 and have * 2 <= _MOST:
        return rng.choice(_DOUBLE), have * 2, f"{have}*2={have * 2}", "*2", {}
    if roll < 0.26 and have * 3 <= _MOST:
        return rng.choice(_TRIPLE), have * 3, f"{have}*3={have * 3}", "*3", {}
    if roll < 0.34 and have > 20:
        for k in (3, 4, 5):
            if have % k == 0:
                return _SHARE[0], have // k, f"{have}/{k}={have // k}", f"/{k}", {"k": k}
    if roll < 0.62 and have > 8:
        return _loss(have, rng.randint(2, min(have - 2, 95)), rng)
    return _gain(have, rng.randint(2, 85), rng)


def _boxes(have: int, rng: Random) -> HeapEvent:
    k, m = rng.randint(2, 9), rng.randint(3, 12)
    total = have + k * m
    return rng.choice(_BOXES), total, f"{k}*{m}={k * m}\n{have}+{k * m}={total}", f"+{k}*{m}", {"k": k, "m": m}


def _first_event(have: int, rng: Random) -> HeapEvent:
    """Draw an event of grade 1, which stays with sums and differences."""
    if rng.random() < 0.5:
        return _loss(have, rng.randint(2, have - 1), rng)
    return _gain(have, rng.randint(2, 40), rng)


def draw(grade: int, rng: Random) -> TaskProblem:
    """Draw a heap and one event (grade 1) to seven events (grade 5), each depending on the one before."""
    person, other = rng.sample(NAMES, 2)
    thing, other_thing = rng.sample(THINGS, 2)
    have = rng.randint(5, 59)
    key, steps = [str(have)], []
    said = [rng.choice(_STARTS).format(p=person, n=have, t=thing)]
    left = NUM_STEPS[grade]
    while left:
        if grade == 1:
            event = _first_event(have, rng)
        elif left > 1 and have < _MOST and rng.random() < 0.2:
            event, left = _boxes(have, rng), left - 1
        else:
            event = _event(have, rng)
        clause, have, step, code, numbers = event
        clause = clause.format(o=other, **numbers)
        said.append(rng.choice(_LINKS).format(p=person, c=clause))
        steps.append(step)
        key.append(code)
        left -= 1
    if rng.random() < 0.2:
        said.insert(1, rng.choice(_ASIDES).format(o=other, n=rng.randint(2, 60), t=other_thing))
    said.append(rng.choice(_ASKS).format(p=person, t=thing))
    return TaskProblem(" ".join(key), " ".join(said), str(have), work(key, thing, steps, have))


def work(key: list[str], thing: str, steps: list[str], left: int) -> str:
    """Return the worked solution: what happens to the heap, event by event."""
    return think(
        " ".join(key),
        asked=f"{key[0]} {thing}, then {', '.join(key[1:])}. How many?",
        plan="one event after the other.",
        steps=steps,
        answer=str(left),
        checks=check_sums(steps),
    )
