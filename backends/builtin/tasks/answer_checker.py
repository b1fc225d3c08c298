"""Decides whether a text's final answer is the task's answer.

The text may wrap the answer in a sentence, in Markdown or after visible thinking. What does not count is a text that
merely contains the right figure among others: without a clear final answer it is wrong.
"""

from __future__ import annotations

import json
import re

from backends.builtin.tasks.types import Task

_THINKING = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w:]|\.\d)")
_TIME = re.compile(r"\b\d{1,2}:\d{2}\b")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
_MARKER = re.compile(
    r"(?:\b(?:final\s+)?(?:answer|result|total|output|value)\b(?:\s+(?:is|are|was|will\s+be)\b)?\s*[:=]?|\b(?:is|are|gives?|makes?|equals?|leaves?|get)\b:?|=|:)\s*",
    re.IGNORECASE,
)
_HEDGES = frozenset({"or", "not", "but", "so", "maybe", "either", "neither", "no"})
_FENCE = re.compile(r"\A```\w*\n(.*?)\n?```\Z", re.DOTALL)


def _plain(text: str) -> str:
    """Return a text in lower case, one space between words, no Markdown emphasis, no quotes or full stop around."""
    text = re.sub(r"\*\*|__|`|\\boxed|\$", "", text)
    text = re.sub(r",?\s+and\s+", ", ", text.casefold()) if "," in text or " and " in text else text.casefold()
    text = re.sub(r"\s*,\s*", ", ", text)
    return re.sub(r"\s+", " ", text).strip().strip("\"'“”‘’").rstrip(".!").strip().strip("\"'“”‘’")


def _same_json(answer: str, text: str) -> bool:
    fenced = _FENCE.match(text.strip())
    try:
        return bool(json.loads(fenced.group(1) if fenced else text) == json.loads(answer))
    except (ValueError, RecursionError):
        return False


def _same_figure(pattern: re.Pattern[str], answer: str, text: str, prompt: str) -> bool:
    """Return whether the figure a text ends on, or the only one that the prompt did not give, is the answer."""
    found = pattern.findall(text)
    if not found:
        return False
    if len(set(found)) == 1:
        return _equal(found[0], answer)
    given = set(pattern.findall(_THOUSANDS.sub("", prompt)))
    sentences = [s for s in re.split(r"(?<=[.!?])\s+|\n+", text.strip()) if s]
    # "The answer is 7." settles it; "It may be 6, 7 or 8." and "6 7 8" do not.
    tail = _MARKER.split(sentences[-1])[-1] if _MARKER.search(sentences[-1]) else ""
    closing = pattern.findall(tail)
    if len(closing) == 1 and pattern.match(tail.lstrip("*_`$ ")):
        return _equal(closing[0], answer)
    if len(sentences) > 1 or _hedged(text):
        return False
    new = [f for f in found if f not in given]
    if new:
        return len(set(new)) == 1 and _equal(new[0], answer)
    # All figures are the prompt's: "52 is larger than 34" names its answer first.
    return bool(re.match(rf"\W*{re.escape(answer)}\s+(?:is|has|comes|was)\b", text))


def _equal(figure: str, answer: str) -> bool:
    if ":" in answer:
        return figure.zfill(5) == answer.zfill(5)
    return float(figure) == float(answer)


def _hedged(text: str) -> bool:
    return not _HEDGES.isdisjoint(re.findall(r"[a-z]+", text.casefold()))


def _same_words(answer: str, text: str) -> bool:
    """Return whether a text, its last line, what follows its last marker, or its sentence's subject is the answer."""
    wanted = _plain(answer)
    lines = [line for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return False
    last = lines[-1]
    if wanted in (_plain(" ".join(lines)), _plain(last)):
        return True
    if _hedged(last):
        return False
    if wanted == _plain(_MARKER.split(last)[-1]):
        return True
    said = _plain(last)
    rest = said.removeprefix(wanted)
    return (
        rest != said
        and "," not in rest
        and bool(re.match(r" (is|has|was|holds|comes|are|stands)\b[^.;!?,]{0,60}$", rest))
    )


def check(task: Task, text: str) -> bool:
    """Return whether ``text`` gives the task's answer as its final answer.

    Thinking between ``<think>`` and ``</think>`` is dropped first; thinking that never ends leaves no answer.
    """
    # A text that repeats its question has not yet answered it.
    text = _THINKING.sub("", text).replace(task.prompt, "").strip()
    answer = task.answer
    if answer.startswith("{") and '"' in answer:
        return _same_json(answer, text)
    if text == answer:
        return True
    if re.fullmatch(r"-?\d+", answer):
        return _same_figure(_NUMBER, answer, _THOUSANDS.sub("", text).replace("$", ""), task.prompt)
    if _TIME.fullmatch(answer):
        return _same_figure(_TIME, answer, text, task.prompt)
    return _same_words(answer, text)
