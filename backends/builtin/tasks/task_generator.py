"""Draws tasks: a seed, a count and a mix of grades give the same tasks every time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from random import Random
from types import MappingProxyType

from backends.builtin.tasks.families import (
    arithmetic,
    comparison,
    counting,
    dates,
    formats,
    logic,
    lookups,
    prices,
    sequences,
    sorting,
    strings,
    units,
    word_problems,
)
from backends.builtin.tasks.types import GRADES, Draw, Split, Task, TaskProblem
from backends.builtin.tasks.wording import dress

FAMILIES: Mapping[str, Draw] = MappingProxyType(
    {
        "arithmetic": arithmetic.draw,
        "word_problems": word_problems.draw,
        "comparison": comparison.draw,
        "sorting": sorting.draw,
        "strings": strings.draw,
        "dates": dates.draw,
        "units": units.draw,
        "lookups": lookups.draw,
        "prices": prices.draw,
        "sequences": sequences.draw,
        "logic": logic.draw,
        "formats": formats.draw,
        "counting": counting.draw,
    }
)

# Share of each grade. Easy-heavy, as chat traffic is reported to be: most requests need little.
NATURAL_MIX: Mapping[int, float] = MappingProxyType({1: 0.38, 2: 0.24, 3: 0.15, 4: 0.14, 5: 0.09})
UNIFORM_MIX: Mapping[int, float] = MappingProxyType(dict.fromkeys(GRADES, 0.2))

# One problem in eight belongs to the test split, by its key's hash: the two can never meet.
_TEST_MODULUS = 8


def _digest(family: str, problem: TaskProblem) -> int:
    return int.from_bytes(blake2b(f"{family}:{problem.key}".encode(), digest_size=8).digest(), "big")


def split_of(family: str, key: str) -> Split:
    """Return the split a problem belongs to, whatever its wording, seed or grade."""
    problem = TaskProblem(key=key, question="", answer="", reasoning="")
    return "test" if _digest(family, problem) % _TEST_MODULUS == 0 else "train"


def draw_task(family: str, grade: int, rng: Random, split: Split = "train") -> Task:
    """Draw one task of one family and grade; problems of the other split are thrown back."""
    while True:
        problem = FAMILIES[family](grade, rng)
        digest = _digest(family, problem)
        if (digest % _TEST_MODULUS == 0) == (split == "test"):
            break
    prompt = dress(problem.question, rng)
    return Task(f"{family}-{grade}-{digest:016x}", family, grade, prompt, problem.answer, problem.reasoning)


def generate(
    seed: int,
    count: int,
    *,
    split: Split = "train",
    mix: Mapping[int, float] = NATURAL_MIX,
    families: Sequence[str] | None = None,
) -> Iterator[Task]:
    """Draw ``count`` tasks.

    Parameters
    ----------
    seed : the same seed, split, mix and families give the same tasks
    count : how many
    split : problems of "train" and "test" are disjoint whatever the seeds
    mix : weight of each grade, 1 to 5
    families : names to draw from, all when None; each is as likely

    Raises
    ------
    ValueError
        A family or grade that does not exist, a split that is neither, or a mix without weight.
    """
    names = tuple(FAMILIES) if families is None else tuple(families)
    if unknown := sorted(set(names) - set(FAMILIES)) or (not names and ["(none given)"]):
        raise ValueError(f"Unknown task families {unknown}; expected some of {sorted(FAMILIES)}.")
    if split not in ("train", "test"):
        raise ValueError(f"Unknown split {split!r}; expected 'train' or 'test'.")
    if set(mix) - set(GRADES) or min(mix.values(), default=-1.0) < 0 or not sum(mix.values()):
        raise ValueError(f"Bad mix {dict(mix)!r}; expected non-negative weights of the grades {GRADES}, not all 0.")
    return _draw_many(Random(f"{seed}/{split}"), count, split, mix, names)


def _draw_many(
    rng: Random, count: int, split: Split, mix: Mapping[int, float], names: tuple[str, ...]
) -> Iterator[Task]:
    grades, weights = tuple(mix), tuple(mix.values())
    for _ in range(count):
        grade = rng.choices(grades, weights)[0]
        yield draw_task(rng.choice(names), grade, rng, split)
