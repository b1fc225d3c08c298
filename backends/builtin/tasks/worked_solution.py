"""Writes down a worked solution: the question again, a plan, the steps, checks, the answer.

The effort is about the same whatever the task: a solution is checked in one way after another until it has its length,
so that a task of one step is looked at from several sides and a task of seven steps is mostly steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from zlib import crc32

# Tokens of a worked solution, as far as checks may fill it; steps alone may take more.
EFFORT = 150
# Digits and capitals are tokens of their own; so is a space before a digit.
_PIECES = re.compile(r"\d| (?=\d)|[A-Z]| ?[a-z]{1,6}|[^\sA-Za-z\d]+|\n")

_ASKED = ("Asked", "The question")
_PLAN = ("Plan", "The way")
_CHECK = ("Now I check.", "A check follows.")
_ANSWER = ("So the answer is", "The answer is")


def estimated_tokens(text: str) -> int:
    """Estimate how many tokens a text takes, without a tokenizer."""
    return len(_PIECES.findall(text))


def pick(options: Sequence[str], key: str) -> str:
    """Return one wording for a problem: the first for three problems in four, the others for the rest.

    A reader who writes down the likeliest word then says the first, and so does whoever drafts for it.
    """
    roll = crc32(key.encode()) % (4 * (len(options) - 1)) if len(options) > 1 else 0
    return options[roll + 1] if roll < len(options) - 1 else options[0]


def think(
    key: str, *, asked: str, plan: str, steps: Iterable[str], answer: str, checks: Iterable[str], effort: int = EFFORT
) -> str:
    """Write a solution down, a line a step.

    Parameters
    ----------
    key : the problem's canonical form; it chooses among wordings
    asked : the question again, with its figures
    plan : how it will be solved, in some words
    steps : each derived from the question and the steps before
    answer : what the steps come to
    checks : ways to be sure, most telling first; the first is always written, the others while ``effort`` lasts
    effort : tokens at which no further check is begun
    """
    lines = [f"{pick(_ASKED, key)}: {asked}", f"{pick(_PLAN, key + 'p')}: {plan}", *steps]
    close = f"{pick(_ANSWER, key + 'a')} {answer}"
    head = pick(_CHECK, key + "c")
    spent = estimated_tokens("\n".join([*lines, head, close])) + 4
    made: list[str] = []
    for check in checks:
        spent += estimated_tokens(check) + 1
        if made and spent > effort:
            break
        made.append(check)
    if made:
        lines += [head, *made]
    return "\n".join([*lines, close])
