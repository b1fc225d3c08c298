"""Names, things and small talk that dress a problem.

The small talk is drawn independently of the grade, so that a prompt's length says little about its difficulty.
"""

from __future__ import annotations

from random import Random

NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "Jack", "Kate", "Leo", "Maria",
    "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor",
)  # fmt: skip

THINGS = (
    "apples", "pears", "coins", "books", "stamps", "marbles", "cards", "shells", "pencils", "eggs", "stickers",
    "buttons", "plums", "beads", "tickets", "cookies",
)  # fmt: skip

WORDS = (
    "apple", "river", "stone", "cloud", "table", "lamp", "green", "house", "bread", "window", "garden", "paper",
    "horse", "music", "winter", "summer", "bridge", "forest", "orange", "silver", "candle", "market", "pocket",
    "island",
)  # fmt: skip

_OPENINGS = (
    "Hi!", "Hello there.", "Good morning.", "Quick question:", "Please help me with this.", "I need your help.",
    "Here is a question for you.", "Can you solve this?", "One more thing:",
    "My friend and I could not agree on this one.", "I am filling in a form at work and have to get this right.",
    "My daughter brought this home from school today and I would like to check her work before dinner.",
    "We were talking about this on the train this morning, and nobody in our group was quite sure about it.",
    "I hope you are having a good day. I have been thinking about the following for a while and want to be sure.",
    "This came up at the office while we were waiting for a meeting to start, and now everyone wants to know, "
    "so please take a look and tell me what you think.",
)  # fmt: skip

_CLOSINGS = (
    "Thanks!", "Thank you.", "Please answer briefly.", "Just the answer, please.", "Give only the final answer.",
    "I am in a hurry, so a short reply is fine.", "Thanks a lot for your help, I really appreciate it.",
    "There is no need to explain how you got there, the result is all that I need.",
)  # fmt: skip

_SHARE_OPENED = 0.35
_SHARE_CLOSED = 0.3


def dress(question: str, rng: Random) -> str:
    """Put small talk before and after a question, or neither."""
    parts = [question]
    if rng.random() < _SHARE_OPENED:
        parts.insert(0, rng.choice(_OPENINGS))
    if rng.random() < _SHARE_CLOSED:
        parts.append(rng.choice(_CLOSINGS))
    return " ".join(parts)


def join_and(parts: list[str]) -> str:
    """Return ``a``, ``a and b``, ``a, b and c``."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
