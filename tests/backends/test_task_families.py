"""Every family asks what it answers: an independent solver reads each question and finds the same answer."""

from __future__ import annotations

import json
from random import Random

import pytest

from backends.builtin.tasks.answer_checker import check
from backends.builtin.tasks.task_generator import FAMILIES, draw_task
from backends.builtin.tasks.types import GRADES
from tests.backends.task_solvers import SOLVERS

CELLS = [(family, grade) for family in FAMILIES for grade in GRADES]


def test_every_family_has_a_solver() -> None:
    assert set(SOLVERS) == set(FAMILIES)


@pytest.mark.parametrize(("family", "grade"), CELLS)
def test_the_answer_follows_from_the_question_alone(family: str, grade: int) -> None:
    rng = Random(f"{family} {grade}")
    for _ in range(150):
        problem = FAMILIES[family](grade, rng)
        assert SOLVERS[family](problem.question) == problem.answer, problem.question


def mutations(family: str, answer: str) -> set[str]:
    """Return answers that look alike and are wrong."""
    if family == "formats" and answer.startswith('{"'):
        body = json.loads(answer)
        key = next(iter(body))
        wrong = [{**body, "extra": 1}, {k: v for k, v in body.items() if k != key}, {**body, key: None}, [body]]
        return {json.dumps(each) for each in wrong} | {answer[:-1]}
    if answer.isdigit():
        number = int(answer)
        return {
            str(number + 1),
            str(number + 10),
            f"-{number + 1}",
            f"{number}7",
            f"{number}.5",
            f"1{number}",
        }
    if ":" in answer:
        hour, minute = answer.split(":")
        return {f"{hour}:{(int(minute) + 1) % 60:02d}", f"{(int(hour) + 12) % 24:02d}:{minute}", hour, minute}
    if ", " in answer:
        parts = answer.split(", ")
        changed = {", ".join(parts[:-1]), ", ".join([*parts, parts[0] + "x"])}
        if len(set(parts)) > 1:
            changed.add(", ".join(parts[::-1]) if parts != parts[::-1] else ", ".join(parts[1:]))
        return changed
    return {answer[:-1], answer + answer[-1], answer + " or not", f"not {answer}", ""}


@pytest.mark.parametrize(("family", "grade"), CELLS)
def test_the_checker_takes_the_answer_and_none_that_only_looks_like_it(family: str, grade: int) -> None:
    rng = Random(f"checked {family} {grade}")
    for _ in range(40):
        task = draw_task(family, grade, rng, "test")
        for said in (
            task.answer,
            f"The answer is {task.answer}",
            f"<think>\n{task.reasoning}\n</think>\n\n{task.answer}",
        ):
            if not task.answer.startswith('{"') or not said.startswith("The"):
                assert check(task, said), (task.prompt, said)
        for wrong in mutations(family, task.answer):
            assert not check(task, wrong), (task.prompt, task.answer, wrong)
