"""Draws questions about facts from fixed tables: capitals, atomic numbers, legs, sides, days; alone and combined."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from backends.builtin.tasks.facts import CAPITALS, NUMERIC
from backends.builtin.tasks.solution_checks import check_sums, numbered
from backends.builtin.tasks.types import TaskProblem
from backends.builtin.tasks.wording import join_and
from backends.builtin.tasks.worked_solution import think

NUM_FACTS = {3: 2, 4: 4, 5: 6}

_CAPITAL_CHOICE = (
    "Which city is the capital of {c}: {l}?",
    "What is the capital of {c}? Choose from {l}.",
    "One of these is the capital of {c}: {l}. Which one?",
)
_COUNTRY_CHOICE = (
    "{k} is the capital of which country: {l}?",
    "Which of these countries has {k} as its capital: {l}?",
)
_CAPITALS = (
    "What are the capitals of {l}?",
    "Name the capitals of {l}, in this order.",
    "Give me the capital of each of these: {l}.",
)
_TOTALS = (
    "What is {l}?",
    "Work out {l}.",
    "Can you compute {l}?",
)


def _choice(rng: Random) -> TaskProblem:
    countries = rng.sample(list(CAPITALS), rng.randint(3, 4))
    country = rng.choice(countries)
    if rng.random() < 0.5:
        options = ", ".join(CAPITALS[c] for c in countries)
        question, answer = rng.choice(_CAPITAL_CHOICE).format(c=country, l=options), CAPITALS[country]
        asked = f"the capital of {country}, out of {options}."
    else:
        options = ", ".join(countries)
        question, answer = rng.choice(_COUNTRY_CHOICE).format(k=CAPITALS[country], l=options), country
        asked = f"the country of {CAPITALS[country]}, out of {options}."
    reasoning = think(
        f"{answer} of {options}",
        asked=asked,
        plan="recall the pair, then see that no other fits.",
        steps=[f"{country}: {CAPITALS[country]}"],
        answer=answer,
        checks=_sure_of_choice(countries, country),
    )
    return TaskProblem(f"{answer} of {options}", question, answer, reasoning)


def work_capital(country: str, asked: str, answer: str) -> str:
    """Return the worked solution of one pair, either way round."""
    capital = CAPITALS[country]
    checks = [f"{capital} is the capital of {country}.", f"{country} has the capital {capital}."]
    steps = [f"{country}: {capital}"]
    return think(country + asked, asked=asked, plan="recall the pair.", steps=steps, answer=answer, checks=checks)


def _sure_of_choice(countries: list[str], chosen: str) -> Iterator[str]:
    others = [country for country in countries if country != chosen]
    yield f"{CAPITALS[chosen]} is the capital of {chosen}."
    for country in others:
        yield f"{CAPITALS[country]} is the capital of {country}, not of {chosen}."
    yield f"Numbered: {numbered(countries)}."
    yield f"Their capitals: {numbered(CAPITALS[country] for country in countries)}."
    yield f"So {chosen} is number {countries.index(chosen) + 1} of {len(countries)}."


def _list(rng: Random) -> TaskProblem:
    countries = rng.sample(list(CAPITALS), rng.randint(2, 3))
    capitals = [CAPITALS[c] for c in countries]
    reasoning = think(
        " ".join(countries),
        asked=f"the capitals of {', '.join(countries)}.",
        plan="one country after the other, in this order.",
        steps=[f"{c}: {k}" for c, k in zip(countries, capitals, strict=True)],
        answer=", ".join(capitals),
        checks=_sure_of_list(countries),
    )
    return TaskProblem(
        "capitals " + " ".join(countries),
        rng.choice(_CAPITALS).format(l=join_and(countries)),
        ", ".join(capitals),
        reasoning,
    )


def _sure_of_list(countries: list[str]) -> Iterator[str]:
    yield f"{len(countries)} countries and {len(countries)} capitals."
    for country in countries:
        yield f"{CAPITALS[country]} is the capital of {country}."
    yield f"Numbered: {numbered(countries)}."
    yield f"Their capitals: {numbered(CAPITALS[country] for country in countries)}."


def _total(count: int, rng: Random) -> TaskProblem:
    said, key, facts, sums, total = "", [], [], [], 0
    for place in range(count):
        phrase, table = rng.choices(NUMERIC, weights=(5, 2, 2, 2))[0]
        entry = rng.choice(list(table))
        value = table[entry]
        facts.append(f"{entry}={value}")
        minus = place > 0 and value <= total and rng.random() < 0.35
        sign = "-" if minus else "+"
        key.append(f"{sign}{entry}")
        new = total - value if minus else total + value
        if place:
            said += (" minus " if minus else " plus ") + phrase.format(x=entry)
            sums.append(f"{total}{sign}{value}={new}")
        else:
            said = phrase.format(x=entry)
        total = new
    reasoning = think(
        "".join(key),
        asked=f"{''.join(key)[1:]}.",
        plan="recall each number, then add up from the left.",
        steps=[*facts, *sums],
        answer=str(total),
        checks=check_sums(sums),
    )
    return TaskProblem("".join(key), rng.choice(_TOTALS).format(l=said), str(total), reasoning)


def draw(grade: int, rng: Random) -> TaskProblem:
    """Draw one fact among choices at grade 1, a sum over six facts at grade 5."""
    if grade == 1:
        return _choice(rng)
    return _list(rng) if grade == 2 else _total(NUM_FACTS[grade], rng)
