"""Makes graded pairs: from recorded responses of other models, and by running a ladder on tasks with known answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.builtin.tasks.answer_checker import check as check_task
from backends.builtin.tasks.types import Task
from backends.protocol import Finished, GenerateRequest, Message, Priority, SamplingParams, TokenDelta
from gateway.config.sections import GraderName
from gateway.config.settings import load_settings
from gateway.models import loader
from gateway.models.catalog import Catalog
from gateway.outcomes.task_split import draw_split
from gateway.verify.answer_checker import SpendMeter, make_graders
from gateway.verify.answer_pair import AnswerPair, Grade, Grader, Spend, TierParty
from gateway.verify.check_costs import priced_ending
from gateway.verify.graded_pairs import GradedPair
from gateway.verify.graders import final_answer, overlap

STRONG_MODELS: Mapping[str, str] = {
    "routellm_gsm8k": "gpt-4-1106-preview",
    "ze_gsm8k": "claude-3-5-sonnet-20240620",
    "ze_math_l5": "claude-3-5-sonnet-20240620",
    "alpaca_eval": "gpt-4-1106-preview",
}
"""Benchmark -> the model its cheap answers are compared with."""

TRAINABLE = frozenset({"routellm_gsm8k", "ze_gsm8k", "ze_math_l5"})
"""Benchmarks whose licences permit fitting what ships; the others are only judged on."""

Progress = Callable[[int, int], None]
"""Told (tasks done, tasks)."""


def recorded_pairs(folder: Path) -> list[GradedPair]:
    """Pairs out of ``responses.parquet``, ``scores.parquet`` and ``prompts.parquet``, graded by the text graders.

    Every response of a benchmark in :data:`STRONG_MODELS` is compared with the strong model's to the same prompt; it
    was good where its score is not below.
    """
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]

    def rows(name: str, *columns: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = parquet.read_table(folder / f"{name}.parquet", columns=list(columns)).to_pylist()
        return found

    prompts = {row["prompt_id"]: row for row in rows("prompts", "prompt_id", "benchmark", "group_id")}
    scores = {(row["prompt_id"], row["model"]): row["score"] for row in rows("scores", "prompt_id", "model", "score")}
    texts = {
        (row["prompt_id"], row["model"]): row["response"] for row in rows("responses", "prompt_id", "model", "response")
    }
    pairs = []
    for (prompt_id, model), text in texts.items():
        prompt = prompts[prompt_id]
        strong = STRONG_MODELS.get(prompt["benchmark"])
        keys = (prompt_id, model), (prompt_id, strong)
        if strong is None or model == strong or keys[1] not in texts or not all(key in scores for key in keys):
            continue
        is_good = scores[keys[0]] >= scores[keys[1]]
        grades = text_grades(text, texts[keys[1]])
        pairs.append(GradedPair(prompt["benchmark"], prompt["group_id"], model, strong, is_good, grades))
    return pairs


def text_grades(cheap_answer: str, top_answer: str) -> dict[str, Grade]:
    """Return the grades of the graders that need no model."""
    grades = {"overlap": overlap.compare(cheap_answer, top_answer)}
    ending = final_answer.compare(cheap_answer, top_answer)
    return grades if ending is None else grades | {"final_answer": ending}


async def ladder_pairs(
    catalog: Catalog,
    tasks: Sequence[Task],
    graders: Sequence[Grader],
    *,
    max_tokens: int = 400,
    concurrency: int = 8,
    progress: Progress | None = None,
) -> list[GradedPair]:
    """Return every task answered by every tier, every lower answer graded against the top one's.

    Parameters
    ----------
    catalog : a ladder whose backends are started
    tasks : with their right answers
    graders : all of them see every pair; what each costs is kept apart
    """
    places = asyncio.Semaphore(concurrency)
    num_done = 0

    async def one(task: Task) -> list[GradedPair]:
        nonlocal num_done
        async with places:
            pairs = await _grade_task(catalog, task, graders, max_tokens)
        num_done += 1
        if progress is not None:
            progress(num_done, len(tasks))
        return pairs

    found = await asyncio.gather(*(one(task) for task in tasks))
    return [pair for pairs in found for pair in pairs]


async def run_builtin_ladder(
    half: int, num_tasks: int, seed: int, *, with_judge: bool = True, progress: Progress | None = None
) -> list[GradedPair]:
    """Graded pairs of the built-in ladder on tasks that no tier was trained on.

    Parameters
    ----------
    half : of the test tasks; combinations are fitted on one and judged on the other
    num_tasks, seed : how many, and which
    with_judge : ask the judge too, the dearest of the graders
    """
    settings = load_settings(environ={})
    backends = loader.make_backends(settings)
    await loader.start_backends(backends, lambda model, state: None)
    try:
        ladder = loader.fit_ladder(settings.ladder, backends)
        catalog = Catalog(ladder, settings.policy, settings.policies, backends)
        names: list[GraderName] = ["final_answer", "overlap", "embedding", "likelihood"]
        graders = make_graders([*names, "judge"] if with_judge else names)
        return await ladder_pairs(catalog, draw_split(half, seed, num_tasks), graders, progress=progress)
    finally:
        await loader.close_backends(list(backends.values()))


async def _grade_task(catalog: Catalog, task: Task, graders: Sequence[Grader], max_tokens: int) -> list[GradedPair]:
    request = GenerateRequest(
        task.task_id,
        messages=(Message("user", task.prompt),),
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        priority=Priority.BACKGROUND,
    )
    parties = [TierParty(tier, catalog.backend(tier)) for tier in catalog.ladder]
    meters = [SpendMeter() for _ in parties]
    answers = [await _answer(party, request, meter) for party, meter in zip(parties, meters, strict=True)]
    is_right = [check_task(task, answer) for answer in answers]
    pairs = []
    for party, answer, right in list(zip(parties, answers, is_right, strict=True))[:-1]:
        pair = AnswerPair(request, answer, party, parties[-1], answers[-1])
        grades, spent = await _grade(pair, graders)
        spent["generate"] = meters[-1]
        pairs.append(
            GradedPair(
                source="ladder",
                group=task.task_id,
                cheap=party.tier.name,
                top=parties[-1].tier.name,
                is_good=right or not is_right[-1],
                grades=grades,
                cost_usd={name: float(meter.spent.cost_usd) for name, meter in spent.items()},
                compute_s={name: meter.spent.compute_s for name, meter in spent.items()},
            )
        )
    return pairs


async def _grade(pair: AnswerPair, graders: Sequence[Grader]) -> tuple[dict[str, Grade], dict[str, SpendMeter]]:
    grades, spent = {}, {}
    for grader in graders:
        spent[grader.name] = SpendMeter()
        grade = await grader.grade(pair, spent[grader.name])
        if grade is not None:
            grades[grader.name] = grade
    return grades, spent


async def _answer(party: TierParty, request: GenerateRequest, spend: Spend) -> str:
    texts = []
    async for event in party.backend.generate(request):
        if isinstance(event, TokenDelta):
            texts.append(event.text)
        elif isinstance(event, Finished):
            spend(priced_ending(party.tier, event))
    return "".join(texts)
