"""The generator: deterministic, split by construction, every family in every grade."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from operator import add, mul, sub, truediv
from random import Random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from backends.builtin.paths import model_dir
from backends.builtin.tasks.answer_checker import check
from backends.builtin.tasks.everyday_questions import draw_everyday
from backends.builtin.tasks.families.arithmetic import multiply_steps
from backends.builtin.tasks.small_talk import draw_chat
from backends.builtin.tasks.solution_checks import digit_by_digit
from backends.builtin.tasks.task_generator import FAMILIES, NATURAL_MIX, UNIFORM_MIX, draw_task, generate, split_of
from backends.builtin.tasks.types import GRADES, Split
from backends.builtin.tasks.worked_solution import pick, think

_APPLY: dict[str, Callable[[float, float], float]] = {"+": add, "-": sub, "*": mul, "/": truediv}
CELLS = [(family, grade) for family in FAMILIES for grade in GRADES]
seeds = st.integers(0, 2**63)


def _problem(task_id: str) -> str:
    """The part of an id that names the problem: its family and its key's hash."""
    family, _, digest = task_id.rsplit("-", 2)
    return f"{family}-{digest}"


def test_there_are_ten_families_or_more() -> None:
    assert len(FAMILIES) >= 10
    assert sum(NATURAL_MIX.values()) == pytest.approx(1)
    assert sorted(NATURAL_MIX.values(), reverse=True) == list(NATURAL_MIX.values())


@given(seeds, st.sampled_from(["train", "test"]))
def test_a_seed_gives_the_same_tasks(seed: int, split: Split) -> None:
    assert list(generate(seed, 8, split=split)) == list(generate(seed, 8, split=split))


def test_seeds_and_splits_differ() -> None:
    drawn = [[t.prompt for t in generate(seed, 20, split=split)] for seed in (1, 2) for split in ("train", "test")]
    assert len({tuple(prompts) for prompts in drawn}) == 4


@given(st.sampled_from(CELLS), seeds)
def test_the_key_alone_decides_the_split(cell: tuple[str, int], seed: int) -> None:
    family, grade = cell
    problem = FAMILIES[family](grade, Random(seed))
    split = split_of(family, problem.key)
    drawn = draw_task(family, grade, Random(seed), split)
    assert _problem(drawn.task_id).startswith(family)
    # The first draw already is of its own split, so it is the one kept.
    assert drawn.answer == problem.answer
    assert problem.question in drawn.prompt


@pytest.mark.slow
def test_train_and_test_share_no_problem_and_no_prompt() -> None:
    train = list(generate(5, 12_000, split="train", mix=UNIFORM_MIX))
    test = list(generate(5, 3_000, split="test", mix=UNIFORM_MIX))
    assert not {_problem(t.task_id) for t in train} & {_problem(t.task_id) for t in test}
    assert not {t.prompt for t in train} & {t.prompt for t in test}


@pytest.mark.parametrize(("family", "grade"), CELLS)
def test_every_cell_draws_sound_tasks(family: str, grade: int) -> None:
    rng = Random(f"{family}{grade}")
    tasks = [draw_task(family, grade, rng, split) for split in ("train", "test") for _ in range(60)]
    assert len({t.prompt for t in tasks}) > 100, "the wording or the problems barely vary"
    for task in tasks:
        assert (task.family, task.grade) == (family, grade)
        assert task.prompt.isascii()
        assert "{" not in task.prompt.replace('{"', "") or family == "formats"
        assert task.answer == task.answer.strip() != ""
        assert check(task, task.answer)
        assert check(task, f"<think>\n{task.reasoning}\n</think>\n\n{task.answer}")


def _value(expression: str) -> float:
    """Of one operation, or of a chain of sums."""
    numbers, signs = re.split(r"[-+*/]", expression), re.findall(r"[-+*/]", expression)
    value: float = int(numbers[0])
    for sign, number in zip(signs, map(int, numbers[1:]), strict=True):
        value = _APPLY[sign](value, number)
    return value


@given(st.sampled_from(CELLS), seeds)
def test_the_sums_in_the_reasoning_are_right(cell: tuple[str, int], seed: int) -> None:
    """In the steps and in the checks, wherever they stand in a line."""
    task = draw_task(*cell, Random(seed))
    for left, right in re.findall(r"(?<![\w+*/:-])(\d+(?:[-+*/]\d+)+)=(\d+)(?!\d)", task.reasoning):
        assert _value(left) == int(right), task.reasoning


@given(st.sampled_from(CELLS), seeds)
def test_the_orders_in_the_reasoning_are_right(cell: tuple[str, int], seed: int) -> None:
    task = draw_task(*cell, Random(seed))
    for chain in re.findall(r"(?<![\d.])\d+(?:<\d+)+", task.reasoning):
        numbers = [int(number) for number in chain.split("<")]
        assert numbers == sorted(set(numbers)), task.reasoning


@given(st.sampled_from(CELLS), seeds)
def test_a_solution_asks_plans_works_checks_and_concludes(cell: tuple[str, int], seed: int) -> None:
    task = draw_task(*cell, Random(seed))
    first, second, *_, last = task.reasoning.split("\n")
    assert first.startswith(("Asked: ", "The question: "))
    assert second.startswith(("Plan: ", "The way: "))
    assert re.search(r"\n(Now I check|A check follows)\.\n", task.reasoning)
    assert last.endswith(f"he answer is {task.answer}")


@given(st.integers(2, 999), st.integers(1, 99))
def test_long_multiplication(a: int, b: int) -> None:
    assert multiply_steps(a, b)[-1].endswith(f"={a * b}")


def test_the_mix_is_kept() -> None:
    counts = Counter(t.grade for t in generate(3, 8_000))
    for grade, share in NATURAL_MIX.items():
        assert counts[grade] / 8_000 == pytest.approx(share, abs=0.02)


def test_length_says_little_about_the_grade() -> None:
    """Short hard tasks and long easy ones are common: a router that counts characters must be fooled often."""
    tasks = list(generate(9, 4_000, mix=UNIFORM_MIX))
    easy = sorted(len(t.prompt) for t in tasks if t.grade == 1)
    hard = sorted(len(t.prompt) for t in tasks if t.grade == 5)
    assert easy[int(0.8 * len(easy))] > hard[int(0.2 * len(hard))]


def test_thinking_takes_about_as_long_whatever_the_grade() -> None:
    tokenizer = Tokenizer.from_file(str(model_dir(4) / "tokenizer.json"))
    tasks = list(generate(2, 2_000, mix=UNIFORM_MIX))
    lengths = {grade: [] for grade in GRADES}  # type: dict[int, list[int]]
    for task in tasks:
        lengths[task.grade].append(len(tokenizer.encode(task.reasoning).ids))
        assert len(tokenizer.encode(task.prompt).ids) + lengths[task.grade][-1] < 420
    natural = sum(NATURAL_MIX[grade] * mean(lengths[grade]) for grade in GRADES)
    assert 110 < natural < 160
    assert max(mean(of_grade) for of_grade in lengths.values()) < 1.4 * natural


def test_the_first_wording_is_the_usual_one() -> None:
    picked = Counter(pick(("first", "second", "third"), f"problem {number}") for number in range(4_000))
    assert picked["first"] / 4_000 == pytest.approx(0.75, abs=0.03)
    assert picked["second"] > 300 < picked["third"]
    assert pick(("only",), "x") == "only"


def test_a_check_is_written_even_where_the_steps_took_all_the_effort() -> None:
    said = {"asked": "x", "plan": "y", "steps": ["1+1=2"] * 50, "answer": "2"}
    text = think("k", **said, checks=iter(["one", "two"]))  # type: ignore[arg-type]
    assert "\none\n" in text
    assert "two" not in text
    assert "check" not in think("k", **said, checks=())  # type: ignore[arg-type]


@given(st.integers(0, 9_999), st.integers(0, 9_999))
def test_the_digit_that_decides(a: int, b: int) -> None:
    if a != b:
        said = digit_by_digit(min(a, b), max(a, b))
        fewer = len(str(a)) != len(str(b))
        assert said.endswith("fewer is less.") if fewer else re.search(r"(\d)<(\d)", said)


@given(seeds)
def test_small_talk_and_everyday_questions(seed: int) -> None:
    said, reply = draw_chat(Random(seed))
    assert said
    assert reply
    problem = draw_everyday(Random(seed))
    assert problem.question.strip()
    assert problem.answer


def test_everyday_questions_stay_out_of_the_test_split() -> None:
    rng = Random(4)
    for _ in range(3_000):
        problem = draw_everyday(rng)
        if re.fullmatch(r"\d+ [-+] \d+", problem.key):
            assert split_of("arithmetic", problem.key) == "train"


@pytest.mark.parametrize(
    "arguments",
    [
        {"families": ["alchemy"]},
        {"families": []},
        {"split": "validation"},
        {"mix": {6: 1.0}},
        {"mix": {1: -1.0}},
        {"mix": {1: 0.0}},
        {"mix": {}},
    ],
)
def test_bad_arguments_are_refused_at_the_call(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        generate(1, 1, **arguments)  # type: ignore[arg-type]
