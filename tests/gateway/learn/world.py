"""A small world with known truth: prompts of three families, a router fitted on two of them, logs of its traffic."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np
import pytest
from sqlalchemy import insert

from backends.protocol import FinishReason
from classifier.artifact import RouterArtifact
from classifier.log_view import tool_entries
from classifier.options import FitOptions
from classifier.router import ArtifactRouter
from classifier.table import TrainingTable
from classifier.tool_features import TOOL_FEATURES, OfferedTool, ToolUse, tool_features
from classifier.training import fit_router
from classifier.types import RouterRequest
from gateway.config.settings import Settings
from gateway.control.configuration_import import import_configuration
from gateway.control.control_writer import ControlWriter
from gateway.ids import uuid7
from gateway.models.loader import complete_policies
from gateway.store.control import ControlStore
from gateway.store.records import RequestRecord
from gateway.store.store import Store
from gateway.store.tables import verifications
from policies.derived_numbers import derive_for_floors
from policies.labelled_traffic import LabelledTraffic
from policies.routing_decision import decide
from policies.types import RequestFacts, TierEstimate

FAMILIES = {
    "easy": ("hello", "weather", "colour", "name", "today", "friend"),
    "hard": ("integral", "theorem", "lemma", "topology", "proof", "manifold"),
    # Never seen when the router was fitted; its words look easy.
    "new": ("ferry", "harbour", "lantern", "colour", "sailor", "name"),
    # Never seen either, and alike in everything but their words.
    "oaks": ("oak", "elm", "fir", "yew", "bay", "ivy"),
    "owls": ("owl", "emu", "fox", "yak", "bat", "imp"),
    # Alike in their words; they differ in the tools they offer.
    "few tools": ("hello", "weather", "colour", "name", "today", "friend"),
    "many tools": ("hello", "weather", "colour", "name", "today", "friend"),
}
P_CHEAP_GOOD = {"easy": 0.97, "hard": 0.1, "new": 0.97, "oaks": 0.97, "owls": 0.1, "few tools": 0.97, "many tools": 0.1}
NUM_TOOLS = {"few tools": 1, "many tools": 40}
NO_TOOLS = (0.0,) * len(TOOL_FEATURES)
UP_CHANCE, DOWN_CHANCE = 0.5, 0.5

# A policy's own threshold between the families, and a floor between what that holds (0.95) and what the cheap tier does
# for all of them (0.67 or less). Derived numbers spend what is above the floor: a few checks certify those by luck.
CLEAR_CUT: dict[str, Any] = {"policy__thresholds__simple": 0.5, "policy__quality_floor": 0.75}

# For what a database's kind has no part in: one of them is enough.
ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@dataclass(frozen=True)
class Prompt:
    family: str
    text: str

    @property
    def request(self) -> RouterRequest:
        offered = [OfferedTool(f"tool_{number}", "", {}) for number in range(NUM_TOOLS.get(self.family, 0))]
        return RouterRequest((("user", self.text),), tools=tool_features(ToolUse(offered), self.text))


def draw_prompts(rng: random.Random, count: int, families: Sequence[str]) -> list[Prompt]:
    found = []
    for _ in range(count):
        family = rng.choice(families)
        words = " ".join(rng.choice(FAMILIES[family]) for _ in range(6))
        found.append(Prompt(family, f"{words} number {rng.randrange(10_000)}"))
    return found


@cache
def base_artifact() -> RouterArtifact:
    """A router of two tiers that knows the easy and the hard family."""
    rng = random.Random(0)
    prompts = draw_prompts(rng, 400, ("easy", "hard"))
    scores = np.array([[float(rng.random() < P_CHEAP_GOOD[each.family]), 1.0] for each in prompts])
    requests = [RouterRequest((("user", each.text),)) for each in prompts]
    fitted = fit_router(TrainingTable.build(requests, scores), seed=0, options=FitOptions(num_trees=16, num_folds=3))
    costs = np.tile([0.0001, 0.01], (len(prompts), 1))
    traffic = LabelledTraffic(fitted.p_right, fitted.p_as_good, scores, costs)
    return fitted.artifact.with_metadata(decision=derive_for_floors(traffic, floors=(0.9,), max_novelty=0.995))


def base_router() -> ArtifactRouter:
    return ArtifactRouter(base_artifact())


async def put_in_force(store: Store, settings: Settings, router: ArtifactRouter) -> None:
    """What a server does as it starts."""
    await import_configuration(ControlWriter(ControlStore(store)), settings, router)


async def write_log(
    store: Store,
    settings: Settings,
    router: ArtifactRouter,
    prompts: Sequence[Prompt],
    *,
    seed: int = 0,
    ends: datetime | None = None,
    keep_text: bool = False,
) -> list[RequestRecord]:
    """Traffic of a minute a request up to now, decided by the router as a server does, and checked by the truth."""
    rng = random.Random(seed)
    policy = complete_policies(settings.policies, router)[settings.policy.name]
    said = router.predict([each.request for each in prompts])
    started = (ends or datetime.now(UTC)) - timedelta(minutes=len(prompts) + 1)
    rows, checks = [], []
    for number, (prompt, estimate) in enumerate(zip(prompts, said, strict=True)):
        facts = RequestFacts(
            num_prompt_tokens=20,
            max_tokens=None,
            estimates=tuple(TierEstimate(each.tier, each.p_right, each.p_as_good) for each in estimate.tiers),
            novelty=estimate.novelty,
        )
        decision = decide(facts, policy, settings.ladder, rng)
        record = RequestRecord(
            request_id=uuid7(),
            created_at=started + timedelta(minutes=number),
            endpoint="/v1/chat/completions",
            model_requested="auto",
            finish_reason=FinishReason.STOP,
            status_code=200,
            policy_name=policy.name,
            policy_version=policy.version,
            router_version=router.version,
            features=estimate.features | tool_entries(prompt.request.tools or NO_TOOLS),
            sufficiency=estimate.tiers,
            novelty=estimate.novelty,
            decided_tier=decision.tier,
            final_tier=decision.tier,
            propensity=decision.propensity,
            propensities=decision.propensities,
            reason=decision.reason.value,
            explored=decision.explored,
            confidence=decision.confidence,
            prompt_tokens=20,
            completion_tokens=30,
            cost_usd=Decimal("0.0001") if decision.tier == 1 else Decimal("0.01"),
            prompt_digest=store.digest(prompt.text),
            prompt_text=f"user: {prompt.text}" if keep_text else None,
            answer_text="" if keep_text else None,
        )
        rows.append(record)
        chance = UP_CHANCE if decision.tier == 1 else DOWN_CHANCE
        if rng.random() < chance:
            good = rng.random() < P_CHEAP_GOOD[prompt.family]
            checks.append(_check(record, chance, 0.98 if good else 0.03))
    for record in rows:
        await store.record(record)
    async with store.transaction() as connection:
        if checks:
            await connection.execute(insert(verifications), checks)
    return rows


def _check(record: RequestRecord, chance: float, p_good: float) -> dict[str, object]:
    assert record.final_tier is not None
    return {
        "verification_id": uuid7(),
        "request_id": record.request_id,
        "created_at": record.created_at,
        "direction": "up" if record.final_tier == 1 else "down",
        "tier": record.final_tier,
        "against_tier": 3 - record.final_tier,
        "inclusion_probability": chance,
        "stratum": "",
        "tenant": "default",
        "domain": "",
        "policy_name": record.policy_name,
        "policy_version": record.policy_version,
        "router_version": record.router_version,
        "status": "done",
        "num_attempts": 1,
        "finished_at": record.created_at,
        "p_good": p_good,
        "verdict": round(p_good),
        "scores": {},
        "cost_nano_usd": 1000,
    }
