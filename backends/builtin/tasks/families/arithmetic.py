"""Draws sums, differences and products of whole numbers, from one operation to several."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from backends.builtin.tasks.solution_checks import check_sums
from backends.builtin.tasks.types import TaskProblem
from backends.builtin.tasks.worked_solution import think

# An expression, its value, and the steps that compute it.
Worked = tuple[str, int, list[str]]

_TEMPLATES = (
    "What is {e}?",
    "Calculate {e}.",
    "{e} = ?",
    "Please work out {e}.",
    "How much is {e}?",
    "Find the value of {e}.",
    "Evaluate {e}.",
)
_SPOKEN = {"+": "plus", "-": "minus", "*": "times"}
_PLANS = {
    "+": "add the second number to the first.",
    "-": "take the second number from the first.",
    "*": "multiply, part by part if need be.",
    "/": "see how often the second number goes into the first.",
}


def multiply_steps(a: int, b: int) -> list[str]:
    """Return steps of a long multiplication by a factor of at most two digits."""
    tens, ones = divmod(b, 10)
    if not tens or not ones:
        return [f"{a}*{b}={a * b}"]
    high, low = a * tens * 10, a * ones
    return [f"{a}*{tens * 10}={high}", f"{a}*{ones}={low}", f"{high}+{low}={high + low}"]


def _sum(low: int, high: int, rng: Random) -> Worked:
    a, b = rng.randint(low, high), rng.randint(low, high)
    if rng.random() < 0.5:
        return f"{a} + {b}", a + b, [f"{a}+{b}={a + b}"]
    a, b = max(a, b), min(a, b)
    return f"{a} - {b}", a - b, [f"{a}-{b}={a - b}"]


def _short_product(rng: Random) -> Worked:
    a, b = rng.randint(12, 99), rng.randint(2, 9)
    return f"{a} * {b}", a * b, _by_places(a, b)


def _by_places(a: int, b: int) -> list[str]:
    """Return steps of a two-digit number times one digit: tens, ones, sum."""
    tens, ones = a // 10 * 10, a % 10
    if not ones:
        return [f"{a}*{b}={a * b}"]
    return [f"{tens}*{b}={tens * b}", f"{ones}*{b}={ones * b}", f"{tens * b}+{ones * b}={a * b}"]


def _three_terms(rng: Random) -> Worked:
    a, b = rng.randint(50, 700), rng.randint(20, 280)
    c = rng.randint(11, a + b - 1)
    return f"{a} + {b} - {c}", a + b - c, [f"{a}+{b}={a + b}", f"{a + b}-{c}={a + b - c}"]


def _product_and_term(rng: Random) -> Worked:
    a, b, c = rng.randint(12, 99), rng.randint(2, 9), rng.randint(11, 99)
    p = a * b
    if p > c and rng.random() < 0.5:
        return f"{a} * {b} - {c}", p - c, [f"{a}*{b}={p}", f"{p}-{c}={p - c}"]
    return f"{a} * {b} + {c}", p + c, [f"{a}*{b}={p}", f"{p}+{c}={p + c}"]


def _two_products(rng: Random) -> Worked:
    a, b, c, d = rng.randint(12, 99), rng.randint(3, 9), rng.randint(12, 99), rng.randint(3, 9)
    p, q = a * b, c * d
    return f"{a} * {b} + {c} * {d}", p + q, [f"{a}*{b}={p}", f"{c}*{d}={q}", f"{p}+{q}={p + q}"]


def _long_product(rng: Random) -> Worked:
    a, b = rng.randint(21, 99), rng.randint(12, 98)
    return f"{a} * {b}", a * b, multiply_steps(a, b)


def _bracket(rng: Random) -> Worked:
    a, b, c, d = rng.randint(12, 70), rng.randint(12, 29), rng.randint(3, 9), rng.randint(11, 99)
    s = a + b
    p = s * c
    if p > d and rng.random() < 0.5:
        return f"({a} + {b}) * {c} - {d}", p - d, [f"{a}+{b}={s}", f"{s}*{c}={p}", f"{p}-{d}={p - d}"]
    return f"({a} + {b}) * {c} + {d}", p + d, [f"{a}+{b}={s}", f"{s}*{c}={p}", f"{p}+{d}={p + d}"]


def _three_products(rng: Random) -> Worked:
    text, value, steps = _two_products(rng)
    e, f = rng.randint(12, 99), rng.randint(3, 9)
    r = e * f
    if value > r and rng.random() < 0.5:
        return f"{text} - {e} * {f}", value - r, [*steps, f"{e}*{f}={r}", f"{value}-{r}={value - r}"]
    return f"{text} + {e} * {f}", value + r, [*steps, f"{e}*{f}={r}", f"{value}+{r}={value + r}"]


def _two_brackets(rng: Random) -> Worked:
    a, b, c, d = rng.randint(11, 59), rng.randint(11, 39), rng.randint(11, 59), rng.randint(11, 39)
    s, t = a + b, c + d
    return f"({a} + {b}) * ({c} + {d})", s * t, [f"{a}+{b}={s}", f"{c}+{d}={t}", *multiply_steps(s, t)]


def _product_less_product(rng: Random) -> Worked:
    a, b = rng.randint(21, 99), rng.randint(12, 98)
    c, d = rng.randint(12, 99), rng.randint(3, 9)
    p, q = a * b, c * d
    steps = [*multiply_steps(a, b), f"{c}*{d}={q}", f"{p}+{q}={p + q}"]
    return f"{a} * {b} + {c} * {d}", p + q, steps


_KINDS: dict[int, tuple[Callable[[Random], Worked], ...]] = {
    1: (lambda rng: _sum(3, 60, rng),),
    2: (lambda rng: _sum(50, 499, rng), _short_product),
    3: (_three_terms, _product_and_term),
    4: (_two_products, _long_product, _bracket),
    5: (_three_products, _two_brackets, _product_less_product),
}


def draw(grade: int, rng: Random) -> TaskProblem:
    """Draw one expression: a single sum at grade 1, products of brackets at grade 5."""
    text, value, steps = rng.choice(_KINDS[grade])(rng)
    shown = text
    if rng.random() < 0.2 and "(" not in text:
        shown = " ".join(_SPOKEN.get(word, word) for word in text.split())
    elif rng.random() < 0.25:
        shown = text.replace(" ", "")
    question = rng.choice(_TEMPLATES).format(e=shown)
    return TaskProblem(text, question, str(value), work(text, value, steps))


def work(text: str, value: int, steps: list[str]) -> str:
    """Return the worked solution of an expression."""
    return think(
        text, asked=f"find {text}.", plan=_plan(text), steps=steps, answer=str(value), checks=check_sums(steps)
    )


def _plan(text: str) -> str:
    if "(" in text:
        return "brackets first, then the product."
    signs = [word for word in text.split() if word in _SPOKEN or word == "/"]
    if len(signs) == 1:
        return _PLANS[signs[0]]
    return "products first, then the rest." if "*" in signs else "from left to right."
