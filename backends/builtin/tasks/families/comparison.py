"""Draws numbers and small sums to be compared: largest, smallest, how far apart."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from backends.builtin.tasks.families.arithmetic import work_out
from backends.builtin.tasks.solution_checks import check_extreme, check_sums, digit_by_digit
from backends.builtin.tasks.types import TaskProblem
from backends.builtin.tasks.wording import join_and
from backends.builtin.tasks.worked_solution import think

_PAIR = ("Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?", "Of {a} and {b}, which is {w}?")
_EXTREME = (
    "Which of these numbers is the {w}: {l}?",
    "What is the {w} number in this list: {l}?",
    "Find the {w} of {l}.",
    "Name the {w} of the numbers {l}.",
)
_SPREAD = (
    "What is the difference between the largest and the smallest of {l}?",
    "Take the largest and the smallest of the numbers {l} and subtract the smaller from the larger.",
    "By how much does the largest of {l} exceed the smallest?",
)
_VALUES = (
    "Which of these has the {w} value: {l}? Give the value.",
    "Compute each of these and give the {w} result: {l}.",
    "What is the {w} value among {l}?",
)
_VALUE_SPREAD = (
    "Compute each of these: {l}. What is the difference between the largest and the smallest result?",
    "How far apart are the largest and the smallest value among {l}?",
)

_MEANS = {"max": "largest", "min": "smallest"}


def _numbers(count: int, low: int, high: int, rng: Random) -> list[int]:
    return rng.sample(range(low, high), count)


def _expression(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.4:
        return f"{rng.randint(11, 29)} * {rng.randint(3, 9)}"
    if kind < 0.7:
        return f"{rng.randint(21, 99)} + {rng.randint(21, 99)}"
    return f"{rng.randint(101, 250)} - {rng.randint(11, 99)}"


def _expressions(count: int, rng: Random) -> tuple[list[str], list[int], list[str]]:
    """Return ``count`` expressions of distinct values, the values, and a step for each."""
    drawn: dict[int, tuple[str, str]] = {}
    while len(drawn) < count:
        text = _expression(rng)
        value, (step,) = work_out(text)
        drawn.setdefault(value, (text, step))
    texts, steps = zip(*drawn.values(), strict=True)
    return list(texts), list(drawn), list(steps)


def _of_numbers(grade: int, rng: Random) -> TaskProblem:
    high = rng.random() < 0.5
    take = max if high else min
    if grade == 1:
        a, b = _numbers(2, 10, 1000, rng)
        word = rng.choice(("larger", "bigger", "greater") if high else ("smaller", "less", "lower"))
        text = rng.choice(_PAIR).format(w=word, a=a, b=b)
        return TaskProblem(f"{take.__name__} {a} {b}", text, str(take(a, b)), work_pair(take.__name__, a, b))
    numbers = _numbers(rng.randint(4, 5), 10, 1000, rng)
    shown = ", ".join(map(str, numbers))
    word = rng.choice(("largest", "biggest", "greatest") if high else ("smallest", "lowest"))
    answer = take(numbers)
    text = rng.choice(_EXTREME).format(w=word, l=shown)
    return TaskProblem(f"{take.__name__} {shown}", text, str(answer), work_extreme(take.__name__, numbers))


def work_pair(name: str, a: int, b: int) -> str:
    """Return the worked solution of the larger ("max") or the smaller ("min") of two numbers."""
    low, high = min(a, b), max(a, b)
    answer = high if name == "max" else low
    return think(
        f"{name} {a} {b}",
        asked=f"the {_MEANS[name]} of {a} and {b}.",
        plan="compare their digits from the left.",
        steps=[f"{name} {a} {b}={answer}"],
        answer=str(answer),
        checks=_sure_of_pair(low, high),
    )


def _sure_of_pair(low: int, high: int) -> Iterator[str]:
    yield f"{low}<{high}, and {high}-{low}={high - low}."
    yield digit_by_digit(low, high)
    yield f"Back: {low}+{high - low}={high}, so {high} is further up."
    yield f"In order: {low}, {high}."
    yield from check_sums([f"{low}+{high - low}={high}"])


def work_extreme(name: str, numbers: list[int]) -> str:
    """Return the worked solution of the largest ("max") or the smallest ("min") of a list."""
    shown = ", ".join(map(str, numbers))
    answer = max(numbers) if name == "max" else min(numbers)
    return think(
        f"{name} {shown}",
        asked=f"the {_MEANS[name]} of {shown}.",
        plan="compare one after the other.",
        steps=[f"{name}={answer}"],
        answer=str(answer),
        checks=check_extreme(numbers, answer, name),
    )


def _spread_of_numbers(rng: Random) -> TaskProblem:
    numbers = _numbers(rng.randint(3, 5), 10, 300, rng)
    shown = join_and([str(n) for n in numbers])
    high, low = max(numbers), min(numbers)
    steps = [f"max={high}", f"min={low}", f"{high}-{low}={high - low}"]
    reasoning = think(
        f"spread {shown}",
        asked=f"largest less smallest of {shown}.",
        plan="find both, then subtract.",
        steps=steps,
        answer=str(high - low),
        checks=_sure_of_values("In order", numbers, steps),
    )
    return TaskProblem(f"spread {shown}", rng.choice(_SPREAD).format(l=shown), str(high - low), reasoning)


def _sure_of_values(said: str, values: list[int], steps: list[str]) -> Iterator[str]:
    yield f"{said}: {', '.join(map(str, sorted(values)))}."
    yield from check_sums(steps)


def draw(grade: int, rng: Random) -> TaskProblem:
    """Draw two numbers at grade 1; the spread of the values of five expressions at grade 5."""
    if grade <= 2:
        return _of_numbers(grade, rng)
    if grade == 3:
        return _spread_of_numbers(rng)
    texts, values, steps = _expressions(rng.randint(3, 4) if grade == 4 else rng.randint(4, 5), rng)
    shown = ", ".join(texts)
    high, low = max(values), min(values)
    if grade == 5:
        steps = [*steps, f"max={high}", f"min={low}", f"{high}-{low}={high - low}"]
        question = rng.choice(_VALUE_SPREAD).format(l=shown)
        reasoning = think(
            shown,
            asked=f"how far apart are {shown}.",
            plan="each value, then largest less smallest.",
            steps=steps,
            answer=str(high - low),
            checks=_sure_of_values("The values in order", values, steps),
        )
        return TaskProblem(f"spread {shown}", question, str(high - low), reasoning)
    word, answer, name = ("largest", high, "max") if rng.random() < 0.5 else ("smallest", low, "min")
    question = rng.choice(_VALUES).format(w=word, l=shown)
    reasoning = think(
        f"{name} {shown}",
        asked=f"the {_MEANS[name]} of {shown}.",
        plan="each value, then compare.",
        steps=[*steps, f"{name}={answer}"],
        answer=str(answer),
        checks=_sure_of_values("The values in order", values, steps),
    )
    return TaskProblem(f"{name} {shown}", question, str(answer), reasoning)
