"""Defines a task, before and after it is dressed as a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

Split = Literal["train", "test"]

GRADES = (1, 2, 3, 4, 5)


@dataclass(frozen=True, slots=True)
class TaskProblem:
    """Holds one drawn problem.

    ``key`` is its canonical form, free of wording: two phrasings of a problem share it, and it alone decides between
    train and test. ``reasoning`` reaches the answer by steps each of which is one easy operation.
    """

    key: str
    question: str
    answer: str
    reasoning: str


@dataclass(frozen=True, slots=True)
class Task:
    """Holds one prompt with its reference answer.

    ``grade`` runs from 1 (one step) to 5 (seven or so dependent steps).
    """

    task_id: str
    family: str
    grade: int
    prompt: str
    answer: str
    reasoning: str


Draw = Callable[[int, Random], TaskProblem]
