"""Grades answers: against a reference, or against the top tier's answer.

A final answer (a number, a letter, a few words) decides where there is one. Two long texts are compared by their words,
which is weak evidence and reported as such: measured on open text, such a comparison tells good from bad in little more
than half of the cases (AUC 0.57 for word overlap, 0.50 for embedding similarity).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

from backends.builtin.tasks.answer_checker import check as check_task
from backends.builtin.tasks.types import Task

_THINKING = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
_MARKED = re.compile(
    r"(?:\\boxed\{([^{}]*)\}|####\s*(.+)|\b(?:final answer|answer|result)\b(?:\s+is)?\s*[:=]?\s*(?:is\s+)?(.+))", re.I
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# "A" and "I" are words as well: before a space they begin a sentence.
_CHOICE = re.compile(r"\A\(?([A-J])\)?(?:[.):]|\Z)|\A([B-HJ])\s")
_MAX_SHORT_WORDS = 8
_MAX_BRIEF_WORDS = 12
_MAX_CLOSING_WORDS = 25


def visible_text(text: str) -> str:
    """Return the answer without thinking; thinking that never ends leaves nothing."""
    return _THINKING.sub("", text).strip()


def normalise_answer(text: str) -> str:
    """Case, spacing, Markdown, quotes, thousands separators, currency and closing stops folded away."""
    folded = re.sub(r"\*\*|__|`|\$|€|£|\\boxed|[{}]", "", text.casefold())
    folded = re.sub(r"(?<=\d),(?=\d{3}\b)", "", folded)
    folded = re.sub(r"\s+", " ", folded).strip().strip("\"'“”‘’.,;:!() ")
    if _NUMBER.fullmatch(folded):
        number = float(folded)
        if abs(number) >= 1e15:
            # Beyond what a float holds exactly, the digits themselves are the number.
            return folded
        return str(int(number)) if number == int(number) else repr(number)
    return folded


def final_answer(text: str) -> str | None:
    """Return the final answer of a text in normal form: what is marked as one, a short text itself, or its last number.

    None where the text is open: long, unmarked and without numbers.
    """
    said = visible_text(text)
    if not said:
        return None
    marked = [next(group for group in m.groups() if group) for m in _MARKED.finditer(said) if any(m.groups())]
    candidate = marked[-1] if marked else said
    if choice := _CHOICE.match(candidate.strip()):
        return (choice.group(1) or choice.group(2)).casefold()
    normal = normalise_answer(candidate)
    if len(normal.split()) <= _MAX_SHORT_WORDS and (marked or not _NUMBER.search(normal)):
        return _only_number(normal) or normal
    numbers = _NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3}\b)", "", candidate))
    return normalise_answer(numbers[-1]) if numbers else None


def committed_answer(text: str) -> str | None:
    """Return the final answer that a text plainly ends on, in normal form; None where it only happens to hold a number.

    What is marked as the answer, what is nearly all that is said, or the number that closes a short last sentence. Of
    open texts about numbers, most hold one last number without meaning it as an answer.
    """
    said = visible_text(text)
    answer = final_answer(said)
    if answer is None or len(said.split()) <= _MAX_BRIEF_WORDS or _MARKED.search(said):
        return answer
    last = [part for part in re.split(r"(?<=[.!?])\s+|\n+", said) if part.strip()][-1]
    numbers = _NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3}\b)", "", last))
    is_closing = bool(numbers) and len(last.split()) <= _MAX_CLOSING_WORDS and normalise_answer(numbers[-1]) == answer
    return answer if is_closing else None


def _only_number(normal: str) -> str | None:
    numbers = set(_NUMBER.findall(normal))
    return normalise_answer(numbers.pop()) if len(numbers) == 1 else None


def word_overlap(one: str, other: str) -> float:
    """F1 of the two texts' words as bags, 0..1; 1 for two empty texts."""
    a, b = (Counter(re.findall(r"\w+", visible_text(text).casefold())) for text in (one, other))
    if not a and not b:
        return 1.0
    shared = sum((a & b).values())
    return 2 * shared / (sum(a.values()) + sum(b.values()))


def agreement(answer: str, top_answer: str) -> tuple[float, str]:
    """Return how far an answer agrees with the top tier's, 0..1, and by what: ``final_answer`` or ``word_overlap``."""
    if not visible_text(answer):
        return (1.0, "final_answer") if not visible_text(top_answer) else (0.0, "final_answer")
    mine, theirs = final_answer(answer), final_answer(top_answer)
    if mine is not None and theirs is not None:
        return float(mine == theirs), "final_answer"
    return word_overlap(answer, top_answer), "word_overlap"


def _check_final(prompt: str, reference: str, answer: str) -> bool:
    wanted = final_answer(reference)
    return final_answer(answer) == wanted if wanted is not None else normalise_answer(answer) == _plain(reference)


def _plain(text: str) -> str:
    return normalise_answer(visible_text(text))


def _check_exact(prompt: str, reference: str, answer: str) -> bool:
    return visible_text(answer) == reference.strip()


def _check_contains(prompt: str, reference: str, answer: str) -> bool:
    return normalise_answer(reference) in normalise_answer(visible_text(answer))


def _check_json(prompt: str, reference: str, answer: str) -> bool:
    bare = re.sub(r"\A```\w*\n|\n?```\Z", "", visible_text(answer))
    try:
        return bool(json.loads(bare) == json.loads(reference))
    except (ValueError, RecursionError):
        return False


def _check_builtin(prompt: str, reference: str, answer: str) -> bool:
    return check_task(Task("", "", 0, prompt, reference, ""), answer)


Checker = Callable[[str, str, str], bool]

CHECKERS: Mapping[str, Checker] = MappingProxyType(
    {
        "final_answer": _check_final,
        "exact": _check_exact,
        "contains": _check_contains,
        "json": _check_json,
        "builtin": _check_builtin,
    }
)
"""Name -> (prompt, reference, answer) -> right or not."""


def matches_reference(reference: str, answer: str) -> float:
    """Return 1 where an answer ends on what the reference says, else 0."""
    return float(CHECKERS["final_answer"]("", reference, answer))
