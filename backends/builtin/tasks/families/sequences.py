"""Draws number sequences to be continued, and rules to be applied again and again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

from backends.builtin.tasks.solution_checks import check_sums
from backends.builtin.tasks.types import TaskProblem
from backends.builtin.tasks.worked_solution import think

_NEXT = (
    "What comes next: {l}, ...?",
    "Continue the sequence {l}. What is the next number?",
    "Find the next number: {l}.",
    "Which number follows in {l}, ...?",
)
_AHEAD = (
    "Continue the sequence {l}. What is the {k} number after these?",
    "The sequence goes {l}, ... Which number comes {k} after those shown?",
)
_RULE = (
    "Start with {s}. To get the next number, {r}. What is the number after {n} steps?",
    "A sequence starts at {s}. In every step, {r}. Which number do you have after {n} steps?",
    "Begin at {s} and {n} times in a row {r}. Where do you end?",
)
_FIBONACCI = (
    "In this sequence each number is the sum of the two before it: {l}. What is the {k} number after these?",
    "Each number is the sum of the two before: {l}, ... Which number comes {k} after those shown?",
)
_AFTER = {2: "second", 3: "third", 4: "fourth", 5: "fifth", 6: "sixth"}


def _shown(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _constant_step(grade: int, rng: Random) -> TaskProblem:
    step = rng.randint(2, 12) if grade == 1 else rng.randint(11, 60)
    start = rng.randint(1, 60) if grade == 1 else rng.randint(10, 400)
    down = grade == 2 and rng.random() < 0.5
    terms = [start + i * step for i in range(5)]
    if down:
        terms.reverse()
    sign = "-" if down else "+"
    high, low = max(terms[2:4]), min(terms[2:4])
    shown = _shown(terms[:4])
    reasoning = think(
        shown,
        asked=f"what follows {shown}.",
        plan="find the step, then take it once more.",
        steps=[f"{high}-{low}={step}", f"{terms[3]}{sign}{step}={terms[4]}"],
        answer=str(terms[4]),
        checks=_sure_of_step(terms, sign, step),
    )
    return TaskProblem(shown, rng.choice(_NEXT).format(l=shown), str(terms[4]), reasoning)


def _sure_of_step(terms: list[int], sign: str, step: int) -> Iterator[str]:
    before, last = terms[3], terms[4]
    yield f"The step fits all: {', '.join(f'{a}{sign}{step}={b}' for a, b in itertools.pairwise(terms[:4]))}."
    yield from check_sums([f"{before}{sign}{step}={last}"])


def _growing_step(ahead: int, rng: Random) -> TaskProblem:
    value, step, growth = rng.randint(1, 40), rng.randint(2, 12), rng.randint(2, 7)
    terms = [value + i * step + growth * i * (i - 1) // 2 for i in range(4 + ahead)]
    diffs = [b - a for a, b in itertools.pairwise(terms[:4])]
    steps = [_shown(diffs)]
    for i in range(4, 4 + ahead):
        diff = terms[i] - terms[i - 1]
        steps.append(f"{diff - growth}+{growth}={diff}\n{terms[i - 1]}+{diff}={terms[i]}")
    shown = _shown(terms[:4])
    ask = rng.choice(_NEXT).format(l=shown) if ahead == 1 else rng.choice(_AHEAD).format(l=shown, k=_AFTER[ahead])
    return TaskProblem(f"{shown} {ahead}", ask, str(terms[-1]), _work(shown, "the steps grow evenly.", ahead, steps))


def _work(shown: str, rule: str, ahead: int, steps: list[str]) -> str:
    return think(
        f"{shown} {ahead}",
        asked=f"{shown}, then {ahead} more.",
        plan=rule,
        steps=steps,
        answer=steps[-1].rpartition("=")[2],
        checks=check_sums(steps),
    )


def _fibonacci(ahead: int, rng: Random) -> TaskProblem:
    terms = [rng.randint(1, 30), rng.randint(1, 30)]
    while len(terms) < 4 + ahead:
        terms.append(terms[-2] + terms[-1])
    steps = [f"{a}+{b}={a + b}" for a, b in itertools.pairwise(terms[2:-1])]
    shown = _shown(terms[:4])
    return TaskProblem(
        f"fib {shown} {ahead}",
        rng.choice(_FIBONACCI).format(l=shown, k=_AFTER[ahead]),
        str(terms[-1]),
        _work(shown, "add the last two each time.", ahead, steps),
    )


def _rule(num_steps: int, rng: Random) -> TaskProblem:
    factor, start = rng.randint(2, 3), rng.randint(2, 9)
    shift = rng.randint(1, 9) * (1 if rng.random() < 0.5 or start * factor <= start + 9 else -1)
    value, steps, sign = start, [], "-" if shift < 0 else "+"
    for _ in range(num_steps):
        scaled = value * factor
        steps.append(f"{value}*{factor}={scaled}\n{scaled}{sign}{abs(shift)}={scaled + shift}")
        value = scaled + shift
    verb = "double it" if factor == 2 else "multiply it by 3"
    rule = f"{verb} and {'subtract' if shift < 0 else 'add'} {abs(shift)}"
    question = rng.choice(_RULE).format(s=start, r=rule, n=num_steps)
    reasoning = _work(f"{start}, {rule}", "apply the rule each time.", num_steps, steps)
    return TaskProblem(f"{start}*{factor}{sign}{abs(shift)} x{num_steps}", question, str(value), reasoning)


def draw(grade: int, rng: Random) -> TaskProblem:
    """Draw a constant step at grade 1; many terms ahead of a growing step, or of a rule, at grade 5."""
    if grade <= 2:
        return _constant_step(grade, rng)
    if grade == 3:
        return _growing_step(1, rng) if rng.random() < 0.5 else _fibonacci(2, rng)
    roll, more = rng.random(), grade == 5
    if roll < 0.4:
        return _growing_step(4 if more else 2, rng)
    if roll < 0.7:
        return _fibonacci(6 if more else 4, rng)
    return _rule(rng.randint(4, 5) if more else 3, rng)
