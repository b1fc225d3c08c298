"""Draws short questions as people type them to try a model: small numbers, bare facts, careless spelling.

Studied beside the graded families so that a first "2+2" is answered; not part of the graded mix. Where such a question
is also a problem of a family, it respects that family's split.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from backends.builtin.tasks.facts import CAPITALS, DAYS_OF_MONTH, WEEKDAYS
from backends.builtin.tasks.families import (
    arithmetic,
    comparison,
    counting,
    lookups,
    sorting,
    strings,
    units,
    word_problems,
)
from backends.builtin.tasks.solution_checks import digit_by_digit, running_sums
from backends.builtin.tasks.task_generator import split_of
from backends.builtin.tasks.types import TaskProblem
from backends.builtin.tasks.wording import NAMES, THINGS, join_and
from backends.builtin.tasks.worked_solution import think

_SIGNS = {
    "+": ("+", " + ", " plus "),
    "-": ("-", " - ", " minus "),
    "*": ("*", " * ", " times ", "x", " x "),
    "/": ("/", " / ", " divided by "),
}
_ASK = (
    "What is {e}?",
    "what's {e}?",
    "whats {e}",
    "{e}",
    "{e}=?",
    "{e} =",
    "How much is {e}?",
    "calculate {e}",
    "Compute {e}",
)


def _sum(rng: Random) -> tuple[str, TaskProblem]:
    most = rng.choice((9, 20, 99))
    a, b, sign = rng.randint(0, most), rng.randint(0, most), rng.choice("++-**/")
    if sign == "-":
        a, b = max(a, b), min(a, b)
    elif sign == "*":
        a, b = rng.randint(0, 12), rng.randint(0, 12)
    elif sign == "/":
        b = rng.randint(1, 12)
        a = b * rng.randint(0, 12)
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[sign]
    shown = f"{a}{rng.choice(_SIGNS[sign])}{b}"
    key = f"{a} {sign} {b}"
    reasoning = arithmetic.work(key, value, [f"{a}{sign}{b}={value}"])
    return "arithmetic", TaskProblem(key, rng.choice(_ASK).format(e=shown), str(value), reasoning)


def _add_up(rng: Random) -> tuple[str, TaskProblem]:
    numbers = [rng.randint(1, rng.choice((9, 50))) for _ in range(rng.randint(2, 4))]
    listed = rng.choice((join_and(list(map(str, numbers))), ", ".join(map(str, numbers))))
    asks = ("What is the sum of {l}?", "Add {l}.", "add up {l}", "sum of {l}", "What is the total of {l}?")
    total, key = sum(numbers), " + ".join(map(str, numbers))
    reasoning = arithmetic.work(key, total, running_sums(numbers))
    return "arithmetic", TaskProblem(key, rng.choice(asks).format(l=listed), str(total), reasoning)


def _capital(rng: Random) -> tuple[str, TaskProblem]:
    country = rng.choice(list(CAPITALS))
    capital = CAPITALS[country]
    if rng.random() < 0.25:
        asks: tuple[str, ...] = (
            "Which country has the capital {k}?",
            "{k} is the capital of which country?",
            "Of which country is {k} the capital?",
        )
        reasoning = lookups.work_capital(country, f"the country of {capital}.", country)
        return "", TaskProblem("", rng.choice(asks).format(k=capital), country, reasoning)
    asks = (
        "What is the capital of {c}?",
        "capital of {c}",
        "What's the capital city of {c}?",
        "{c} capital?",
        "Name the capital of {c}.",
    )
    reasoning = lookups.work_capital(country, f"the capital of {country}.", capital)
    return "", TaskProblem("", rng.choice(asks).format(c=country), capital, reasoning)


def _sort(rng: Random) -> tuple[str, TaskProblem]:
    numbers = rng.sample(range(rng.choice((10, 30, 100))), rng.randint(2, 6))
    down = rng.random() < 0.25
    order = ", ".join(map(str, sorted(numbers, reverse=down)))
    shown = rng.choice((", ", ", ", " ", ",")).join(map(str, numbers))
    if down:
        asks: tuple[str, ...] = ("Sort {l} from high to low", "sort {l} descending", "Sort {l} in descending order.")
    else:
        asks = ("Sort {l}", "sort {l}.", "Sort these: {l}", "Put {l} in order.", "order {l}", "Sort the numbers {l}.")
    key = f"{down} {', '.join(map(str, numbers))}"
    return "sorting", TaskProblem(key, rng.choice(asks).format(l=shown), order, sorting.work(numbers, down))


def _compare(rng: Random) -> tuple[str, TaskProblem]:
    a, b = rng.sample(range(rng.choice((12, 100, 1000))), 2)
    if rng.random() < 0.3:
        word = rng.choice(("bigger", "larger", "greater"))
        asked = f"Is {a} {word} than {b}?"
        answer = "yes" if a > b else "no"
        reasoning = think(
            asked,
            asked=f"whether {b}<{a}.",
            plan="compare their digits from the left.",
            steps=[f"max {a} {b}={max(a, b)}"],
            answer=answer,
            checks=[f"{min(a, b)}<{max(a, b)}.", digit_by_digit(min(a, b), max(a, b))],
        )
        return "", TaskProblem("", asked, answer, reasoning)
    high = rng.random() < 0.6
    word = rng.choice(("bigger", "larger", "greater", "more") if high else ("smaller", "less", "lower"))
    take = max if high else min
    asks = ("Which is {w}, {a} or {b}?", "what is {w}: {a} or {b}", "{a} or {b}, which is {w}?")
    key = f"{take.__name__} {a} {b}"
    reasoning = comparison.work_pair(take.__name__, a, b)
    return "comparison", TaskProblem(key, rng.choice(asks).format(w=word, a=a, b=b), str(take(a, b)), reasoning)


def _extreme(rng: Random) -> tuple[str, TaskProblem]:
    numbers = rng.sample(range(100), rng.randint(3, 5))
    name, take, words = rng.choice(
        (("max", max, ("largest", "biggest", "max")), ("min", min, ("smallest", "lowest", "min")))
    )
    shown = ", ".join(map(str, numbers))
    asks = ("What is the {w} of {l}?", "{w} of {l}", "Which number is the {w}: {l}?")
    answer = str(take(numbers))
    return "comparison", TaskProblem(
        f"{name} {shown}",
        rng.choice(asks).format(w=rng.choice(words), l=shown),
        answer,
        comparison.work_extreme(name, numbers),
    )


def _backwards(rng: Random) -> tuple[str, TaskProblem]:
    code = "".join(rng.choices("ABCDEFGHIJKLMNOPRSTUVWY", k=rng.randint(3, 6)))
    asks = (
        "Reverse {s}",
        "Reverse the code {s}.",
        "Spell {s} backwards.",
        "Write {s} backwards.",
        "Reverse the word {s}.",
    )
    reasoning = strings.work(f"{code} reverse", code, ["reverse it"], [code[::-1]])
    return "strings", TaskProblem(f"{code} reverse", rng.choice(asks).format(s=code), code[::-1], reasoning)


def _letters(rng: Random) -> tuple[str, TaskProblem]:
    code = "".join(rng.choices("ABCDEFGHKLMNPRSTEO", k=rng.randint(3, 7)))
    asks = ("How many letters are in {s}?", "How many letters does {s} have?", "length of {s}")
    question = rng.choice(asks).format(s=code)
    return "counting", TaskProblem(f"length {code}", question, str(len(code)), counting.work_length(code))


_PEOPLE = (*NAMES, "Tom", "Lisa", "John", "Mary", "Alice", "Bob", "Peter", "Sara")
_GOES = ("eats {m}", "loses {m}", "gives away {m}", "sells {m}", "gives {m} to a friend", "drops {m}", "uses {m}")
_COMES = ("buys {m} more", "gets {m} more", "finds {m}", "receives {m}", "picks {m}", "adds {m}")


def _heap(rng: Random) -> tuple[str, TaskProblem]:
    have = rng.randint(1, rng.choice((10, 30)))
    if rng.random() < 0.55:
        m = rng.randint(1, have)
        value, sign, verb = have - m, "-", rng.choice(_GOES)
        ends = ("How many are left?", "How many {t} are left?")
    else:
        m = rng.randint(1, 20)
        value, sign, verb = have + m, "+", rng.choice(_COMES)
        ends = ("How many in total?", "How many {t} are there?")
    asks = (*ends, "How many {t} does {p} have now?", "How many {t} does {p} have?")
    person, thing = rng.choice(_PEOPLE), rng.choice(THINGS)
    told = f"{person} has {have} {thing}" + rng.choice((" and {v}. ", ". {p} {v}. ", ", then {v}. ")) + rng.choice(asks)
    question = told.format(v=verb.format(m=m), p=person, t=thing)
    reasoning = word_problems.work([str(have), f"{sign}{m}"], thing, [f"{have}{sign}{m}={value}"], value)
    return "word_problems", TaskProblem(f"{have} {sign}{m}", question, str(value), reasoning)


def _weekday(rng: Random) -> tuple[str, TaskProblem]:
    at, step = rng.randrange(7), rng.choice((1, 1, -1, 2))
    today, other = WEEKDAYS[at], WEEKDAYS[(at + step) % 7]
    asks = {
        1: (
            "What day comes after {w}?",
            "If today is {w}, what day is tomorrow?",
            "Today is {w}. What day is tomorrow?",
        ),
        -1: ("What day comes before {w}?", "If today is {w}, what day was yesterday?"),
        2: ("What day is two days after {w}?", "Today is {w}. What day is it the day after tomorrow?"),
    }
    reasoning = think(
        today + other,
        asked=f"the day {abs(step)} {'after' if step > 0 else 'before'} {today}.",
        plan="walk along the week.",
        steps=[", ".join(WEEKDAYS[(at + walked) % 7] for walked in (range(step + 1) if step > 0 else (0, -1)))],
        answer=other,
        checks=[f"The week: {', '.join(WEEKDAYS)}."],
    )
    return "", TaskProblem("", rng.choice(asks[step]).format(w=today), other, reasoning)


_AMOUNTS = (
    ("weeks", "days", 7), ("hours", "minutes", 60), ("minutes", "seconds", 60), ("days", "hours", 24),
    ("kilometers", "meters", 1000), ("meters", "centimeters", 100), ("kilograms", "grams", 1000),
    ("feet", "inches", 12),
)  # fmt: skip
_SINGLE = (
    ("days are in a week", 7), ("minutes are in an hour", 60), ("seconds are in a minute", 60),
    ("hours are in a day", 24), ("months are in a year", 12), ("days are in a year", 365),
    ("meters are in a kilometer", 1000), ("grams are in a kilogram", 1000), ("inches are in a foot", 12),
    ("legs does a spider have", 8), ("sides does a triangle have", 3), ("sides does a hexagon have", 6),
    ("legs does a horse have", 4),
)  # fmt: skip


def _amount(rng: Random) -> tuple[str, TaskProblem]:
    if rng.random() < 0.3:
        said, value = rng.choice((*_SINGLE, *((f"days are in {m}", d) for m, d in DAYS_OF_MONTH.items())))
        reasoning = think(
            said, asked=f"how many {said}.", plan="recall it.", steps=[f"{said}={value}"], answer=str(value), checks=()
        )
        return "", TaskProblem("", f"How many {said}?", str(value), reasoning)
    big, small, factor = rng.choice(_AMOUNTS)
    n = rng.randint(2, 12)
    asks = ("How many {b} are in {n} {a}?", "How many {b} is {n} {a}?", "convert {n} {a} to {b}", "{n} {a} in {b}")
    question = rng.choice(asks).format(a=big, b=small, n=n)
    reasoning = units.work_conversion(n, big, small, factor, [f"{n}*{factor}={n * factor}"])
    return "units", TaskProblem(f"{n} {big} {small}", question, str(n * factor), reasoning)


def _parity(rng: Random) -> tuple[str, TaskProblem]:
    n = rng.randint(0, 99)
    answer = "odd" if n % 2 else "even"
    last = n % 10
    reasoning = think(
        str(n),
        asked=f"whether {n} is even or odd.",
        plan="its last digit decides.",
        steps=[f"{last}: {answer}"],
        answer=answer,
        checks=[f"{n // 2}*2={n // 2 * 2}, and {n // 2 * 2}+{n % 2}={n}."],
    )
    return "", TaskProblem("", rng.choice(("Is {n} even or odd?", "is {n} odd or even")).format(n=n), answer, reasoning)


_KINDS: tuple[tuple[Callable[[Random], tuple[str, TaskProblem]], float], ...] = (
    (_sum, 4.0), (_add_up, 1.5), (_capital, 1.5), (_sort, 2.0), (_compare, 1.0), (_extreme, 1.0), (_backwards, 1.0),
    (_letters, 0.7), (_heap, 2.5), (_weekday, 1.0), (_amount, 1.5), (_parity, 0.5),
)  # fmt: skip
_DRAWS, _WEIGHTS = zip(*_KINDS, strict=True)


def draw_everyday(rng: Random) -> TaskProblem:
    """Draw one such question, never a problem of the test split."""
    while True:
        family, problem = rng.choices(_DRAWS, _WEIGHTS)[0](rng)
        if not family or split_of(family, problem.key) == "train":
            return TaskProblem(problem.key, _careless(problem, rng), problem.answer, problem.reasoning)


def _careless(problem: TaskProblem, rng: Random) -> str:
    """Spell a question sometimes without capitals, sometimes without the last mark; codes keep their capitals."""
    text = problem.question
    if rng.random() < 0.25 and not any(word.isupper() and len(word) > 1 for word in text.strip("?.").split()):
        text = text.lower()
    return text.rstrip("?.") if rng.random() < 0.2 else text
