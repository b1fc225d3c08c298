"""Draws conversions between units of length, weight, time and count."""

from __future__ import annotations

from random import Random

from backends.builtin.tasks.families.arithmetic import multiply_steps
from backends.builtin.tasks.solution_checks import check_sums, running_sums
from backends.builtin.tasks.types import TaskProblem
from backends.builtin.tasks.wording import join_and
from backends.builtin.tasks.worked_solution import think

_DECIMAL = (
    ("meters", "centimeters", 100), ("kilometers", "meters", 1000), ("kilograms", "grams", 1000),
    ("liters", "milliliters", 1000), ("centimeters", "millimeters", 10), ("dollars", "cents", 100),
)  # fmt: skip
_OTHER = (
    ("hours", "minutes", 60), ("minutes", "seconds", 60), ("weeks", "days", 7), ("dozens", "pieces", 12),
    ("feet", "inches", 12), ("days", "hours", 24),
)  # fmt: skip
_ALL = _DECIMAL + _OTHER

_CONVERT = (
    "How many {b} are {n} {a}?",
    "Convert {n} {a} to {b}.",
    "{n} {a} is how many {b}?",
    "Express {n} {a} in {b}.",
)
_BOTH = (
    "How many {b} are {n} {a} and {m} {b}?",
    "Convert {n} {a} and {m} {b} to {b}.",
    "Express {n} {a} and {m} {b} in {b} only.",
)
_LESS = (
    "A rope of {n} {a} and {m} {b} loses {k} {b}. How many {b} remain?",
    "Take {k} {b} away from {n} {a} and {m} {b}. How many {b} are left?",
    "How many {b} are {n} {a} and {m} {b} minus {k} {b}?",
)
_TIMES = (
    "How many {b} are {k} pieces of {n} {a} and {m} {b} each?",
    "One part is {n} {a} and {m} {b}. How many {b} are {k} such parts?",
)
_SUM = (
    "Add up {l}. How many {b} is that?",
    "What is the total of {l}, in {b}?",
    "How many {b} are {l} together?",
)


def _convert(grade: int, rng: Random) -> TaskProblem:
    big, small, factor = rng.choice(_DECIMAL if grade == 1 else _OTHER)
    n = rng.randint(2, 199) if grade == 1 else rng.randint(3, 99)
    question = rng.choice(_CONVERT).format(a=big, b=small, n=n)
    steps = multiply_steps(n, factor) if factor < 100 else [f"{n}*{factor}={n * factor}"]
    return TaskProblem(f"{n} {big} {small}", question, str(n * factor), work_conversion(n, big, small, factor, steps))


def work_conversion(n: int, big: str, small: str, factor: int, steps: list[str]) -> str:
    """Return the worked solution of ``n`` of the big unit in the small one."""
    return _work(f"{n} {big} {small}", f"{n} {big} in {small}.", (big, small, factor), steps, n * factor)


def _work(key: str, asked: str, unit: tuple[str, str, int], steps: list[str], value: int) -> str:
    big, small, factor = unit
    return think(
        key,
        asked=asked,
        plan=f"one of the {big} is {factor} {small}.",
        steps=steps,
        answer=str(value),
        checks=check_sums(steps),
    )


def _mixed(grade: int, rng: Random) -> TaskProblem:
    big, small, factor = rng.choice(_OTHER if rng.random() < 0.7 else _DECIMAL[:1])
    n, m = rng.randint(2, 19), rng.randint(1, factor - 1)
    total = n * factor + m
    steps = [*multiply_steps(n, factor if factor < 100 else 100)[-3:], f"{n * factor}+{m}={total}"]
    key = f"{n} {big} {m} {small}"
    said = {"a": big, "b": small, "n": n, "m": m}
    unit, asked = (big, small, factor), f"{n} {big} and {m} {small}"
    if grade == 3:
        return TaskProblem(
            key, rng.choice(_BOTH).format(**said), str(total), _work(key, f"{asked}.", unit, steps, total)
        )
    if rng.random() < 0.5:
        k = rng.randint(2, total - 1)
        steps.append(f"{total}-{k}={total - k}")
        reasoning = _work(key, f"{asked}, less {k} {small}.", unit, steps, total - k)
        return TaskProblem(f"{key} -{k}", rng.choice(_LESS).format(k=k, **said), str(total - k), reasoning)
    k = rng.randint(3, 9)
    steps.append(f"{total}*{k}={total * k}")
    reasoning = _work(key, f"{k} times {asked}.", unit, steps, total * k)
    return TaskProblem(f"{key} *{k}", rng.choice(_TIMES).format(k=k, **said), str(total * k), reasoning)


def _sum(rng: Random) -> TaskProblem:
    big, small, factor = rng.choice(_OTHER)
    parts: list[str] = []
    key: list[str] = []
    steps: list[str] = []
    totals: list[int] = []
    for _ in range(3):
        n, m = rng.randint(2, 15), rng.randint(1, factor - 1)
        parts.append(f"{n} {big} and {m} {small}" if len(parts) != 1 else f"{n} {big}")
        whole, extra = n * factor, m if len(parts) != 2 else 0
        key.append(f"{n}.{extra}")
        steps.append(f"{n}*{factor}={whole}")
        if extra:
            steps.append(f"{whole}+{extra}={whole + extra}")
        totals.append(whole + extra)
    steps += running_sums(totals)
    run = sum(totals)
    question = rng.choice(_SUM).format(l=join_and(parts), b=small)
    asked = f"{', '.join(parts)} together, in {small}."
    reasoning = _work(" ".join(key), asked, (big, small, factor), steps, run)
    return TaskProblem(f"{big} {' '.join(key)}", question, str(run), reasoning)


def draw(grade: int, rng: Random) -> TaskProblem:
    """Draw powers of ten at grade 1, sums of mixed measures at grade 5."""
    if grade <= 2:
        return _convert(grade, rng)
    return _mixed(grade, rng) if grade <= 4 else _sum(rng)
