"""Holds the fixed tables of facts that the look-up family asks about."""

from __future__ import annotations

CAPITALS = {
    "France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Germany": "Berlin", "Poland": "Warsaw",
    "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Ireland": "Dublin",
    "Portugal": "Lisbon", "Greece": "Athens", "Austria": "Vienna", "Hungary": "Budapest", "Belgium": "Brussels",
    "Russia": "Moscow", "Turkey": "Ankara", "Egypt": "Cairo", "Kenya": "Nairobi", "Ghana": "Accra",
    "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Iran": "Tehran", "Thailand": "Bangkok",
    "Peru": "Lima", "Chile": "Santiago", "Cuba": "Havana", "Canada": "Ottawa", "Mexico": "Mexico City",
}  # fmt: skip

ATOMIC_NUMBERS = {
    "hydrogen": 1, "helium": 2, "lithium": 3, "carbon": 6, "nitrogen": 7, "oxygen": 8, "neon": 10, "sodium": 11,
    "magnesium": 12, "silicon": 14, "sulfur": 16, "chlorine": 17, "argon": 18, "calcium": 20, "iron": 26,
    "nickel": 28, "copper": 29, "zinc": 30, "silver": 47, "tin": 50, "gold": 79, "lead": 82,
}  # fmt: skip

LEGS = {"spider": 8, "ant": 6, "horse": 4, "hen": 2, "crab": 10, "snake": 0, "frog": 4, "bee": 6}
SIDES = {"triangle": 3, "square": 4, "pentagon": 5, "hexagon": 6, "octagon": 8, "decagon": 10}
DAYS_OF_MONTH = {
    "January": 31, "February": 28, "March": 31, "April": 30, "May": 31, "June": 30, "July": 31, "August": 31,
    "September": 30, "October": 31, "November": 30, "December": 31,
}  # fmt: skip

# How each numeric table is spoken of: the phrase and its entries.
NUMERIC: tuple[tuple[str, dict[str, int]], ...] = (
    ("the atomic number of {x}", ATOMIC_NUMBERS),
    ("the number of legs of a {x}", LEGS),
    ("the number of sides of a {x}", SIDES),
    ("the number of days in {x}", DAYS_OF_MONTH),
)

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = tuple(DAYS_OF_MONTH)
