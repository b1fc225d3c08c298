"""Draws sums, differences and products of whole numbers, from one operation to several."""

from __future__ import annotations

import ast
from collections.abc import Callable
from random import Random

from backends.builtin.tasks.solution_checks import check_sums
from backends.builtin.tasks.types import TaskProblem
from backends.builtin.tasks.worked_solution import think

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


def work_out(expression: str, *, by_places: bool = False) -> tuple[int, list[str]]:
    """Return the value of sums, differences and products, and the steps that lead there.

    ``by_places`` takes a product by one digit apart into tens and ones.
    """
    steps: list[str] = []

    def walk(node: ast.expr) -> int:
        if isinstance(node, ast.Constant):
            assert isinstance(node.value, int), "only whole numbers are drawn"
            return node.value
        assert isinstance(node, ast.BinOp), "only operations of two numbers are drawn"
        a, b = walk(node.left), walk(node.right)
        if isinstance(node.op, ast.Mult):
            steps.extend(_by_places(a, b) if by_places else multiply_steps(a, b))
            return a * b
        sign, value = ("+", a + b) if isinstance(node.op, ast.Add) else ("-", a - b)
        steps.append(f"{a}{sign}{b}={value}")
        return value

    return walk(ast.parse(expression, mode="eval").body), steps


def _by_places(a: int, b: int) -> list[str]:
    """Return steps of a two-digit number times one digit: tens, ones, sum."""
    tens, ones = a // 10 * 10, a % 10
    if not ones:
        return [f"{a}*{b}={a * b}"]
    return [f"{tens}*{b}={tens * b}", f"{ones}*{b}={ones * b}", f"{tens * b}+{ones * b}={a * b}"]


def _less_or_more(have: int, other: int, rng: Random) -> str:
    """Return a sign that keeps the result above nothing."""
    return "-" if have > other and rng.random() < 0.5 else "+"


def _sum(low: int, high: int, rng: Random) -> str:
    a, b = rng.randint(low, high), rng.randint(low, high)
    return f"{a} + {b}" if rng.random() < 0.5 else f"{max(a, b)} - {min(a, b)}"


def _short_product(rng: Random) -> str:
    return f"{rng.randint(12, 99)} * {rng.randint(2, 9)}"


def _three_terms(rng: Random) -> str:
    a, b = rng.randint(50, 700), rng.randint(20, 280)
    return f"{a} + {b} - {rng.randint(11, a + b - 1)}"


def _product_and_term(rng: Random) -> str:
    a, b, c = rng.randint(12, 99), rng.randint(2, 9), rng.randint(11, 99)
    return f"{a} * {b} {_less_or_more(a * b, c, rng)} {c}"


def _two_products(rng: Random) -> str:
    a, b, c, d = rng.randint(12, 99), rng.randint(3, 9), rng.randint(12, 99), rng.randint(3, 9)
    return f"{a} * {b} + {c} * {d}"


def _long_product(rng: Random) -> str:
    return f"{rng.randint(21, 99)} * {rng.randint(12, 98)}"


def _bracket(rng: Random) -> str:
    a, b, c, d = rng.randint(12, 70), rng.randint(12, 29), rng.randint(3, 9), rng.randint(11, 99)
    return f"({a} + {b}) * {c} {_less_or_more((a + b) * c, d, rng)} {d}"


def _three_products(rng: Random) -> str:
    two = _two_products(rng)
    e, f = rng.randint(12, 99), rng.randint(3, 9)
    return f"{two} {_less_or_more(work_out(two)[0], e * f, rng)} {e} * {f}"


def _two_brackets(rng: Random) -> str:
    a, b, c, d = rng.randint(11, 59), rng.randint(11, 39), rng.randint(11, 59), rng.randint(11, 39)
    return f"({a} + {b}) * ({c} + {d})"


def _long_and_short_product(rng: Random) -> str:
    return f"{_long_product(rng)} + {rng.randint(12, 99)} * {rng.randint(3, 9)}"


_KINDS: dict[int, tuple[Callable[[Random], str], ...]] = {
    1: (lambda rng: _sum(3, 60, rng),),
    2: (lambda rng: _sum(50, 499, rng), _short_product),
    3: (_three_terms, _product_and_term),
    4: (_two_products, _long_product, _bracket),
    5: (_three_products, _two_brackets, _long_and_short_product),
}


def draw(grade: int, rng: Random) -> TaskProblem:
    """Draw one expression: a single sum at grade 1, products of brackets at grade 5."""
    text = rng.choice(_KINDS[grade])(rng)
    value, steps = work_out(text, by_places=grade == 2)
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
