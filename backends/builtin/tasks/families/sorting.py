"""Draws numbers to be put in order, by value or by the sum of their digits."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from backends.builtin.tasks.solution_checks import check_extreme, check_order
from backends.builtin.tasks.types import TaskProblem
from backends.builtin.tasks.worked_solution import think

_SORT = (
    "Sort these numbers {w}: {l}.",
    "Put {l} in order, {w}.",
    "Arrange the numbers {l} {w}.",
    "Write {l} {w}.",
)
_UP = ("from smallest to largest", "in ascending order", "from low to high")
_DOWN = ("from largest to smallest", "in descending order", "from high to low")
_KTH = (
    "Sort {l} {w}. Which number comes {k}?",
    "If {l} are put {w}, which one is {k}?",
    "Which number is {k} when {l} are arranged {w}?",
)
_BY_DIGITS = (
    "Sort these numbers by the sum of their digits, smallest sum first: {l}.",
    "Order {l} by digit sum, from the smallest sum to the largest.",
)
_BY_DIGITS_ADD = (
    "Sort {l} by the sum of their digits, smallest sum first. Then add the first number and the last number.",
    "Order {l} by digit sum, smallest first. What is the first number plus the last number?",
)
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def _digit_sum(number: int) -> int:
    return sum(map(int, str(number)))


def _distinct_digit_sums(count: int, low: int, high: int, rng: Random) -> list[int]:
    drawn: dict[int, int] = {}
    while len(drawn) < count:
        number = rng.randint(low, high)
        drawn.setdefault(_digit_sum(number), number)
    return list(drawn.values())


def _digit_steps(number: int) -> str:
    return f"{number}:{'+'.join(str(number))}={_digit_sum(number)}"


def _by_value(grade: int, rng: Random) -> TaskProblem:
    count, high = {1: (3, 99), 2: (rng.randint(5, 6), 999), 3: (rng.randint(6, 7), 999)}[grade]
    numbers = rng.sample(range(10, high), count)
    shown = ", ".join(map(str, numbers))
    down = rng.random() < 0.5
    order = sorted(numbers, reverse=down)
    said = rng.choice(_DOWN if down else _UP)
    in_order = ", ".join(map(str, order))
    if grade < 3:
        return TaskProblem(f"{down} {shown}", rng.choice(_SORT).format(w=said, l=shown), in_order, work(numbers, down))
    place = rng.randint(2, count - 2)
    question = rng.choice(_KTH).format(w=said, l=shown, k=ORDINALS[place])
    return TaskProblem(f"{down} {place} {shown}", question, str(order[place]), work(numbers, down, place))


def work(numbers: list[int], down: bool, place: int | None = None) -> str:
    """Return the worked solution: the numbers in order, or the one at a place in it."""
    order = sorted(numbers, reverse=down)
    shown, in_order = ", ".join(map(str, numbers)), ", ".join(map(str, order))
    wanted = "in order" if place is None else f"number {place + 1}"
    return think(
        f"{down} {shown}",
        asked=f"{shown}, {'largest' if down else 'smallest'} first, {wanted}.",
        plan=f"take the {'largest' if down else 'smallest'} that is left, again and again.",
        steps=[in_order] + ([] if place is None else [f"{place + 1}: {order[place]}"]),
        answer=in_order if place is None else str(order[place]),
        checks=_sure_of_order(order),
    )


def _sure_of_order(order: list[int]) -> Iterator[str]:
    yield f"There are {len(order)} numbers, and none is lost."
    yield from check_order(order)
    yield from check_extreme(order, max(order), "max")


def _sure_of_digits(order: list[int]) -> Iterator[str]:
    yield f"The sums in order: {'<'.join(str(_digit_sum(n)) for n in order)}."
    for number in order:
        yield f"{number} again: {_digit_steps(number)}."
    yield from check_order(sorted(order))


def draw(grade: int, rng: Random) -> TaskProblem:
    """Draw three numbers at grade 1, digit sums of five three-digit numbers and a sum at grade 5."""
    if grade <= 3:
        return _by_value(grade, rng)
    numbers = _distinct_digit_sums(4, 10, 99, rng) if grade == 4 else _distinct_digit_sums(5, 100, 999, rng)
    shown = ", ".join(map(str, numbers))
    order = sorted(numbers, key=_digit_sum)
    steps = [*map(_digit_steps, numbers), ", ".join(map(str, order))]
    if grade == 4:
        reasoning = _work_digits(shown, order, steps, "in order", steps[-1])
        return TaskProblem(f"digits {shown}", rng.choice(_BY_DIGITS).format(l=shown), steps[-1], reasoning)
    first, last = order[0], order[-1]
    steps.append(f"{first}+{last}={first + last}")
    answer = str(first + last)
    reasoning = _work_digits(shown, order, steps, "first and last added", answer)
    return TaskProblem(f"digits+ {shown}", rng.choice(_BY_DIGITS_ADD).format(l=shown), answer, reasoning)


def _work_digits(shown: str, order: list[int], steps: list[str], wanted: str, answer: str) -> str:
    return think(
        f"digits {shown}",
        asked=f"by digit sum, {wanted}.",
        plan="each digit sum, then the order.",
        steps=steps,
        answer=answer,
        checks=_sure_of_digits(order),
    )
