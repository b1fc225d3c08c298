"""Draws price lists to be read, and bills to be added up."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from backends.builtin.tasks.solution_checks import check_sums
from backends.builtin.tasks.types import TaskProblem
from backends.builtin.tasks.wording import NAMES, THINGS, join_and
from backends.builtin.tasks.worked_solution import think

_LISTS = (
    "Prices in dollars: {l}.",
    "The shop sells: {l}.",
    "Here is the price list in dollars: {l}.",
    "A stall has these prices: {l}.",
)
_ONE = ("What is the price of {t}?", "How much do {t} cost each?", "Look up the price of {t}.")
_BILL = (
    "{p} buys {l}. What does {p} pay?",
    "How much are {l} in total?",
    "What is the bill for {l}?",
)
_CHANGE = (
    "{p} buys {l} and pays with {c} dollars. How much change is there?",
    "How much is left of {c} dollars after buying {l}?",
)
NUM_BOUGHT = {2: 1, 3: 2, 4: 3, 5: 4}


def _bill(bought: list[tuple[int, str]], prices: dict[str, int]) -> tuple[int, list[str]]:
    steps, run = [], 0
    for place, (count, thing) in enumerate(bought):
        cost = count * prices[thing]
        # The entry is copied as it stands in the list: looking up is copying.
        steps.append(f"{count} * {thing} {prices[thing]}={cost}")
        if place:
            steps.append(f"{run}+{cost}={run + cost}")
        run += cost
    return run, steps


def _told(listing: str, ask: str, asked_first: bool) -> str:
    return f"{ask} {listing}" if asked_first else f"{listing} {ask}"


def _work_one(thing: str, prices: dict[str, int]) -> str:
    return think(
        f"{thing} {prices}",
        asked=f"the price of {thing}.",
        plan=f"find {thing} in the list.",
        steps=[f"list: {thing} {prices[thing]}"],
        answer=str(prices[thing]),
        checks=_sure_of_one(thing, prices),
    )


def _sure_of_one(thing: str, prices: dict[str, int]) -> Iterator[str]:
    entries = list(prices.items())
    yield f"The list again: {', '.join(f'{t} {p}' for t, p in entries)}."
    for place, (other, price) in enumerate(entries, 1):
        same = "that is what was asked" if other == thing else "that is something else"
        yield f"Entry {place}: {other}, {price}, {same}."
    for other, price in entries:
        if price != prices[thing]:
            yield f"Not {price}, that is the price of {other}."
    yield f"There are {len(entries)} entries, and {thing} stands there once."
    yield f"Backwards: {', '.join(f'{p} for {t}' for t, p in reversed(entries))}."
    in_order = sorted(entries, key=lambda entry: entry[1])
    yield f"From cheap to dear: {', '.join(f'{t} {p}' for t, p in in_order)}."


def _work(key: str, asked: str, bought: list[tuple[int, str]], prices: dict[str, int], steps: list[str]) -> str:
    return think(
        key,
        asked=asked,
        plan="count times price for each, and the sum.",
        steps=steps,
        answer=steps[-1].rpartition("=")[2],
        checks=_sure_of_bill(bought, prices, steps),
    )


def _sure_of_bill(bought: list[tuple[int, str]], prices: dict[str, int], steps: list[str]) -> Iterator[str]:
    products = [f"{count}*{prices[thing]}={count * prices[thing]}" for count, thing in bought]
    if len(products) == 1:
        yield f"The list again: {', '.join(f'{t} {p}' for t, p in prices.items())}."
    yield from check_sums([*products, *steps])


def draw(grade: int, rng: Random) -> TaskProblem:
    """Draw one price at grade 1; four products, their sum and the change at grade 5."""
    things = rng.sample(THINGS, {1: rng.randint(2, 4), 4: 5, 5: 5}.get(grade, rng.randint(3, 5)))
    asked_first = rng.random() < 0.4
    prices = {t: rng.randint(2, 29) if grade > 1 else rng.randint(2, 99) for t in things}
    shown = ", ".join(f"{t} {p}" for t, p in prices.items())
    listing = rng.choice(_LISTS).format(l=shown)
    if grade == 1:
        thing = rng.choice(things)
        question = _told(listing, rng.choice(_ONE).format(t=thing), asked_first)
        return TaskProblem(f"{thing} of {shown}", question, str(prices[thing]), _work_one(thing, prices))
    bought = [(rng.randint(2, 9), t) for t in rng.sample(things, NUM_BOUGHT[grade])]
    total, steps = _bill(bought, prices)
    basket = join_and([f"{count} {t}" for count, t in bought])
    key = f"{basket} of {shown}"
    person = rng.choice(NAMES)
    if grade == 5:
        paid = total + rng.randint(1, 99)
        ask = rng.choice(_CHANGE).format(p=person, l=basket, c=paid)
        steps.append(f"{paid}-{total}={paid - total}")
        reasoning = _work(key, f"{basket}, paid with {paid}.", bought, prices, steps)
        return TaskProblem(f"{key} {paid}", _told(listing, ask, asked_first), str(paid - total), reasoning)
    ask = rng.choice(_BILL).format(p=person, l=basket)
    reasoning = _work(key, f"the cost of {basket}.", bought, prices, steps)
    return TaskProblem(key, _told(listing, ask, asked_first), str(total), reasoning)
