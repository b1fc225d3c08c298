"""The shadow router's task outlives what cannot be stored."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from gateway.ids import uuid7
from tests.gateway.control.ladder import make_router, serving


async def test_a_decision_that_cannot_be_stored_costs_no_other(tmp_path: Path, database_url: str) -> None:
    """A fault of one row ended the task, so every later decision was lost (security review, suspected)."""
    async with serving(tmp_path, database_url, control__shadow_share=1.0, policy__exploration_share=0) as gateway:
        control = gateway.parts.control
        router, content = make_router(tmp_path, "shadow")
        await control.writer.routers.add(router, content, by="retrain")
        since = datetime.now(UTC)
        await control.writer.routers.start_rollout(router.version, by="retrain")
        shadow, seen = control.shadow, []
        observe = shadow.observe
        shadow.observe = lambda routed, *, is_drawn: seen.append(routed)
        await gateway.chat("What is 2 + 2?")
        (routed,) = seen
        too_large = replace(routed, request_id=uuid7(), tier=2**70)
        for each in (routed, too_large, replace(routed, request_id=uuid7())):
            observe(each, is_drawn=True)
        await shadow.settle()
        observe(replace(routed, request_id=uuid7()), is_drawn=True)
        await shadow.settle()
        num, _, _ = await control.store.count_shadow_decisions(router.version, since)
        assert num == 3, "beside it and after it"
        assert shadow.num_left_out == 1
