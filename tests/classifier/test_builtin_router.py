"""The shipped router is sound, small, described, and knows easy from hard on tasks it was not fitted on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backends.builtin.tasks.task_generator import generate
from classifier.card import render_card
from classifier.router import BUILTIN, ArtifactRouter
from classifier.types import Sufficiency
from tests.classifier.simulated_ladder import request_of


@pytest.fixture(scope="module")
def builtin() -> ArtifactRouter:
    return ArtifactRouter.load()


def p_right(found: list[Sufficiency]) -> np.ndarray:
    return np.array([[tier.p_right for tier in each.tiers] for each in found])


def test_it_is_small_and_its_card_is_its_own(builtin: ArtifactRouter) -> None:
    assert BUILTIN.stat().st_size <= 2 * 1024 * 1024
    card = Path(BUILTIN).with_suffix(".md").read_text()
    assert card == render_card(builtin.artifact)
    assert builtin.version in card


def test_it_says_what_it_was_made_of(builtin: ArtifactRouter) -> None:
    about = builtin.artifact.metadata
    assert builtin.num_tiers == 4
    assert about["training"]["num_rows"] >= 1000
    assert about["embedding"]["source"] == "none"
    router = about["metrics"]["ladder"]["router"]
    for baseline in ("length", "fixed_mix"):
        other = about["metrics"]["ladder"][baseline]
        assert all(other[share] is None or router[share] < other[share] for share in router)
    floors = {entry["floor"]: entry for entry in builtin.decision["floors"]}
    assert {"thresholds", "quality_value_usd"} <= set(floors[0.97])
    assert 0.98 <= builtin.decision["max_novelty"] < 1


def test_it_tells_easy_from_hard(builtin: ArtifactRouter) -> None:
    tasks = list(generate(77, 600, split="test", mix={1: 0.5, 5: 0.5}))
    right = p_right(builtin.predict([request_of(task.prompt) for task in tasks]))
    easy = np.array([task.grade == 1 for task in tasks])
    assert right[easy, 0].mean() > 0.85
    assert right[~easy, 0].mean() < 0.2
    assert right[:, 3].mean() > 0.85
    # Not a verdict on grades alone: between them the first tier's estimate varies with the task.
    assert np.ptp(right[easy, 0]) > 0.05


def test_small_talk_is_familiar_and_needs_no_high_tier(builtin: ArtifactRouter) -> None:
    for said in ("Hello!", "Who are you?", "Thanks!"):
        (found,) = builtin.predict([request_of(said)])
        assert found.novelty <= builtin.decision["max_novelty"]
        assert found.tiers[0].p_as_good > 0.5


def test_other_peoples_questions_are_foreign(builtin: ArtifactRouter) -> None:
    prompts = [
        "Which enzyme unwinds the double helix during replication, and what inhibits it?",
        "Draft a lease termination notice under California civil code section 1946.",
        "My Kubernetes pod keeps crash-looping with exit code 137; which kernel metrics should I inspect?",
        "Compare Kant's categorical imperative with rule utilitarianism in two paragraphs.",
    ]
    found = builtin.predict([request_of(prompt) for prompt in prompts])
    assert all(each.novelty > builtin.decision["max_novelty"] for each in found)
