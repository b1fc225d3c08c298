"""From rows and answers to what a router is fitted on and thresholds are derived from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from backends.protocol import PLAIN_TEXT, FinishReason
from classifier.confidence import AnswerSignals
from classifier.table import TrainingTable
from gateway.outcomes.answer_grading import CHECKERS, agreement
from gateway.outcomes.answer_log import RecordedAnswer
from gateway.outcomes.answer_validator import AnswerRules
from gateway.outcomes.call_grading import compare_calls
from gateway.outcomes.prompt_file import PromptRow
from policies.ladder import Ladder
from policies.pricing import measured_cost_usd, price_usd

Floats = NDArray[np.float64]
_REFUSED = FinishReason.ERROR.value


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Graded answers of rows that every tier answered.

    Attributes
    ----------
    rows : those rows
    table : their grades
    cost_usd : float64 (n, num_tiers), by the ladder's prices and the tokens really used
    measured_cost_usd : float64 (n, num_tiers), by device seconds; NaN where a backend could not measure
    compute_s : float64 (n, num_tiers), device seconds, NaN likewise
    graded_by : how many grades each method gave
    signals : tier -> what its own log-probabilities say of each answer
    """

    rows: tuple[PromptRow, ...]
    table: TrainingTable
    cost_usd: Floats
    measured_cost_usd: Floats
    compute_s: Floats
    graded_by: Mapping[str, int]
    signals: Mapping[int, tuple[AnswerSignals, ...]] = field(default_factory=dict)


def grade(
    rows: Sequence[PromptRow], answers: Mapping[tuple[str, int], RecordedAnswer], ladder: Ladder, window: str
) -> Outcomes:
    """Grade every row that all tiers answered: by its reference, else by agreement with the top tier.

    Raises
    ------
    TrainingError
        Too few rows are complete.
    """
    tiers = [tier.index for tier in ladder]
    complete = [row for row in rows if all((row.key, tier) in answers for tier in tiers)]
    methods: Counter[str] = Counter()
    scores = np.array(
        [_grades(row, [answers[row.key, tier] for tier in tiers], methods) for row in complete], dtype=np.float64
    ).reshape(len(complete), len(tiers))
    source = "reference" if all(row.has_reference for row in complete) else "reference or agreement"
    if not any(row.has_reference for row in complete):
        source = "agreement with the top tier"
    judged = np.array([row.is_judged for row in complete], dtype=np.bool_)
    table = TrainingTable.build(
        [row.request for row in complete], scores, label_source=source, window=window, typical=judged
    )
    used = [[answers[row.key, tier.index] for tier in ladder] for row in complete]
    cost_usd, measured_cost_usd, compute_s = _costs(used, ladder)
    return Outcomes(
        rows=tuple(complete),
        table=table,
        cost_usd=cost_usd,
        measured_cost_usd=measured_cost_usd,
        compute_s=compute_s,
        graded_by=methods,
        signals=_signals(used, ladder),
    )


def _grades(row: PromptRow, answers: Sequence[RecordedAnswer], methods: Counter[str]) -> list[float]:
    if row.needs_tools:
        return _call_grades(row, answers, methods)
    if row.reference is not None:
        methods[f"reference ({row.checker})"] += len(answers)
        check = CHECKERS[row.checker]
        return [float(check(row.prompt, row.reference, answer.text)) for answer in answers]
    grades = []
    for answer in answers[:-1]:
        score, method = agreement(answer.text, answers[-1].text)
        methods[f"agreement ({method})"] += 1
        grades.append(score)
    return [*grades, 1.0]


def _call_grades(row: PromptRow, answers: Sequence[RecordedAnswer], methods: Counter[str]) -> list[float]:
    """Grade answers that may call tools: by their form, by the calls that are known to be right, else by the top's."""
    rules = AnswerRules(row.tools, row.tool_choice, PLAIN_TEXT)
    is_sound = [each.finish_reason != _REFUSED and not rules.fault(each.text, each.tool_calls) for each in answers]
    top = answers[-1]
    grades = []
    for answer, sound in zip(answers, is_sound, strict=True):
        if not sound:
            grade, method = 0.0, "form of calls"
        elif row.reference_calls is not None:
            same = compare_calls(answer.tool_calls, row.reference_calls)
            grade, method = float(same is None or same.normalised), "reference (calls)"
        elif row.reference is not None:
            check = CHECKERS[row.checker]
            is_right = not answer.calls and check(row.prompt, row.reference, answer.text)
            grade, method = float(is_right), f"reference ({row.checker})"
        elif answer is top or not is_sound[-1]:
            grade, method = 1.0, "top tier or sound where it is not"
        elif (same := compare_calls(answer.tool_calls, top.tool_calls)) is not None:
            grade, method = float(same.normalised), "agreement (calls)"
        else:
            grade, by = agreement(answer.text, top.text)
            method = f"agreement ({by})"
        methods[method] += 1
        grades.append(grade)
    return grades


def _signals(used: Sequence[Sequence[RecordedAnswer]], ladder: Ladder) -> dict[int, tuple[AnswerSignals, ...]]:
    return {
        tier.index: tuple(
            AnswerSignals(each[place].num_scored, each[place].total_logprob, each[place].least_logprob) for each in used
        )
        for place, tier in enumerate(ladder)
    }


def _costs(used: Sequence[Sequence[RecordedAnswer]], ladder: Ladder) -> tuple[Floats, Floats, Floats]:
    """Return every answer's cost by price table, its cost by device seconds, and those seconds."""
    shape = (len(used), len(ladder))
    priced, measured, seconds = np.empty(shape), np.full(shape, np.nan), np.full(shape, np.nan)
    for i, answers in enumerate(used):
        for j, (tier, answer) in enumerate(zip(ladder, answers, strict=True)):
            priced[i, j] = float(price_usd(tier, answer.prompt_tokens, answer.completion_tokens))
            if answer.compute_s is not None:
                seconds[i, j] = answer.compute_s
                measured[i, j] = float(measured_cost_usd(tier, answer.compute_s))
    return priced, measured, seconds
