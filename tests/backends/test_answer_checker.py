"""The checker: tolerant of wrapping, not of guessing."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.builtin.tasks.answer_checker import check
from backends.builtin.tasks.task_generator import FAMILIES, draw_task
from backends.builtin.tasks.types import GRADES, Task

cells = st.tuples(st.sampled_from(sorted(FAMILIES)), st.sampled_from(GRADES), st.integers(0, 2**63))


def _task(answer: str, prompt: str = "What is 34 + 8?") -> Task:
    return Task("x-1-0", "x", 1, prompt, answer, "")


@pytest.mark.parametrize(
    ("answer", "prompt", "text"),
    [
        ("42", "What is 34 + 8?", "42"),
        ("42", "What is 34 + 8?", "The answer is 42."),
        ("42", "What is 34 + 8?", "34 + 8 = 42"),
        ("42", "What is 34 + 8?", "34 plus 8 is **42**."),
        ("42", "What is 34 + 8?", "Let me see. 30 + 8 = 38, 38 + 4 = 42.\nThe answer is 42."),
        ("42", "What is 34 + 8?", "42 dollars"),
        ("42", "What is 34 + 8?", "$42"),
        ("42", "What is 34 + 8?", "Final answer: 42"),
        ("42", "What is 34 + 8?", "42.0"),
        ("42", "What is 34 + 8?", "<think>\n34+8=41\n</think>\n\n42"),
        ("1250", "What is 1000 + 250?", "The total is 1,250."),
        ("52", "Which is larger, 34 or 52?", "52 is larger than 34."),
        ("52", "Which is larger, 34 or 52?", "The larger number is 52."),
        ("14:05", "It is 13:50. What time is it in 15 minutes?", "It will be 14:05."),
        ("14:05", "It is 13:50. What time is it in 15 minutes?", "13:50 plus 15 minutes is 14:05"),
        ("Lima", "Which city is the capital of Peru: Rome, Lima?", "The capital of Peru is Lima."),
        ("Lima", "Which city is the capital of Peru: Rome, Lima?", "lima"),
        ("Lima", "Which city is the capital of Peru: Rome, Lima?", "Lima is the capital of Peru."),
        ("3, 14, 25", "Sort 25, 3, 14.", "The sorted list is: 3, 14, 25."),
        ("3, 14, 25", "Sort 25, 3, 14.", "3,14,25"),
        ("3, 14, 25", "Sort 25, 3, 14.", "3, 14 and 25"),
        ("Paris, Rome", "What are the capitals of France and Italy?", "Paris and Rome"),
        ("May 30", "Which date is 125 days after January 25?", "That is May 30."),
        ('{"sum": 3, "max": 2}', "json", '{"max":2,"sum":3}'),
        ('{"sum": 3, "max": 2}', "json", '```json\n{"sum": 3, "max": 2}\n```'),
        ("KDRT", "Reverse TRDK.", "The result is KDRT."),
    ],
)
def test_wrapped_answers_are_accepted(answer: str, prompt: str, text: str) -> None:
    assert check(_task(answer, prompt), text)


@pytest.mark.parametrize(
    ("answer", "prompt", "text"),
    [
        ("42", "What is 34 + 8?", ""),
        ("42", "What is 34 + 8?", "41"),
        ("42", "What is 34 + 8?", "-42"),
        ("42", "What is 34 + 8?", "142"),
        ("42", "What is 34 + 8?", "4.2"),
        ("42", "What is 34 + 8?", "It is 41, 42 or 43."),
        ("42", "What is 34 + 8?", "40 41 42 43 44"),
        ("42", "What is 34 + 8?", "44 43 42"),
        ("42", "What is 34 + 8?", "Maybe 42, maybe 40."),
        ("42", "What is 34 + 8?", "The answer is not 41. It could be 42. Or 43."),
        ("42", "What is 34 + 8?", "<think>\n34+8=42"),
        ("42", "What is 34 + 8?", "<think>\n34+8=42\n</think>\n\n41"),
        ("42", "What is 34 + 8?", "forty-two"),
        ("52", "Which is larger, 34 or 52?", "34 52"),
        ("52", "Which is larger, 34 or 52?", "34 is smaller than 52, not 52 than 34"),
        ("14:05", "It is 13:50. What time is it in 15 minutes?", "14:50"),
        ("14:05", "It is 13:50. What time is it in 15 minutes?", "14:04, 14:05, 14:06"),
        ("Lima", "Which city is the capital of Peru: Rome, Lima?", "Rome or Lima"),
        ("Lima", "Which city is the capital of Peru: Rome, Lima?", "It is Rome, not Lima"),
        ("Lima", "Which city is the capital of Peru: Rome, Lima?", "Rome, Lima"),
        ("3, 14, 25", "Sort 25, 3, 14.", "3, 25, 14"),
        ("3, 14, 25", "Sort 25, 3, 14.", "3, 14, 25, 26"),
        ("3, 14, 25", "Sort 25, 3, 14.", "25, 3, 14, 25"),
        ('{"sum": 3, "max": 2}', "json", '{"sum": 3, "max": 2, "min": 1}'),
        ('{"sum": 3, "max": 2}', "json", "sum 3, max 2"),
        ('{"sum": 3, "max": 2}', "json", "[" * 5000),
        ("KDRT", "Reverse TRDK.", "KDTR"),
    ],
)
def test_wrong_and_evasive_texts_are_rejected(answer: str, prompt: str, text: str) -> None:
    assert not check(_task(answer, prompt), text)


@given(cells, st.integers(0, 2**32))
def test_a_changed_answer_is_wrong(cell: tuple[str, int, int], seed: int) -> None:
    family, grade, draw = cell
    task, rng = draw_task(family, grade, Random(draw), "test"), Random(seed)
    places = [i for i, c in enumerate(task.answer) if c.isalnum()]
    place = rng.choice(places)
    old = task.answer[place]
    pool = "0123456789" if old.isdigit() else "abcdefghijklmnopqrstuvwxyz"
    new = rng.choice([c for c in pool if c != old.casefold()])
    changed = task.answer[:place] + new + task.answer[place + 1 :]
    assert not check(task, changed)
    assert not check(task, f"The answer is {changed}.")


@given(cells)
def test_another_tasks_answer_is_wrong(cell: tuple[str, int, int]) -> None:
    family, grade, draw = cell
    rng = Random(draw)
    task, other = draw_task(family, grade, rng), draw_task(family, grade, rng)
    assert check(task, other.answer) == (task.answer.casefold() == other.answer.casefold())


@given(cells)
def test_listing_many_numbers_never_passes(cell: tuple[str, int, int]) -> None:
    family, grade, draw = cell
    task = draw_task(family, grade, Random(draw), "test")
    if task.answer.isdigit():
        near = int(task.answer)
        assert not check(task, " ".join(str(max(0, near - 3) + i) for i in range(8)))
        assert not check(task, f"{near} or {near + 1}")
        assert not check(task, task.prompt)


@given(cells, st.text(max_size=200))
def test_no_text_breaks_the_checker(cell: tuple[str, int, int], text: str) -> None:
    family, grade, draw = cell
    task = draw_task(family, grade, Random(draw))
    assert check(task, text) in (True, False)
