"""Following a format to the letter: repeats, brackets, CSV and JSON, with a figure to compute from grade 3 on."""

from __future__ import annotations

import json
from random import Random

from backends.builtin.tasks.types import Problem
from backends.builtin.tasks.wording import NAMES, WORDS

_REPEAT = (
    "Write the word {w} {n} times, separated by {s}.",
    "Repeat {w} {n} times with {s} in between.",
)
_SEPARATORS = {"commas": ", ", "dashes": "-", "spaces": " ", "slashes": "/"}
_WRAP = ("Put the words {l} in {b}, one pair for each word.", "Write {l}, each word in its own {b}.")
_BRACKETS = {"square brackets": ("[", "]"), "round brackets": ("(", ")"), "curly brackets": ("{", "}")}
_JSON = (
    'Write a JSON object with the keys "name", "age" and "city" for {n}, aged {a}, from {c}.',
    '{n} is {a} years old and lives in {c}. Answer in JSON with the keys "name", "age" and "city".',
)
_CITIES = ("Paris", "Rome", "Oslo", "Lima", "Tokyo", "Cairo", "Vienna", "Dublin")
_FIGURES = {
    3: (("count", "max"), "the count of the numbers and the largest one"),
    4: (("sum", "max"), "the sum of the numbers and the largest one"),
    5: (("sum", "max", "range"), "their sum, the largest one, and the largest minus the smallest"),
}
_ASK = (
    "For the numbers {l}, answer in JSON with the keys {k}: {d}.",
    "Numbers: {l}. Give a JSON object with the keys {k}, holding {d}.",
)
_NUMBER_WORDS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}


def _repeat(rng: Random) -> Problem:
    word, count = rng.choice(WORDS), rng.randint(2, 6)
    name = rng.choice(list(_SEPARATORS))
    said = str(count) if rng.random() < 0.5 else _NUMBER_WORDS[count]
    other = rng.choice(WORDS)
    answer = _SEPARATORS[name].join([word] * count)
    question = rng.choice(_REPEAT).format(w=word, n=said, s=name)
    if rng.random() < 0.5:
        question = f"{question} Then end with {other}, separated in the same way."
        answer = _SEPARATORS[name].join([word] * count + [other])
    return Problem(f"{answer} {name}", question, answer, f"{count} {word}")


def _wrap(rng: Random) -> Problem:
    words = rng.sample(WORDS, rng.randint(2, 4))
    name = rng.choice(list(_BRACKETS))
    left, right = _BRACKETS[name]
    answer = " ".join(f"{left}{w}{right}" for w in words)
    return Problem(answer, rng.choice(_WRAP).format(l=", ".join(words), b=name), answer, f"{left}{right} {len(words)}")


def _record(rng: Random) -> Problem:
    name, age, city = rng.choice(NAMES), rng.randint(18, 99), rng.choice(_CITIES)
    answer = json.dumps({"name": name, "age": age, "city": city})
    return Problem(answer, rng.choice(_JSON).format(n=name, a=age, c=city), answer, f"{name}, {age}, {city}")


def _figures(grade: int, rng: Random) -> Problem:
    keys, said = _FIGURES[grade]
    numbers = [rng.randint(2, 99) for _ in range({3: rng.randint(3, 7), 4: 4, 5: rng.randint(5, 6)}[grade])]
    total, steps = numbers[0], []
    for number in numbers[1:]:
        steps.append(f"{total}+{number}={total + number}")
        total += number
    high, low = max(numbers), min(numbers)
    values = {"count": len(numbers), "max": high, "sum": total, "range": high - low}
    if grade == 3:
        steps = ["\n".join(f"{place}: {n}" for place, n in enumerate(numbers, 1))]
    steps.append(f"max={high}")
    if grade == 5:
        steps.append(f"min={low}\n{high}-{low}={high - low}")
    shown = ", ".join(map(str, numbers))
    quoted = ", ".join(f'"{k}"' for k in keys)
    question = rng.choice(_ASK).format(l=shown, k=quoted, d=said)
    answer = json.dumps({k: values[k] for k in keys})
    return Problem(f"{grade} {shown}", question, answer, "\n".join(steps))


def draw(grade: int, rng: Random) -> Problem:
    """Repeats at grade 1, a JSON object of three computed figures at grade 5."""
    if grade == 1:
        return _repeat(rng) if rng.random() < 0.5 else _wrap(rng)
    return _record(rng) if grade == 2 else _figures(grade, rng)
