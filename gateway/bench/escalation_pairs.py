"""One answer anew and with a lower tier's as its prediction: the same text, and what the prediction saved.

Each task is answered by both tiers greedily, then by the higher one with the lower one's answer as its prediction.
Every request has prefix-cache blocks of its own, so that no run reads what another computed; they run one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.builtin.conversations import generation_prompt, turn
from backends.builtin.tasks.types import Task
from backends.local import LocalBackend
from backends.protocol import Finished, GenerateRequest, Message, SamplingParams, TokenDelta
from classifier.confidence import AnswerConfidence, AnswerSignals

PAIRS = ((1, 2), (2, 3), (1, 3), (3, 4))
DOUBT = 0.9
"""Answers are doubted here below this confidence."""
_LONG = 400
_ONE_WORD_IN = 20


@dataclass(frozen=True, slots=True)
class TaskRun:
    """One generation.

    Attributes
    ----------
    num_steps : of the engine, which ran nothing else
    """

    text: str
    compute_s: float
    num_steps: int
    ending: Finished


@dataclass(frozen=True, slots=True)
class LadderComparison:
    """One task: the lower tier's answer, the higher one's anew, and the higher one's with the prediction."""

    low: TaskRun
    anew: TaskRun
    predicted: TaskRun


async def generate(
    backend: LocalBackend,
    task: Task,
    salt: str,
    max_tokens: int,
    prediction: str | None = None,
    *,
    is_reasoned: bool = False,
) -> TaskRun:
    """Return a greedy answer that shares no cached prefix with any other salt's.

    Parameters
    ----------
    is_reasoned : take the reasoning as part of the text, as a plain completion does
    """
    request = GenerateRequest(
        salt,
        messages=None if is_reasoned else (Message("user", task.prompt),),
        prompt=turn("user", task.prompt) + generation_prompt(thinking=True) if is_reasoned else None,
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        extra={"cache_salt": salt},
        prediction=prediction,
    )
    before = backend.engine.stats().num_steps
    text = ""
    async for event in backend.generate(request):
        if isinstance(event, TokenDelta):
            text += event.text
        else:
            steps = backend.engine.stats().num_steps - before
            return TaskRun(text, event.compute_s, steps, event)
    raise AssertionError("a generation has an ending")


async def compare(
    tasks: Sequence[Task], backends: Mapping[int, LocalBackend], pair: tuple[int, int], max_tokens: int
) -> list[LadderComparison]:
    """Answer every task three times; which of the higher tier's two runs goes first alternates."""
    low, high = backends[pair[0]], backends[pair[1]]
    found = []
    for place, task in enumerate(tasks):
        name = f"{pair[0]}-{pair[1]}-{task.task_id}"
        cheap = await generate(low, task, f"{name}-low", max_tokens)
        runs: dict[bool, TaskRun] = {}
        for is_predicted in (place % 2 == 0, place % 2 == 1):
            prediction = cheap.text if is_predicted else None
            runs[is_predicted] = await generate(high, task, f"{name}-{is_predicted}", max_tokens, prediction)
        found.append(LadderComparison(cheap, runs[False], runs[True]))
    return found


async def doubted(
    tasks: Sequence[Task], backend: LocalBackend, tier: int, confidence: AnswerConfidence, count: int
) -> list[Task]:
    """Return the first tasks whose answer this tier doubts."""
    found = []
    for task in tasks:
        request = GenerateRequest(
            "doubt",
            messages=(Message("user", task.prompt),),
            sampling=SamplingParams(temperature=0.0, max_tokens=400, logprobs=0),
        )
        events = [event async for event in backend.generate(request)]
        scored = [each.logprob for event in events if isinstance(event, TokenDelta) for each in event.logprobs]
        if confidence.p_right(tier, AnswerSignals.of(scored)) < DOUBT:
            found.append(task)
        if len(found) == count:
            break
    return found


async def compare_long(tasks: Sequence[Task], backend: LocalBackend) -> dict[str, list[LadderComparison]]:
    """Reasoning and answer as one text, predicted rightly, with one word in twenty replaced, and by another task's."""
    anew = [await generate(backend, task, f"long-{task.task_id}", _LONG, is_reasoned=True) for task in tasks]
    found: dict[str, list[LadderComparison]] = {"right": [], "1 word in 20 wrong": [], "of another task": []}
    for place, (task, own) in enumerate(zip(tasks, anew, strict=True)):
        words = own.text.split(" ")
        replaced = " ".join("replaced" if i % _ONE_WORD_IN == _ONE_WORD_IN // 2 else w for i, w in enumerate(words))
        predictions = (own.text, replaced, anew[place - 1].text)
        for name, prediction in zip(found, predictions, strict=True):
            salt = f"{name}-{task.task_id}"
            run = await generate(backend, task, salt, _LONG, prediction, is_reasoned=True)
            found[name].append(LadderComparison(own, own, run))
    return found


def summarise(comparisons: Sequence[LadderComparison]) -> dict[str, Any]:
    """Sums over the tasks; shares of what the higher tier needs anew."""
    usages = [each.predicted.ending.usage for each in comparisons]
    accepted = sum(usage.accepted_prediction_tokens for usage in usages)
    predicted = accepted + sum(usage.rejected_prediction_tokens for usage in usages)
    anew_s = sum(each.anew.compute_s for each in comparisons)
    steps = sum(each.anew.num_steps for each in comparisons)
    return {
        "tasks": len(comparisons),
        "equal": sum(each.anew.text == each.predicted.text for each in comparisons),
        "accepted_share": accepted / predicted if predicted else None,
        "answer_tokens": sum(u.completion_tokens - u.reasoning_tokens for u in usages) / len(comparisons),
        "completion_tokens": sum(usage.completion_tokens for usage in usages) / len(comparisons),
        "steps_anew": steps / len(comparisons),
        "steps_saved_share": 1 - sum(each.predicted.num_steps for each in comparisons) / steps,
        "compute_s_anew": anew_s / len(comparisons),
        "compute_saved_share": 1 - sum(each.predicted.compute_s for each in comparisons) / anew_s,
    }
