"""Reading a price list given in the prompt, and adding up a bill."""

from __future__ import annotations

from random import Random

from backends.builtin.tasks.types import Problem
from backends.builtin.tasks.wording import NAMES, THINGS, join_and

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


def draw(grade: int, rng: Random) -> Problem:
    """One price at grade 1; four products, their sum and the change at grade 5."""
    things = rng.sample(THINGS, {1: rng.randint(2, 4), 4: 5, 5: 5}.get(grade, rng.randint(3, 5)))
    asked_first = rng.random() < 0.4
    prices = {t: rng.randint(2, 29) if grade > 1 else rng.randint(2, 99) for t in things}
    shown = ", ".join(f"{t} {p}" for t, p in prices.items())
    listing = rng.choice(_LISTS).format(l=shown)
    if grade == 1:
        thing = rng.choice(things)
        question = _told(listing, rng.choice(_ONE).format(t=thing), asked_first)
        return Problem(f"{thing} of {shown}", question, str(prices[thing]), f"list: {thing} {prices[thing]}")
    bought = [(rng.randint(2, 9), t) for t in rng.sample(things, NUM_BOUGHT[grade])]
    total, steps = _bill(bought, prices)
    basket = join_and([f"{count} {t}" for count, t in bought])
    key = f"{basket} of {shown}"
    person = rng.choice(NAMES)
    if grade == 5:
        paid = total + rng.randint(1, 99)
        ask = rng.choice(_CHANGE).format(p=person, l=basket, c=paid)
        steps.append(f"{paid}-{total}={paid - total}")
        return Problem(f"{key} {paid}", _told(listing, ask, asked_first), str(paid - total), "\n".join(steps))
    ask = rng.choice(_BILL).format(p=person, l=basket)
    return Problem(key, _told(listing, ask, asked_first), str(total), "\n".join(steps))
