"""Solves the built-in tasks from their questions alone, as somebody would who never saw how they are drawn."""

from __future__ import annotations

import ast
import itertools
import json
import operator
import re
from collections.abc import Callable
from datetime import date, timedelta
from typing import Any

from backends.builtin.tasks.facts import CAPITALS, NUMERIC

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_NUMBER_WORDS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6}


def numbers_in(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"\d+", text)]


def value_of(expression: str) -> int:
    """Evaluate sums, differences and products of whole numbers."""

    def walk(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](walk(node.left), walk(node.right))
        assert isinstance(node, ast.Constant)
        return int(node.value)

    return walk(ast.parse(expression.strip(), mode="eval").body)


def arithmetic(question: str) -> str:
    for word, sign in {"plus": "+", "minus": "-", "times": "*"}.items():
        question = question.replace(f" {word} ", f" {sign} ")
    (found,) = re.findall(r"[\d(][\d\s()+*-]*[\d)]", question)
    return str(value_of(found))


def word_problems(question: str) -> str:
    first, *rest = re.split(r"(?<=[.?]) ", question)
    start = re.fullmatch(r"(?:At first, )?(\w+) (?:has|starts with|owns) (\d+) \w+\.", first)
    assert start is not None, first
    person, have = start[1], int(start[2])
    for sentence in rest[:-1]:
        if not re.match(rf"(?:Then |Next, |Later |After that, )?{person} ", sentence):
            continue  # about somebody or something else
        have = _after_event(have, sentence)
    return str(have)


def _after_event(have: int, sentence: str) -> int:
    found = numbers_in(sentence)
    if "half of them" in sentence:
        return have // 2
    if "double" in sentence or "twice" in sentence:
        return have * 2
    if "triple" in sentence or "three times" in sentence:
        return have * 3
    if "shares them equally" in sentence:
        return have // found[0]
    if len(found) == 2:
        return have + found[0] * found[1]
    is_gain = any(word in sentence for word in (" buys ", " gets ", " finds ", " wins ", " is given "))
    return have + found[0] if is_gain else have - found[0]


def comparison(question: str) -> str:
    values = [value_of(found) for found in re.findall(r"\d+(?: [*+-] \d+)*", question)]
    if re.search("difference|subtract|exceed|far apart", question):
        return str(max(values) - min(values))
    is_low = re.search(r"\b(smaller|less|lower|smallest|lowest)\b", question)
    return str(min(values) if is_low else max(values))


def sorting(question: str) -> str:
    values = numbers_in(question)

    def digit_sum(number: int) -> int:
        return sum(int(digit) for digit in str(number))

    if "digit" in question:
        order = sorted(values, key=digit_sum)
        is_added = "Then add" in question or " plus " in question
        return str(order[0] + order[-1]) if is_added else ", ".join(map(str, order))
    is_down = re.search("from largest|descending|from high", question) is not None
    order = sorted(values, reverse=is_down)
    place = re.search(r"(?:comes|one is|number is) (\w+th|second|third|first)\b", question)
    return str(order[_ORDINALS.index(place[1])]) if place else ", ".join(map(str, order))


_EDITS: dict[str, Callable[[str], str]] = {
    r"reverse it|write it backwards": lambda s: "".join(reversed(s)),
    r"move the first letter to the end|put the first letter last": lambda s: s[1:] + s[:1],
    r"move the last letter to the front|put the last letter first": lambda s: s[-1:] + s[:-1],
    r"swap the first and the last letter|exchange the two end letters": lambda s: s[-1] + s[1:-1] + s[0],
    r"(?:swap|exchange) the first two letters": lambda s: s[1::-1] + s[2:],
    r"(?:swap|exchange) the last two letters": lambda s: s[:-2] + s[:-3:-1],
    r"(?:remove|drop) the first letter": lambda s: s[1:],
    r"(?:remove|drop) the last letter": lambda s: s[:-1],
    r"repeat the last letter|write the last letter once more": lambda s: s + s[-1],
    r"repeat the first letter|write the first letter once more at the front": lambda s: s[0] + s,
}


def strings(question: str) -> str:
    start = re.search(r"\b[A-Z]{4,}\b", question)
    assert start is not None
    code, rest = start[0], question[start.end() :]
    kinds = "|".join(f"(?P<e{number}>{pattern})" for number, pattern in enumerate(_EDITS))
    swap = r"(?:replace every|change each) (?P<old>[A-Z]) (?:with|to) (?P<new>[A-Z])"
    for found in re.finditer(f"{kinds}|{swap}", rest, re.IGNORECASE):
        if found["old"]:
            code = code.replace(found["old"], found["new"])
            continue
        assert found.lastgroup is not None
        code = list(_EDITS.values())[int(found.lastgroup[1:])](code)
    return code


def dates(question: str) -> str:
    clock = re.search(r"(\d\d):(\d\d)", question)
    if clock is not None:
        start, rest = 60 * int(clock[1]) + int(clock[2]), question.replace(clock[0], "")
        hours = re.search(r"(\d+) hours?", rest)
        minutes = numbers_in(rest.replace(hours[0], "") if hours else rest)
        end = start + sum(minutes) + (60 * int(hours[1]) if hours else 0)
        return f"{end // 60 % 24:02d}:{end % 60:02d}"
    (weekday,) = re.findall("|".join(_DAYS), question) or [None]
    if weekday is not None:
        return _DAYS[(_DAYS.index(weekday) + numbers_in(question)[0]) % 7]
    months = [date(2023, month, 1).strftime("%B") for month in range(1, 13)]
    found = re.search(rf"({'|'.join(months)}) (\d+)", question)
    assert found is not None
    (ahead,) = numbers_in(question.replace(found[0], ""))
    # Common years only: the day of the year goes round after 365.
    day_of_year = date(2023, months.index(found[1]) + 1, int(found[2])).timetuple().tm_yday + ahead
    day = date(2023, 1, 1) + timedelta(days=(day_of_year - 1) % 365)
    return f"{day:%B} {day.day}"


_SMALL = {
    ("meters", "centimeters"): 100, ("kilometers", "meters"): 1000, ("kilograms", "grams"): 1000,
    ("liters", "milliliters"): 1000, ("centimeters", "millimeters"): 10, ("dollars", "cents"): 100,
    ("hours", "minutes"): 60, ("minutes", "seconds"): 60, ("weeks", "days"): 7, ("dozens", "pieces"): 12,
    ("feet", "inches"): 12, ("days", "hours"): 24,
}  # fmt: skip


def units(question: str) -> str:
    times = 1
    for pattern in (r"are (\d+) pieces of (?=.* each)", r"are (\d+) such parts"):
        if found := re.search(pattern, question):
            times, question = int(found[1]), question.replace(found[0], "are ")
    less = re.search(r"(?:loses|Take|minus) (\d+) (\w+)", question)
    if less:
        question = question.replace(less[0], "")
    amounts = [(int(number), unit) for number, unit in re.findall(r"(\d+) ([a-z]+)", question)]
    named = {unit for unit in re.findall(r"[a-z]+", question) if any(unit in pair for pair in _SMALL)}
    ((_, small), factor) = next((pair, factor) for pair, factor in _SMALL.items() if named == set(pair))
    total = sum(number if unit == small else number * factor for number, unit in amounts)
    return str(total * times - (int(less[1]) if less else 0))


def lookups(question: str) -> str:
    countries = [country for country in re.findall(r"[A-Z]\w+", question) if country in CAPITALS]
    if "capital" not in question:
        total = 0
        pattern = "|".join(re.escape(phrase).replace(r"\{x\}", r"(\w+)") for phrase, _ in NUMERIC)
        for found in re.finditer(rf"(minus )?(?:{pattern})", question):
            minus, *entries = found.groups()
            value = next(table[entry] for entry, (_, table) in zip(entries, NUMERIC, strict=True) if entry)
            total += -value if minus else value
        return str(total)
    if "capitals" in question or "capital of each" in question:
        return ", ".join(CAPITALS[country] for country in countries)
    asked = re.search(r"the capital of (\w+)[:?]", question)
    if asked is not None:
        return CAPITALS[asked[1]]
    (answer,) = {country for country in countries if CAPITALS[country] in question}
    return answer


def prices(question: str) -> str:
    listing = re.search(r"(?:: |has these prices: )((?:[a-z]+ \d+(?:, )?)+)\.", question)
    assert listing is not None, question
    price = {thing: int(cost) for thing, cost in re.findall(r"([a-z]+) (\d+)", listing[1])}
    ask = question.replace(listing[0], " ")
    bought = [(int(count), thing) for count, thing in re.findall(r"(\d+) ([a-z]+)", ask) if thing in price]
    if not bought:
        (thing,) = (thing for thing in price if re.search(rf"\b{thing}\b", ask))
        return str(price[thing])
    total = sum(count * price[thing] for count, thing in bought)
    paid = re.search(r"(\d+) dollars", ask)
    return str(int(paid[1]) - total if paid else total)


def sequences(question: str) -> str:
    rule = re.search(r"(double it|multiply it by 3) and (add|subtract) (\d+)", question)
    if rule:
        start, *_, steps = numbers_in(question.replace(rule[0], ""))
        value = start
        for _ in range(steps):
            value = value * (2 if rule[1] == "double it" else 3) + int(rule[3]) * (1 if rule[2] == "add" else -1)
        return str(value)
    terms = numbers_in(question)
    ahead = next((place for place, word in enumerate(_ORDINALS, 1) if re.search(rf"\b{word}\b", question)), 1)
    for _ in range(ahead):
        if "sum of the two" in question:
            terms.append(terms[-1] + terms[-2])
        else:
            steps = [after - before for before, after in itertools.pairwise(terms)]
            terms.append(terms[-1] + 2 * steps[-1] - steps[-2])
    return str(terms[-1])


def logic(question: str) -> str:
    if re.search(r"\bball\b", question):
        passes = dict(re.findall(r"(\w+) (?:passes|hands|gives) it to (\w+)\.", question))
        (holder,) = set(passes) - set(passes.values())
        while holder in passes:
            holder = passes[holder]
        return holder
    facts = re.findall(r"(\w+) is (\w+) than (\w+)\.", question)
    if facts:
        asked = re.search(r"Who is the (\w+)est\?", question)
        assert asked is not None
        stem = asked[1]
        # "taller" and "tallest" share their beginning; what is said the other way round is turned.
        above = {(a, b) if word.startswith(stem[:3]) else (b, a) for a, word, b in facts}
        (top,) = {a for a, _ in above} - {b for _, b in above}
        return top
    row = re.search(r"[A-Z]\w+(?:, [A-Z]\w+)+", question)
    assert row is not None
    names = row[0].split(", ")
    for a, b in re.findall(r"(\w+) (?:and|changes places with) (\w+)(?: swap| trade|\.)", question):
        i, j = names.index(a), names.index(b)
        names[i], names[j] = names[j], names[i]
    return ", ".join(names)


def formats(question: str) -> str:
    if "JSON" in question and '"name"' in question:
        found = re.search(r"for (\w+), aged (\d+), from (\w+)|(\w+) is (\d+) years old and lives in (\w+)", question)
        assert found is not None
        name, age, city = [group for group in found.groups() if group]
        return json.dumps({"name": name, "age": int(age), "city": city})
    if "JSON" in question:
        values = numbers_in(question)
        high, low = max(values), min(values)
        figures: dict[str, Any] = {"count": len(values), "sum": sum(values), "max": high, "range": high - low}
        return json.dumps({key: figures[key] for key in re.findall(r'"(\w+)"', question)})
    if "brackets" in question:
        left, right = {"square": "[]", "round": "()", "curly": "{}"}[re.findall(r"(\w+) brackets", question)[0]]
        listed = re.search(r"\w+(?:, \w+)+(?= in |, each)", question)
        assert listed is not None
        return " ".join(f"{left}{word}{right}" for word in listed[0].split(", "))
    found = re.match(r"(?:Write the word|Repeat) (\w+) (\w+) times", question)
    assert found is not None
    separator = next(
        s for n, s in {"commas": ", ", "dashes": "-", "spaces": " ", "slashes": "/"}.items() if n in question
    )
    last = re.search(r"end with (\w+)", question)
    count = _NUMBER_WORDS.get(found[2]) or int(found[2])
    return separator.join([found[1]] * count + ([last[1]] if last else []))


def counting(question: str) -> str:
    points = dict(re.findall(r"\b([A-Z])=(\d+)", question))
    code = max(re.findall(r"\b[A-Z]{3,}\b", question), key=len)
    if points:
        return str(sum(int(points[letter]) for letter in code))
    letter = re.search(r"\b([B-HK-Z]|A)\b(?= (?:occur|in|found)\b)|does ([A-Z]) occur|often is ([A-Z])", question)
    if letter is None:
        return str(len(code))
    return str(code.count(next(group for group in letter.groups() if group)))


SOLVERS: dict[str, Callable[[str], str]] = {
    solver.__name__: solver
    for solver in (
        arithmetic, word_problems, comparison, sorting, strings, dates, units, lookups, prices, sequences, logic,
        formats, counting,
    )
}  # fmt: skip
