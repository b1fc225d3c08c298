"""Writes second ways to be sure of a sum, of an order and of a code, each one true line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

# a, sign, b, c of "a+b=c", not within a longer sum.
Equation = tuple[int, str, int, int]
_EQUATION = re.compile(r"(?<![\d+*/:-])(\d+)([-+*/])(\d+)=(\d+)(?!\d)")
_UNDONE = {"+": "-", "-": "+", "*": "/", "/": "*"}


def equations(steps: Iterable[str]) -> list[Equation]:
    """Return the sums of two numbers that stand in the steps, in order."""
    return [(int(a), sign, int(b), int(c)) for a, sign, b, c in _EQUATION.findall("\n".join(steps))]


def running_sums(numbers: Sequence[int]) -> list[str]:
    """Return the steps that add numbers up from the left."""
    totals = itertools.pairwise(itertools.accumulate(numbers))
    return [f"{before}+{after - before}={after}" for before, after in totals]


def check_sums(steps: Iterable[str]) -> Iterator[str]:
    """Yield ways to be sure of the sums in the steps, the last sum first."""
    sums = equations(steps)[::-1]
    for a, sign, b, c in sums:
        yield f"Undo: {c}{_UNDONE[sign]}{b}={a}, as it was."
    for way in (_last_digits, _by_places, _size, _parity, _direction):
        for each in sums:
            if line := way(each):
                yield line


def _as_sum_or_product(equation: Equation) -> Equation:
    """Return a difference read as a sum, a quotient as a product."""
    a, sign, b, c = equation
    return (a, sign, b, c) if sign in "+*" else (c, _UNDONE[sign], b, a)


def _last_digits(equation: Equation) -> str:
    a, sign, b, c = _as_sum_or_product(equation)
    x, y = a % 10, b % 10
    last = x + y if sign == "+" else x * y
    return f"Last digits: {x}{sign}{y}={last}, and {c} ends in {c % 10}."


def _parts(number: int) -> list[int]:
    """Return 300, 40, 7 of 347; zeros are left out."""
    digits = str(number)
    return [int(d) * 10 ** (len(digits) - 1 - place) for place, d in enumerate(digits) if d != "0"]


def _by_places(equation: Equation) -> str:
    a, sign, b, _ = equation
    steps: list[str] = []
    if sign == "*":
        parts = _parts(a)
        if len(parts) < 2:
            return ""
        steps = [f"{part}*{b}={part * b}" for part in parts] + running_sums([part * b for part in parts])
    elif sign in "+-":
        if len(_parts(b)) < 2:
            return ""
        now = a
        for part in _parts(b):
            after = now + part if sign == "+" else now - part
            steps.append(f"{now}{sign}{part}={after}")
            now = after
    return f"By places: {', '.join(steps)}." if steps else ""


def _size(equation: Equation) -> str:
    a, sign, b, c = equation
    if sign not in "+-" or min(a, b) < 10:
        return ""
    unit = 100 if min(a, b) > 150 else 10
    x, y = _rounded(a, unit), _rounded(b, unit)
    if sign == "-" and x < y:
        return ""
    about = x + y if sign == "+" else x - y
    return f"Roughly: {x}{sign}{y}={about}, and {c} is near."


def _rounded(number: int, unit: int) -> int:
    return (number + unit // 2) // unit * unit


def _parity(equation: Equation) -> str:
    a, sign, b, c = equation
    if sign == "/":
        return ""
    return f"{a} is {_odd(a)}, {b} is {_odd(b)}, so it must be {_odd(c)}: {c} is."


def _odd(number: int) -> str:
    return "odd" if number % 2 else "even"


def _direction(equation: Equation) -> str:
    a, sign, b, c = equation
    if sign == "+":
        return f"Adding makes more: {a}<{c}." if b else ""
    return f"Taking away leaves less: {c}<{a}." if sign == "-" and b else ""


def check_order(numbers: Sequence[int]) -> Iterator[str]:
    """Yield ways to be sure of numbers that stand in order, either way."""
    up = list(numbers) if numbers[0] <= numbers[-1] else list(numbers)[::-1]
    yield f"From low to high: {'<'.join(map(str, up))}."
    for below, above in itertools.pairwise(up):
        yield f"{below}<{above}: {above}-{below}={above - below}."


def check_extreme(numbers: Sequence[int], value: int, name: str) -> Iterator[str]:
    """Yield every number against the largest or the smallest."""
    beaten = [n for n in numbers if n != value]
    yield f"One by one: {', '.join(f'{n}<{value}' if name == 'max' else f'{value}<{n}' for n in beaten)}."
    yield f"In order: {', '.join(map(str, sorted(numbers)))}."
    yield f"There are {len(numbers)} numbers, {numbered([str(n) for n in numbers])}."
    for n in beaten:
        yield f"{max(n, value)}-{min(n, value)}={abs(n - value)}, so {max(n, value)} is larger than {min(n, value)}."


def numbered(parts: Iterable[str]) -> str:
    """Return ``1 A, 2 B``."""
    return ", ".join(f"{place} {part}" for place, part in enumerate(parts, 1))


def spelled(code: str) -> str:
    """Return ``A B C``."""
    return " ".join(code)


def digit_by_digit(low: int, high: int) -> str:
    """Say why one number is smaller: fewer digits, or the first digit in which they differ."""
    x, y = str(low), str(high)
    if len(x) < len(y):
        return f"{low} has {len(x)} digits, {high} has {len(y)}: fewer is less."
    place = next(i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b)
    return f"Digit {place + 1} decides: {x[place]}<{y[place]}."
