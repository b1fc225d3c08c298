"""Draws formats to be followed to the letter: repeats, brackets, CSV and JSON, with figures from grade 3 on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

from backends.builtin.tasks.solution_checks import check_extreme, check_sums, numbered, running_sums, spelled
from backends.builtin.tasks.types import TaskProblem
from backends.builtin.tasks.wording import NAMES, WORDS
from backends.builtin.tasks.worked_solution import think

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


def _repeat(rng: Random) -> TaskProblem:
    word, count = rng.choice(WORDS), rng.randint(2, 6)
    name = rng.choice(list(_SEPARATORS))
    said = str(count) if rng.random() < 0.5 else _NUMBER_WORDS[count]
    other = rng.choice(WORDS)
    answer = _SEPARATORS[name].join([word] * count)
    question = rng.choice(_REPEAT).format(w=word, n=said, s=name)
    if rng.random() < 0.5:
        question = f"{question} Then end with {other}, separated in the same way."
        answer = _SEPARATORS[name].join([word] * count + [other])
    words = answer.split(_SEPARATORS[name])
    reasoning = think(
        answer,
        asked=f"{word}, {count} times" + (f", then {other}" if len(words) > count else "") + f", with {name}.",
        plan="count the words while writing.",
        steps=[numbered(words)],
        answer=answer,
        checks=_sure_of_repeat(words, name),
    )
    return TaskProblem(f"{answer} {name}", question, answer, reasoning)


def _sure_of_repeat(words: list[str], name: str) -> Iterator[str]:
    yield f"{len(words)} words have {len(words) - 1} {name} between them."
    for word in dict.fromkeys(words):
        yield f"{word} stands there {words.count(word)} times."
    yield f"The first word is {words[0]}, the last is {words[-1]}."
    yield f"Backwards: {numbered(words[::-1])}."
    for word in dict.fromkeys(words):
        yield f"{word} is spelled {spelled(word)}."
    yield f"After the last word there are no {name}."
    yield f"Nothing stands before the first {words[0]} either."
    yield f"Two words and what is between: {_SEPARATORS[name].join(words[:2])}."
    yield f"The last two: {_SEPARATORS[name].join(words[-2:])}."


def _wrap(rng: Random) -> TaskProblem:
    words = rng.sample(WORDS, rng.randint(2, 4))
    name = rng.choice(list(_BRACKETS))
    left, right = _BRACKETS[name]
    answer = " ".join(f"{left}{w}{right}" for w in words)
    question = rng.choice(_WRAP).format(l=", ".join(words), b=name)
    reasoning = think(
        answer,
        asked=f"{', '.join(words)}, each in {name}.",
        plan=f"write {left} before each word and {right} after it.",
        steps=[numbered(words)],
        answer=answer,
        checks=_sure_of_wrap(words, left, right),
    )
    return TaskProblem(answer, question, answer, reasoning)


def _sure_of_wrap(words: list[str], left: str, right: str) -> Iterator[str]:
    yield f"{len(words)} words make {len(words)} pairs of {left}{right}."
    for word in words:
        yield f"{word} becomes {left}{word}{right}."
    for word in words:
        yield f"{word} is spelled {spelled(word)}."
    yield f"The first is {words[0]}, the last is {words[-1]}."
    yield f"{left} opens, {right} closes, and between two pairs is a space."
    yield f"Backwards: {', '.join(words[::-1])}."


def _record(rng: Random) -> TaskProblem:
    name, age, city = rng.choice(NAMES), rng.randint(18, 99), rng.choice(_CITIES)
    answer = json.dumps({"name": name, "age": age, "city": city})
    question = rng.choice(_JSON).format(n=name, a=age, c=city)
    reasoning = think(
        answer,
        asked="an object of name, age and city.",
        plan="find the three values, then write them in this order.",
        steps=[f"{name}, {age}, {city}"],
        answer=answer,
        checks=_sure_of_record(name, age, city),
    )
    return TaskProblem(answer, question, answer, reasoning)


def _sure_of_record(name: str, age: int, city: str) -> Iterator[str]:
    yield f"name: {name}, a text, in quotes."
    yield f"age: {age}, a number, without quotes."
    yield f"city: {city}, a text, in quotes."
    yield "Three keys, two commas, one pair of brackets."
    yield f"{name} is {age} years old and lives in {city}."
    yield f"The name is spelled {spelled(name)}, the city {spelled(city)}."


def _figures(grade: int, rng: Random) -> TaskProblem:
    keys, said = _FIGURES[grade]
    numbers = [rng.randint(2, 99) for _ in range({3: rng.randint(3, 7), 4: 4, 5: rng.randint(5, 6)}[grade])]
    high, low = max(numbers), min(numbers)
    values = {"count": len(numbers), "max": high, "sum": sum(numbers), "range": high - low}
    steps = [f"{place}: {n}" for place, n in enumerate(numbers, 1)] if grade == 3 else running_sums(numbers)
    steps.append(f"max={high}")
    if grade == 5:
        steps.append(f"min={low}\n{high}-{low}={high - low}")
    shown = ", ".join(map(str, numbers))
    quoted = ", ".join(f'"{k}"' for k in keys)
    question = rng.choice(_ASK).format(l=shown, k=quoted, d=said)
    answer = json.dumps({k: values[k] for k in keys})
    reasoning = think(
        f"{grade} {shown}",
        asked=f"{', '.join(keys)} of {shown}.",
        plan="one key after the other.",
        steps=steps,
        answer=answer,
        checks=_sure_of_figures(numbers, steps),
    )
    return TaskProblem(f"{grade} {shown}", question, answer, reasoning)


def _sure_of_figures(numbers: list[int], steps: list[str]) -> Iterator[str]:
    yield f"In order: {', '.join(map(str, sorted(numbers)))}."
    yield from check_sums(steps)
    yield from check_extreme(numbers, max(numbers), "max")


def draw(grade: int, rng: Random) -> TaskProblem:
    """Draw repeats at grade 1, a JSON object of three computed figures at grade 5."""
    if grade == 1:
        return _repeat(rng) if rng.random() < 0.5 else _wrap(rng)
    return _record(rng) if grade == 2 else _figures(grade, rng)
