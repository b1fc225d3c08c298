"""Draws questions of clock times, weekdays and dates of a common year."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from backends.builtin.tasks.facts import DAYS_OF_MONTH, MONTHS, WEEKDAYS
from backends.builtin.tasks.solution_checks import check_sums, running_sums
from backends.builtin.tasks.types import TaskProblem
from backends.builtin.tasks.wording import join_and
from backends.builtin.tasks.worked_solution import think

_ENDS = (
    "A film starts at {t} and lasts {d}. When does it end?",
    "It is {t} now. What time will it be in {d}?",
    "The train leaves at {t} and the ride takes {d}. When does it arrive?",
    "What time is it {d} after {t}?",
)
_WEEKDAY = (
    "Today is {w}. What day of the week is it in {n} days?",
    "What day of the week comes {n} days after {w}?",
    "If the first day is a {w}, which weekday is {n} days later?",
)
_DATE = (
    "What is the date {n} days after {m} {d}? It is not a leap year.",
    "In a common year, which date is {n} days after {m} {d}?",
    "A parcel sent on {m} {d} arrives {n} days later. On what date is that? It is not a leap year.",
)
_LEGS = (
    "We leave at {t}. The parts of the trip take {l} minutes. When do we arrive?",
    "A class starts at {t}. Its parts last {l} minutes. When does it end?",
    "Starting at {t}, I work through tasks of {l} minutes. At what time am I done?",
)


def _clock(minutes: int) -> str:
    hour, minute = divmod(minutes % 1440, 60)
    return f"{hour:02d}:{minute:02d}"


def _end(grade: int, rng: Random) -> TaskProblem:
    hour, minute = rng.randint(0, 20), rng.randint(0, 59)
    if grade == 1:
        minute = rng.randint(0, 48)
        length = rng.randint(5, 59 - minute)
        said = f"{length} minutes"
    else:
        hours, extra = rng.randint(1, 3), rng.randint(5, 58)
        length = hours * 60 + extra
        said = f"{hours} hour{'s' if hours > 1 else ''} and {extra} minutes"
    start = hour * 60 + minute
    end = _clock(start + length)
    total = minute + length % 60
    carried = f"{minute}+{length % 60}={total}" + (f"\n{total}-60={total - 60}" if total >= 60 else "")
    steps = [carried, end]
    reasoning = think(
        f"{start}+{length}",
        asked=f"the time {said} after {_clock(start)}.",
        plan="add the minutes, carry a full hour, then add the hours.",
        steps=steps,
        answer=end,
        checks=_sure_of_clock(start, length, steps),
    )
    return TaskProblem(f"{start}+{length}", rng.choice(_ENDS).format(t=_clock(start), d=said), end, reasoning)


def _sure_of_clock(start: int, length: int, steps: list[str]) -> Iterator[str]:
    hours, rest = divmod(length, 60)
    middle = _clock(start + hours * 60)
    if hours:
        yield f"Hours first: {_clock(start)} and {hours}h is {middle}, and {rest} more is {_clock(start + length)}."
    yield f"Back: {_clock(start + length)} less {hours}h{rest} is {_clock(start)}."
    to_hour = 60 - start % 60
    if to_hour < 60 and to_hour <= rest:
        yield f"To the full hour it takes {to_hour}: 60-{start % 60}={to_hour}, then {rest}-{to_hour}={rest - to_hour}."
    yield from check_sums(steps)


def _weekday(rng: Random) -> TaskProblem:
    start, days = rng.randrange(7), rng.randint(10, 200)
    rest = days % 7
    day = WEEKDAYS[(start + rest) % 7]
    walk = ", ".join(WEEKDAYS[(start + i) % 7] for i in range(rest + 1))
    steps = [f"{days}-{days - rest}={rest}", walk]
    reasoning = think(
        f"{start}+{days}",
        asked=f"the weekday {days} days after {WEEKDAYS[start]}.",
        plan="whole weeks change nothing, so count the rest.",
        steps=steps,
        answer=day,
        checks=_sure_of_weekday(start, days, steps),
    )
    return TaskProblem(f"{start}+{days}", rng.choice(_WEEKDAY).format(w=WEEKDAYS[start], n=days), day, reasoning)


def _sure_of_weekday(start: int, days: int, steps: list[str]) -> Iterator[str]:
    weeks, rest = divmod(days, 7)
    yield f"{weeks}*7={weeks * 7}, and {weeks * 7}+{rest}={days}."
    yield (
        f"Back from {WEEKDAYS[(start + rest) % 7]}: "
        + ", ".join(WEEKDAYS[(start + rest - i) % 7] for i in range(rest + 1))
        + "."
    )
    yield from check_sums(steps)


def _date(most: int, rng: Random) -> TaskProblem:
    month, ahead = rng.randrange(12), rng.randint(most // 3, most)
    day = rng.randint(1, DAYS_OF_MONTH[MONTHS[month]])
    total, at = day + ahead, month
    steps = [f"{day}+{ahead}={total}"]
    while total > (length := DAYS_OF_MONTH[MONTHS[at]]):
        steps.append(f"{MONTHS[at]}: {total}-{length}={total - length}")
        total, at = total - length, (at + 1) % 12
    answer = f"{MONTHS[at]} {total}"
    question = rng.choice(_DATE).format(n=ahead, m=MONTHS[month], d=day)
    steps.append(answer)
    reasoning = think(
        f"{month}/{day}+{ahead}",
        asked=f"the date {ahead} days after {MONTHS[month]} {day}.",
        plan="add the days, then take off month after month.",
        steps=steps,
        answer=answer,
        checks=_sure_of_date(month, at, total, steps),
    )
    return TaskProblem(f"{month}/{day}+{ahead}", question, answer, reasoning)


def _sure_of_date(month: int, at: int, day: int, steps: list[str]) -> Iterator[str]:
    yield f"{MONTHS[at]} has {DAYS_OF_MONTH[MONTHS[at]]} days, so {day} is a day of it."
    if at != month:
        yield f"{MONTHS[month]} has {DAYS_OF_MONTH[MONTHS[month]]} days, and {MONTHS[(month + 1) % 12]} comes after it."
    yield from check_sums(steps)


def _trip(count: int, rng: Random) -> TaskProblem:
    start = rng.randint(5, 15) * 60 + rng.randint(0, 59)
    parts = [rng.randint(11, 95) for _ in range(count)]
    total = sum(parts)
    hours, rest = divmod(total, 60)
    steps = [*running_sums(parts), f"{total}={hours}h{rest}"]
    minutes = start % 60 + rest
    steps.append(f"{start % 60}+{rest}={minutes}" + (f"\n{minutes}-60={minutes - 60}" if minutes >= 60 else ""))
    end = _clock(start + total)
    question = rng.choice(_LEGS).format(t=_clock(start), l=join_and([str(p) for p in parts]))
    steps.append(end)
    reasoning = think(
        f"{start}+{parts}",
        asked=f"the time {', '.join(map(str, parts))} minutes after {_clock(start)}.",
        plan="add the parts, make hours of them, add those.",
        steps=steps,
        answer=end,
        checks=_sure_of_trip(start, total, steps),
    )
    return TaskProblem(f"{start}+{parts}", question, end, reasoning)


def _sure_of_trip(start: int, total: int, steps: list[str]) -> Iterator[str]:
    hours, rest = divmod(total, 60)
    yield f"{hours}*60={hours * 60}, and {hours * 60}+{rest}={total}."
    yield f"Back: {_clock(start + total)} less {hours}h{rest} is {_clock(start)}."
    yield from check_sums(steps)


def draw(grade: int, rng: Random) -> TaskProblem:
    """Draw minutes within the hour at grade 1; dates months ahead and trips of many legs at grade 5."""
    if grade <= 2:
        return _end(grade, rng)
    if grade == 3:
        return _weekday(rng) if rng.random() < 0.4 else _date(28, rng)
    if rng.random() < 0.5:
        return _date(90 if grade == 4 else 300, rng)
    return _trip(3 if grade == 4 else 5, rng)
