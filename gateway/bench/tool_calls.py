"""Measures routing and free checks on recorded tool calls of four pairs of models.

``suffice bench tools --data DIR --out gateway/bench/results/tools.json``

The folder is that of :mod:`gateway.bench.bfcl`. For each pair a router is fitted on the other folds and judged as
``suffice evaluate`` does, with the always-cheap mix beside it. And the weak model's answers are checked as they would
be while serving: by their form, for nothing; and against the strong model's calls. The truth is the leaderboard's
checker. Its Java and JavaScript tests accept values that break the schema asked with, so those are also left out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from backends.protocol import FREE_CHOICE, PLAIN_TEXT
from gateway.bench.bfcl import BENCHMARK, ToolAnswer, ToolTest, read_answers, read_tests, write_folder
from gateway.bench.graders import GraderContender, judge
from gateway.bench.machine_card import card, print_card
from gateway.commands.evaluate import EvaluationCall, run_evaluation
from gateway.outcomes.answer_validator import AnswerRules
from gateway.store.records import VALIDATOR
from gateway.verify.answer_pair import Grade
from gateway.verify.graded_corpus import text_grades
from gateway.verify.graded_pairs import GradedPair
from gateway.verify.grader_combination import GraderCombination, Grades
from gateway.verify.graders import tool_calls

PAIRS: Sequence[tuple[str, str]] = (
    ("meta-llama_Meta-Llama-3-8B-Instruct", "meta-llama_Meta-Llama-3-70B-Instruct"),
    ("gpt-4o-mini-2024-07-18-FC", "gpt-4o-2024-08-06-FC"),
    ("claude-3-haiku-20240307-FC", "claude-3-5-sonnet-20240620-FC"),
    ("gpt-3.5-turbo-0125-FC", "gpt-4-turbo-2024-04-09-FC"),
)
"""Weak and strong model of each pair whose answers were recorded."""

_LENIENT = frozenset({"simple_java", "simple_javascript"})


def graded_pairs(
    tests: Mapping[str, ToolTest], answers: Mapping[tuple[str, str], ToolAnswer], pair: tuple[str, str]
) -> list[GradedPair]:
    """Return both models' answers to every test, graded as a check grades them."""
    weak, strong = pair
    found = []
    for test in tests.values():
        cheap, top = answers[test.test_id, weak], answers[test.test_id, strong]
        grades = _grades(test, cheap, top)
        found.append(GradedPair(test.category, test.group, weak, strong, cheap.is_right >= top.is_right, grades))
    return found


def _grades(test: ToolTest, cheap: ToolAnswer, top: ToolAnswer) -> dict[str, Grade]:
    rules = AnswerRules(test.tools, FREE_CHOICE, PLAIN_TEXT)
    faults = [rules.fault(each.text, each.calls) for each in (cheap, top)]
    called = tool_calls.compare(cheap.calls, top.calls)
    grades = text_grades(cheap.text, top.text) if called is None else {tool_calls.ToolCallGrader.name: called}
    if faults[0] is not None:
        # Known before anybody else is asked.
        return grades | {VALIDATOR: Grade(0.0, {faults[0].value: 1.0})}
    return grades if faults[1] is None else grades | {VALIDATOR: Grade(1.0)}


def judge_checks(pairs: Sequence[GradedPair], *, seed: int) -> dict[str, Any]:
    """Return what the checks are worth: of form alone, of calls, and both as a verdict makes them."""
    combination = GraderCombination.load("builtin", portable_only=True)

    def verdict(grades: Grades) -> float | None:
        if VALIDATOR in grades:
            return grades[VALIDATOR].score
        found = combination.combine(grades)
        return None if found is None else found[0]

    def calls(grades: Grades) -> float | None:
        return grades["tool_calls"].score if "tool_calls" in grades else None

    contenders = (
        GraderContender("verdict", verdict, 0.5, (), is_probability=True),
        GraderContender("tool_calls", calls, 0.5, ()),
    )
    is_free = [pair.grades.get(VALIDATOR, Grade(1.0)).score == 0.0 for pair in pairs]
    good_of: Counter[str] = Counter()
    num_of: Counter[str] = Counter()
    for pair, free in zip(pairs, is_free, strict=True):
        kind = "faulty" if free else _kind(pair.grades)
        num_of[kind] += 1
        good_of[kind] += pair.is_good
    return {
        "num_pairs": len(pairs),
        "share_good": round(sum(pair.is_good for pair in pairs) / len(pairs), 4),
        "share_without_top_call": round(sum(is_free) / len(pairs), 4),
        "graders": [row for each in contenders if (row := judge(each, pairs, seed=seed)) is not None],
        "kinds": {
            kind: {"share": round(num / len(pairs), 4), "share_good": round(good_of[kind] / num, 4)}
            for kind, num in sorted(num_of.items())
        },
    }


def _kind(grades: Grades) -> str:
    called = grades.get("tool_calls")
    if called is None:
        return "two texts"
    if not called.details["same_kind"]:
        return "call and text"
    return "same calls" if called.details["exact"] else "same in normal form" if called.score else "other calls"


def evaluate_pair(folder: Path, pair: tuple[str, str], *, seed: int, num_resamples: int) -> dict[str, Any]:
    """Return what ``suffice evaluate`` says of a pair, on the folds of the data."""
    call = EvaluationCall(
        train=folder,
        test=folder,
        models=pair,
        is_ladder=False,
        benchmarks=(BENCHMARK,),
        transfer=False,
        floor=0.95,
        confidence=0.95,
        seed=seed,
        num_resamples=num_resamples,
        prices={},
    )
    return run_evaluation(call)


def print_table(results: Sequence[Mapping[str, Any]]) -> None:
    """The tables in Markdown, as the documentation shows them; checks without Java and JavaScript."""
    print("| pair | quality | router APGR [95 %], by fold | cost at 95 / 99 % | chance | certified, honoured |")
    print("|---|---|---|---|---|---|")
    for each in results:
        print(f"| {' | '.join(_routing_cells(each['routing']))} |")
    print("\n| weak | verdict AUC [95 %] | faults found | sound passed | free | same calls, good | other, good |")
    print("|---|---|---|---|---|---|---|")
    for each in results:
        print(f"| {' | '.join([each['weak'], *_check_cells(each['checks_without_java'])])} |")


def _routing_cells(routed: Mapping[str, Any]) -> list[str]:
    floor, router, chance = routed["certificate"], routed["rankings"]["router"], routed["rankings"]["random"]
    low, high = router["apgr_interval"]
    return [
        f"{routed['weak']} → {routed['strong']}",
        f"{routed['weak_quality']:.3f} → {routed['strong_quality']:.3f}",
        f"{router['apgr']:.3f} [{low:.3f}, {high:.3f}], {' '.join(f'{apgr:.2f}' for apgr in router['apgr_by_fold'])}",
        f"{router['strong_share_95']:.0%} / {router['strong_share_99']:.0%}",
        f"{chance['strong_share_95']:.0%} / {chance['strong_share_99']:.0%}",
        f"{_percent(floor['cost'])}, {floor['resamples']['share_honoured']:.1%}",
    ]


def _check_cells(checks: Mapping[str, Any]) -> list[str]:
    row, kinds = checks["graders"][0], checks["kinds"]
    return [
        f"{row['auc']:.3f} [{row['auc_low']:.3f}, {row['auc_high']:.3f}]",
        f"{row['sensitivity']:.3f}",
        f"{row['specificity']:.3f}",
        f"{checks['share_without_top_call']:.1%}",
        *(f"{kinds[kind]['share']:.0%}, {kinds[kind]['share_good']:.1%}" for kind in ("same calls", "other calls")),
    ]


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="suffice bench tools", description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, metavar="DIR", required=True, help="recorded tool calls in parquet files")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep what `suffice evaluate` reads there")
    parser.add_argument("--seed", type=int, default=0, help="of fits and resamples")
    parser.add_argument("--resamples", type=int, default=200, help="resamples of intervals and certificates")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON there")
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    given = parser.parse_args(arguments)
    began = time.perf_counter()
    tests, answers = read_tests(given.data), read_answers(given.data)
    results = []
    with TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        write_folder(given.data, folder)
        for pair in PAIRS:
            pairs = graded_pairs(tests, answers, pair)
            results.append(
                {
                    "weak": pair[0],
                    "strong": pair[1],
                    "routing": evaluate_pair(folder, pair, seed=given.seed, num_resamples=given.resamples),
                    "checks": judge_checks(pairs, seed=given.seed),
                    "checks_without_java": judge_checks(
                        [each for each in pairs if each.source not in _LENIENT], seed=given.seed
                    ),
                }
            )
    facts = {**card(), "seed": given.seed, "duration_s": round(time.perf_counter() - began, 1)}
    found = {"bench": "tools", "card": facts, "results": results}
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    if not given.json:
        print_card("Tools bench", facts)
        print_table(results)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
