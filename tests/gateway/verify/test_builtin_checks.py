"""Checks on the built-in ladder: real engines write, read and are cancelled; the shipped combination judges."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from backends.builtin.tasks.answer_checker import check
from gateway.config.settings import load_settings
from gateway.models.loader import make_backends
from gateway.outcomes.task_split import HOLDOUT_SPLIT, draw_split
from tests.gateway.harness import Gateway, running
from tests.gateway.verify.test_worker import until_done

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    directory = tmp_path_factory.mktemp("checks")
    overrides = {
        "policy.exploration_share": 0.0,
        "policy.sampling_share": 1.0,
        "policy.sampling.factors": [1.0, 1.0, 1.0],
        "verification.allowance_usd": 1.0,
        "verification.poll_s": 0.01,
    }
    settings = load_settings(environ={"HOME": str(directory)}, overrides=overrides)
    async with running(settings, make_backends(settings)) as up:
        yield up


@pytest.mark.slow
async def test_verdicts_agree_with_the_tasks_own_checker(gateway: Gateway) -> None:
    """Tier 1's answers, right and wrong ones: with a top tier that is nearly always right, wrong is not good enough."""
    tasks = draw_split(HOLDOUT_SPLIT, 5, 24)
    is_right = {}
    for task in tasks:
        response = await gateway.chat(task.prompt, suffice={"max_tier": 1}, temperature=0, max_tokens=400)
        answer = response.json()["choices"][0]["message"]["content"]
        is_right[response.headers["x-suffice-request-id"]] = check(task, answer)
    rows = [row for row in await until_done(gateway.parts.store, 24, timeout_s=150) if row["status"] == "done"]
    agreed = [bool(row["verdict"]) == is_right[row["request_id"]] for row in rows]
    assert 0 < sum(is_right.values()) < 24, "both kinds are there, or it proves nothing"
    assert sum(agreed) >= 22
    assert all(row["compute_s"] > 0 and row["cost_nano_usd"] > 0 for row in rows)
    assert {row["grader"] for row in rows} <= {"compare_and_read", "compare"}
    assert all("likelihood" in row["scores"] and "overlap" in row["scores"] for row in rows)
