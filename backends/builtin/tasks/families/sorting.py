"""Putting numbers in order, by value or by the sum of their digits."""

from __future__ import annotations

from random import Random

from backends.builtin.tasks.types import Problem

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


def _by_value(grade: int, rng: Random) -> Problem:
    count, high = {1: (3, 99), 2: (rng.randint(5, 6), 999), 3: (rng.randint(6, 7), 999)}[grade]
    numbers = rng.sample(range(10, high), count)
    shown = ", ".join(map(str, numbers))
    down = rng.random() < 0.5
    order = sorted(numbers, reverse=down)
    said = rng.choice(_DOWN if down else _UP)
    in_order = ", ".join(map(str, order))
    if grade < 3:
        return Problem(f"{down} {shown}", rng.choice(_SORT).format(w=said, l=shown), in_order, in_order)
    place = rng.randint(2, count - 2)
    question = rng.choice(_KTH).format(w=said, l=shown, k=ORDINALS[place])
    return Problem(f"{down} {place} {shown}", question, str(order[place]), f"{in_order}\n{place + 1}: {order[place]}")


def draw(grade: int, rng: Random) -> Problem:
    """Three numbers at grade 1, digit sums of five three-digit numbers and a sum at grade 5."""
    if grade <= 3:
        return _by_value(grade, rng)
    numbers = _distinct_digit_sums(4, 10, 99, rng) if grade == 4 else _distinct_digit_sums(5, 100, 999, rng)
    shown = ", ".join(map(str, numbers))
    order = sorted(numbers, key=_digit_sum)
    steps = [*map(_digit_steps, numbers), ", ".join(map(str, order))]
    if grade == 4:
        return Problem(f"digits {shown}", rng.choice(_BY_DIGITS).format(l=shown), steps[-1], "\n".join(steps))
    first, last = order[0], order[-1]
    steps.append(f"{first}+{last}={first + last}")
    return Problem(f"digits+ {shown}", rng.choice(_BY_DIGITS_ADD).format(l=shown), str(first + last), "\n".join(steps))
