"""With ``log.prompts = "none"`` no number made of a text is kept (security review M6)."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import select

from gateway.store.tables import request_texts, requests, shadow_decisions
from tests.gateway.control.ladder import make_router, serving

# Where a column's value comes from. A new one must be put on a side: what is made of a text goes with ``none``.
MADE_OF_THE_TEXT = {"features", "sufficiency", "novelty", "domain", "prompt_digest", "answer_digest", "conversation"}
NAMED_BY_THE_CALLER = {
    *("tenant", "key_id", "session_id", "endpoint", "model_requested", "stream", "num_choices", "overrides"),
    *("traceparent",),
}
DECISION = {
    *("policy_name", "policy_version", "router_version", "config_hash", "decided_tier", "final_tier", "model_served"),
    *("ladder", "propensity", "propensities", "reason", "explored", "confidence", "attempts", "verify_probability"),
    *("barred", "turn_id", "call_digest"),
}
FIGURES = {
    *("request_id", "created_at", "prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens"),
    *("draft_tokens", "accepted_draft_tokens", "compute_s", "cost_nano_usd", "measured_cost_nano_usd", "ttft_s"),
    *("itl_s", "queue_s", "total_s", "overhead_s", "finish_reason", "status_code", "error_code"),
    *("turn", "step"),
}


def test_every_column_is_made_of_the_text_or_is_not() -> None:
    assert {each.name for each in requests.c} == MADE_OF_THE_TEXT | NAMED_BY_THE_CALLER | DECISION | FIGURES


@pytest.mark.parametrize("prompts", ["none", "digest"])
async def test_none_keeps_nothing_made_of_the_text(tmp_path: Path, database_url: str, prompts: str) -> None:
    options = {"log__prompts": prompts, "control__shadow_share": 1.0, "policy__exploration_share": 0}
    async with serving(tmp_path, database_url, **options) as gateway:
        control = gateway.parts.control
        router, content = make_router(tmp_path, "shadow")
        await control.writer.routers.add(router, content, by="retrain")
        await control.writer.routers.start_rollout(router.version, by="retrain")
        answer = await gateway.chat("Under which law of contract may a court of appeal set aside the verdict?")
        assert answer.status_code == 200
        await control.shadow.settle()
        async with gateway.parts.store.transaction() as connection:
            row = (await connection.execute(select(requests))).mappings().one()
            shadow = (await connection.execute(select(shadow_decisions))).mappings().one()
            assert (await connection.execute(select(request_texts))).all() == []
        explained = (await gateway.client.get(f"/v1/requests/{row['request_id']}")).json()
    kept = {name for name in MADE_OF_THE_TEXT if row[name] not in (None, {}, [], "")}
    assert kept == (set() if prompts == "none" else MADE_OF_THE_TEXT)
    assert (shadow["sufficiency"] == [], shadow["novelty"] == 0.0) == (prompts == "none",) * 2
    assert row["decided_tier"] == shadow["tier"]
    assert explained["decision"]["tier"] == row["decided_tier"]
