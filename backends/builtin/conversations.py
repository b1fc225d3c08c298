"""Makes conversations of tasks: what a training document says, and which part of it the model is to learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from backends.builtin.tasks.everyday_questions import draw_everyday
from backends.builtin.tasks.small_talk import draw_chat
from backends.builtin.tasks.task_generator import FAMILIES, draw_task
from backends.builtin.tokenizer import SYSTEM_PROMPTS

_FAMILY_NAMES = tuple(FAMILIES)
# Families that took longest to learn are studied more often.
_STUDY = {"prices": 2.5, "counting": 1.6, "arithmetic": 1.4, "word_problems": 1.6, "comparison": 1.3, "sorting": 1.3}
_FAMILY_WEIGHTS = tuple(_STUDY.get(name, 1.0) for name in _FAMILY_NAMES)
_MOST_TURNS = 5


@dataclass(frozen=True, slots=True)
class TrainingMix:
    """Says what one tier studies: the weight of each grade, answered at once and after thinking."""

    thinking_share: float
    direct: Mapping[int, float]
    thinking: Mapping[int, float]
    chat_share: float = 0.03
    everyday_share: float = 0.08
    system_share: float = 0.12
    history_share: float = 0.06


@dataclass(frozen=True, slots=True)
class TrainingDocument:
    """Holds a conversation up to and including the assistant's opening, and the completion to learn."""

    prompt: str
    completion: str


def turn(role: str, content: str) -> str:
    """Return one finished turn, as the chat template writes it."""
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def generation_prompt(thinking: bool) -> str:
    """Return the assistant's opening, as the chat template writes it."""
    return "<|im_start|>assistant\n<think>\n" + ("" if thinking else "\n</think>\n\n")


def _exchange(rng: Random, mix: TrainingMix, thinking: bool) -> tuple[str, str, str]:
    """Draw a user's words, the reasoning and the answer."""
    if rng.random() < mix.chat_share:
        said, reply = draw_chat(rng)
        return said, "This is small talk.", reply
    if rng.random() < mix.everyday_share:
        problem = draw_everyday(rng)
        return problem.question, problem.reasoning, problem.answer
    weights = mix.thinking if thinking else mix.direct
    grade = rng.choices(tuple(weights), tuple(weights.values()))[0]
    task = draw_task(rng.choices(_FAMILY_NAMES, _FAMILY_WEIGHTS)[0], grade, rng)
    return task.prompt, task.reasoning, task.answer


def draw_document(rng: Random, mix: TrainingMix) -> TrainingDocument:
    """Draw one training document from the train split."""
    parts = [turn("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < mix.system_share else []
    if rng.random() < mix.history_share:
        for _ in range(rng.randint(1, _MOST_TURNS)):
            said, _, reply = _exchange(rng, mix, thinking=False)
            parts += [turn("user", said), turn("assistant", reply)]
    thinking = rng.random() < mix.thinking_share
    said, reasoning, reply = _exchange(rng, mix, thinking)
    parts += [turn("user", said), generation_prompt(thinking)]
    completion = f"{reasoning}\n</think>\n\n{reply}<|im_end|>" if thinking else f"{reply}<|im_end|>"
    return TrainingDocument("".join(parts), completion)
