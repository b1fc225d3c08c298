"""Draws puzzles: who is tallest, who holds the ball, where things stand after swaps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

from backends.builtin.tasks.solution_checks import numbered
from backends.builtin.tasks.types import TaskProblem
from backends.builtin.tasks.wording import NAMES
from backends.builtin.tasks.worked_solution import think

_RELATIONS = (
    ("taller", "shorter", "tallest", "shortest"),
    ("older", "younger", "oldest", "youngest"),
    ("faster", "slower", "fastest", "slowest"),
    ("richer", "poorer", "richest", "poorest"),
)
_PASSES = ("{a} passes it to {b}.", "{a} hands it to {b}.", "{a} gives it to {b}.")
_BALLS = ("{p} has the ball.", "The ball starts with {p}.")
_HOLDER = ("Who has the ball now?", "Who has it in the end?", "Where is the ball: who holds it?")
_SWAPS = ("{a} and {b} swap places.", "{a} changes places with {b}.", "Now {a} and {b} trade places.")
_ROWS = (
    "These friends stand in a row: {l}.",
    "From left to right stand {l}.",
    "The row of chairs is taken by {l}, in this order.",
)
_ORDER = ("Write the row from left to right.", "What is the order now?", "Who stands where? List them from the left.")
NUM_SWAPS = {3: 2, 4: 4, 5: 7}


def _ranking(grade: int, rng: Random) -> TaskProblem:
    """Draw people ordered by facts about neighbours, the facts shuffled from grade 2 on."""
    more, less, most, least = rng.choice(_RELATIONS)
    people = rng.sample(NAMES, 3 if grade == 1 else rng.randint(4, 5))
    facts = []
    for above, below in itertools.pairwise(people):
        flip = grade > 1 and rng.random() < 0.5
        facts.append(f"{below} is {less} than {above}." if flip else f"{above} is {more} than {below}.")
    if grade > 1:
        rng.shuffle(facts)
    top = rng.random() < 0.5
    answer = people[0] if top else people[-1]
    question = " ".join([*facts, f"Who is the {most if top else least}?"])
    reasoning = think(
        question,
        asked=f"who is the {most if top else least} of {', '.join(sorted(people))}.",
        plan=f"put them in a row, the {most} first.",
        steps=[", ".join(people)],
        answer=answer,
        checks=_sure_of_ranking(people, more, less),
    )
    return TaskProblem(f"{'top' if top else 'bottom'} {' '.join(people)}", question, answer, reasoning)


def _sure_of_ranking(people: list[str], more: str, less: str) -> Iterator[str]:
    for above, below in itertools.pairwise(people):
        yield f"{above} is {more} than {below}, as told."
    yield f"Numbered: {numbered(people)}."
    yield f"Nobody is {more} than {people[0]}."
    yield f"Nobody is {less} than {people[-1]}."
    for above, below in itertools.pairwise(people[::-1]):
        yield f"{above} is {less} than {below}."
    for above, below in itertools.combinations(people, 2):
        yield f"{above} comes before {below}."


def _passing(rng: Random) -> TaskProblem:
    """Draw passes told out of order, so that the chain has to be followed name by name."""
    chain = rng.sample(NAMES, rng.randint(4, 6))
    hops = [rng.choice(_PASSES).format(a=a, b=b) for a, b in itertools.pairwise(chain)]
    rng.shuffle(hops)
    told = f"{rng.choice(_BALLS).format(p=chain[0])} At some point: {' '.join(hops)} {rng.choice(_HOLDER)}"
    reasoning = think(
        told,
        asked=f"who has the ball, starting with {chain[0]}.",
        plan="follow the ball from hand to hand.",
        steps=chain,
        answer=chain[-1],
        checks=_sure_of_passes(chain),
    )
    return TaskProblem(f"passes {' '.join(chain)}", told, chain[-1], reasoning)


def _sure_of_passes(chain: list[str]) -> Iterator[str]:
    for giver, taker in itertools.pairwise(chain):
        yield f"{giver} gives it to {taker}."
    yield f"{chain[-1]} gives it to nobody."
    yield f"{len(chain) - 1} passes and {len(chain)} people: {numbered(chain)}."
    for taker, giver in itertools.pairwise(chain[::-1]):
        yield f"{taker} has it from {giver}."


def _row(grade: int, rng: Random) -> TaskProblem:
    row = rng.sample(NAMES, 4 if grade < 5 else 5)
    said = [rng.choice(_ROWS).format(l=", ".join(row))]
    key, steps, last = [", ".join(row)], [], (-1, -1)
    for _ in range(NUM_SWAPS[grade]):
        i, j = sorted(rng.sample(range(len(row)), 2))
        while (i, j) == last:
            i, j = sorted(rng.sample(range(len(row)), 2))
        last = (i, j)
        a, b = (row[i], row[j]) if rng.random() < 0.5 else (row[j], row[i])
        said.append(rng.choice(_SWAPS).format(a=a, b=b))
        row[i], row[j] = row[j], row[i]
        key.append(f"{i}{j}")
        steps.append(", ".join(row))
    said.append(rng.choice(_ORDER))
    swaps = NUM_SWAPS[grade]
    reasoning = think(
        " ".join(key),
        asked=f"the row after {swaps} swaps.",
        plan="write the row after each.",
        steps=[key[0], *steps] if grade < 5 else steps,
        answer=", ".join(row),
        checks=_sure_of_row([key[0], *steps]),
    )
    return TaskProblem(" ".join(key), " ".join(said), ", ".join(row), reasoning)


def _sure_of_row(rows: list[str]) -> Iterator[str]:
    names = rows[-1].split(", ")
    yield f"{len(names)} names, each once."
    for before, after in itertools.pairwise(rows):
        moved = [(a, b) for a, b in zip(before.split(", "), after.split(", "), strict=True) if a != b]
        (left, right) = moved[0]
        yield f"{left} and {right} swapped: {after}."
    yield f"Numbered: {numbered(names)}."


def draw(grade: int, rng: Random) -> TaskProblem:
    """Draw three people ranked at grade 1; a row of five after seven swaps at grade 5."""
    if grade <= 2:
        return _ranking(grade, rng)
    return _passing(rng) if grade == 3 and rng.random() < 0.5 else _row(grade, rng)
