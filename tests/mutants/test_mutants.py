"""The mutation check: what it changes, what it leaves alone, and that it tells a killed mutant from a survivor."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT, draw, read_equivalents
from tests.mutants.mutations import find_mutations
from tests.mutants.rooms import mutated_files, sets_of_tests
from tests.mutants.trial import BaselineFailed, Trials

SOURCE = '''
LIMIT: int = 3


def is_over(spent: int, *, strict: bool = True) -> bool:
    """Tell whether 3 < 4."""
    assert spent >= 0, f"{spent + 1} is odd"
    if not spent:
        raise ValueError("é" + "nothing")
    return spent + 1 > LIMIT and strict
'''


def changed(source: str) -> set[tuple[str, str]]:
    return {(one.kind, one.lines(source)[1]) for one in find_mutations("a.py", source)}


def test_each_kind_of_fault_is_found_once() -> None:
    assert changed(SOURCE) == {
        ("constant", "LIMIT: int = 4"),
        ("constant", "LIMIT: int = 2"),
        ("constant", "def is_over(spent: int, *, strict: bool = False) -> bool:"),
        ("drop not", "if spent:"),
        ("drop statement", "pass"),
        ("return constant", "return True"),
        ("return constant", "return False"),
        ("and or", "return (spent + 1 > LIMIT or strict)"),
        ("compare", "return (spent + 1 >= LIMIT) and strict"),
        ("compare", "return (spent + 1 <= LIMIT) and strict"),
        ("arithmetic", "return (spent - 1) > LIMIT and strict"),
        ("constant", "return spent + 2 > LIMIT and strict"),
        ("constant", "return spent + 0 > LIMIT and strict"),
    }


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1 < y < 2", ("compare", "x = (1 < y <= 2)")),
        ("x = min(a, b)", ("min max", "x = max(a, b)")),
        ("x = a if b else c", ("swap branches", "x = (c if b else a)")),
        ("x.y = z", ("drop statement", "pass")),
        ("x += y", ("drop statement", "pass")),
        ("x = -y", ("sign", "x = y")),
        ("x = {a | b}", ("arithmetic", "x = {(a & b)}")),
    ],
)
def test_a_fault_keeps_the_rest_of_its_line(source: str, expected: tuple[str, str]) -> None:
    assert expected in changed(source)


@pytest.mark.parametrize(
    "source", ['x = f"{a + b}"', "x: int | None", "assert a < b", "zip(a, b, strict=True)[c]", "import a"]
)
def test_what_only_we_could_break_is_left_alone(source: str) -> None:
    assert not {kind for kind, _ in changed(source)} & {"arithmetic", "compare", "constant"}


def test_every_mutant_of_a_file_is_another_file_that_compiles() -> None:
    for path in mutated_files(ROOT, ("policies/limits.py", "engine/blocks.py")):
        source = (ROOT / path).read_text()
        for each in find_mutations(path, source):
            mutant = each.apply(source)
            assert mutant != source
            compile(mutant, path, "exec")


def test_a_seed_draws_the_same_again() -> None:
    paths = ("policies/limits.py", "engine/blocks.py")
    assert draw(ROOT, paths, 30, 1) == draw(ROOT, paths, 30, 1) != draw(ROOT, paths, 30, 2)


def test_a_change_elsewhere_draws_no_others(tmp_path: Path) -> None:
    file = tmp_path / "room" / "sums.py"
    file.parent.mkdir()
    lines = [f"def f{i}(x: int) -> bool:\n    return x < {i}\n" for i in range(60)]
    file.write_text("\n".join(lines))
    before = [each.lines(file.read_text()) for each in draw(tmp_path, ("room",), 20, 1)]
    file.write_text("\n".join(["LIMIT = 7\n", *lines]))
    after = [each.lines(file.read_text()) for each in draw(tmp_path, ("room",), 20, 1)]
    assert len(set(before) & set(after)) >= 18
    assert len(before) == len(after) == 20


def test_the_mirror_is_asked_first() -> None:
    sets = sets_of_tests(ROOT, "policies/limits.py")
    assert sets[0] == ("tests/policies/test_limits.py",)
    asked = [test for each in sets for test in each]
    assert len(asked) == len(set(asked))
    assert "tests/policies/test_pricing.py" in asked


@pytest.mark.slow
def test_listed_mutants_are_still_there() -> None:
    for each in read_equivalents():
        source = (ROOT / each.path).read_text()
        there = {one.lines(source) for one in find_mutations(each.path, source)}
        assert (each.before, each.after) in there, f"{each.path} has changed: strike {each.before!r} from the list"
        assert each.reason


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "room.py").write_text("def is_over(spent: int) -> bool:\n    return spent > 3\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n    gpu\n    clients\n")
    (tmp_path / "conftest.py").write_text(
        "from hypothesis import settings\nsettings.register_profile('mutants', database=None)\n"
    )
    (tmp_path / "test_room.py").write_text(
        "from room import is_over\n\ndef test_it() -> None:\n    assert is_over(9)\n    assert not is_over(3)\n"
    )
    return tmp_path


@pytest.mark.slow
def test_a_fault_that_a_test_notices_is_killed(tree: Path) -> None:
    source = (tree / "room.py").read_text()
    trials = Trials(tree, libraries=())
    modules = set(sys.modules)
    faults = find_mutations("room.py", source)
    verdicts = {one.lines(source)[1]: trials.judge(one, [("test_room.py",)]) for one in faults}
    assert {line for line, verdict in verdicts.items() if not verdict.killed_by} == {"return spent > 4"}
    assert verdicts["return (spent >= 3)"].killed_by == "test_room.py::test_it"
    assert (tree / "room.py").read_text() == source
    assert set(sys.modules) == modules


@pytest.mark.slow
def test_tests_that_fail_anyway_judge_nothing(tree: Path) -> None:
    (tree / "test_room.py").write_text("def test_it() -> None:\n    assert False\n")
    mutation = find_mutations("room.py", (tree / "room.py").read_text())[0]
    with pytest.raises(BaselineFailed, match="test_it"):
        Trials(tree, libraries=()).judge(mutation, [("test_room.py",)])


@pytest.mark.slow
def test_tests_that_fail_once_on_a_busy_machine_are_asked_again(tree: Path) -> None:
    (tree / "test_room.py").write_text(
        "from pathlib import Path\nfrom room import is_over\n\n"
        "def test_it() -> None:\n    marker = Path(__file__).with_name('asked')\n"
        "    was_asked, _ = marker.exists(), marker.touch()\n    assert was_asked\n    assert not is_over(3)\n"
    )
    source = (tree / "room.py").read_text()
    trials = Trials(tree, libraries=())
    verdicts = [trials.judge(each, [("test_room.py",)]) for each in find_mutations("room.py", source)]
    assert {verdict.killed_by for verdict in verdicts} == {"", "test_room.py::test_it"}
