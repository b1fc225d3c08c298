"""A what-if runs in a process of its own, one at a time, and ends when nobody waits for it."""

from __future__ import annotations

import asyncio
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admin.trial_process import Trial, run_trial
from gateway.config.store_section import StoreConfig
from gateway.store.admin_queries import RequestFilter
from gateway.store.errors import StoreUnavailable
from policies.policy import Policy
from tests.gateway.admin.kit import PREFIX, administered
from tests.gateway.admin.test_log import put, record
from tests.gateway.control.waiting import until
from tests.gateway.raw import PATIENCE_S
from tests.policies.strategies import PLACED, usable_policies


def children() -> list[int]:
    """Trials that this process has started and that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) if entry.name.isdigit() else 0
            if parent == os.getpid() and b"gateway.admin.trial_process" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (OSError, IndexError):
            continue
    return found


@given(policy=usable_policies, since=st.none() | st.just(datetime(2026, 1, 2, tzinfo=UTC)))
def test_what_is_tried_travels_whole(policy: Policy, since: datetime | None) -> None:
    trial = Trial(policy, PLACED, RequestFilter(tenant="a", since=since), 100, 1.5)
    assert Trial.from_dict(json.loads(json.dumps(trial.as_dict()))) == trial


async def test_a_caller_who_leaves_takes_the_trial_along(tmp_path: Path, database_url: str) -> None:
    async with administered(tmp_path, database__url=database_url) as admin:
        await put(admin, *(record() for _ in range(5)))
        asking = asyncio.create_task(admin.gateway.client.post(f"{PREFIX}/what-if", json={}))
        await until(lambda: bool(children()))
        asking.cancel()
        async with asyncio.timeout(PATIENCE_S):
            while not (found := (await admin.get("/audit?action=try_policy"))["data"]):  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.02)
        assert [each["status"] for each in found] == [499]
        assert children() == []
        assert (await admin.get("/evaluations"))["data"] == []


@pytest.mark.slow
async def test_a_second_trial_waits_for_its_turn(tmp_path: Path) -> None:
    async with administered(tmp_path) as admin:
        await put(admin, *(record() for _ in range(5)))
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, len(await asyncio.to_thread(children)))
                await asyncio.sleep(0.01)

        watching = asyncio.create_task(watch())
        answers = await asyncio.gather(*(admin("POST", "/what-if", json={}) for _ in range(3)))
        watching.cancel()
        assert [each.json()["num_rows"] for each in answers] == [5, 5, 5]
        assert most == 1


async def test_a_trial_without_a_database_says_so(tmp_path: Path) -> None:
    trial = Trial(Policy(), PLACED, RequestFilter(), 10, 5.0)
    with pytest.raises(StoreUnavailable, match="nowhere"):
        await run_trial(trial, StoreConfig(url=f"sqlite:////proc/nowhere/{tmp_path.name}.db"))
