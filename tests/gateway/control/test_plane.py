"""What is in force reaches the requests: policies, kill switch, routers and rollouts, over HTTP."""

from __future__ import annotations

import threading
from asyncio import gather
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.config.policy_body import to_body
from gateway.control import router_loader
from gateway.control.control_writer import ControlWriter
from gateway.store.control_records import RouterVersion
from gateway.store.records import PolicyVersion
from tests.gateway.control.ladder import make_router, serving
from tests.gateway.control.waiting import until
from tests.gateway.harness import Gateway, make_settings, running


def edited(gateway: Gateway, version: str, **changes: Any) -> PolicyVersion:
    policy = gateway.settings.policies["default"]
    body = to_body(policy) | changes
    return PolicyVersion(name="default", version=version, created_at=datetime.now(UTC), body=body, author="ada")


async def test_an_edit_is_in_force_at_once_and_after_a_restart(tmp_path: Path, database_url: str) -> None:
    settings = make_settings(tmp_path, database__url=database_url)
    async with running(settings) as gateway:
        before = (await gateway.chat()).headers["x-suffice-policy-version"]
        await gateway.parts.control.writer.policies.put(edited(gateway, "e1", allowed_tiers=[1]), by="ada")
        answer = await gateway.chat()
        assert answer.headers["x-suffice-policy-version"] == "default@e1" != before
        assert answer.headers["x-suffice-tier"] == "1"
    async with running(settings) as gateway:
        assert (await gateway.chat()).headers["x-suffice-policy-version"] == "default@e1"
    async with running(make_settings(tmp_path, database__url=database_url, policy__quality_floor=0.5)) as gateway:
        assert (await gateway.chat()).headers["x-suffice-policy-version"] != "default@e1"


async def test_a_new_policy_can_be_asked_for_and_a_removed_one_not(tmp_path: Path, sqlite_url: str) -> None:
    async with running(make_settings(tmp_path, database__url=sqlite_url)) as gateway:
        writer = gateway.parts.control.writer
        await writer.policies.put(replace(edited(gateway, "v1", allowed_tiers=[1]), name="thrifty"), by="ada")
        assert (await gateway.chat(model="thrifty")).headers["x-suffice-policy-version"] == "thrifty@v1"
        assert "thrifty" in [each["id"] for each in (await gateway.client.get("/v1/models")).json()["data"]]
        await writer.policies.remove("thrifty", by="ada")
        assert (await gateway.chat(model="thrifty")).status_code == 404


async def test_a_policy_that_cannot_be_read_leaves_the_one_before(tmp_path: Path, sqlite_url: str) -> None:
    async with running(make_settings(tmp_path, database__url=sqlite_url)) as gateway:
        control = gateway.parts.control
        before = (await gateway.chat()).headers["x-suffice-policy-version"]
        await control.writer.policies.put(edited(gateway, "bad", quality_floor="much"), by="ada")
        assert (await gateway.chat()).headers["x-suffice-policy-version"] == before
        assert "quality_floor" in (await gateway.client.get("/readyz")).json()["control"]["problem"]
        (alert,) = await control.store.list_alerts(only_open=True)
        assert "bad" in alert.subject
        await control.writer.policies.put(edited(gateway, "good"), by="ada")
        assert (await gateway.chat()).headers["x-suffice-policy-version"] == "default@good"
        assert await control.store.list_alerts(only_open=True) == []


async def test_the_kill_switch_outlives_a_restart(tmp_path: Path, database_url: str) -> None:
    settings = make_settings(tmp_path, database__url=database_url, policy__allowed_tiers=["simple", "expert"])
    async with running(settings) as gateway:
        await gateway.parts.control.writer.set_kill_switch(True, "fire", by="ada")
    async with running(settings) as gateway:
        answer = await gateway.chat()
        assert (answer.headers["x-suffice-tier"], answer.headers["x-suffice-reason"]) == ("2", "kill_switch")
        await gateway.parts.control.writer.set_kill_switch(False, "", by="ada")
        assert (await gateway.chat()).headers["x-suffice-reason"] != "kill_switch"


async def test_a_kill_switch_does_not_wait_for_a_router_that_loads(
    tmp_path: Path, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    real = router_loader.read_router

    def slow(*given: Any) -> Any:
        assert go_on.wait(60)
        return real(*given)

    monkeypatch.setattr(router_loader, "read_router", slow)
    async with serving(tmp_path, sqlite_url) as gateway:
        control = gateway.parts.control
        elsewhere = ControlWriter(control.store)
        router, content = make_router(tmp_path, "slow")
        await elsewhere.routers.add(router, content, by="retrain")
        await elsewhere.routers.promote(router.version, by="ada")
        await until(lambda: control._lock.locked())
        await elsewhere.set_kill_switch(True, "fire", by="ada")
        await until(lambda: gateway.parts.request_router.kill_switch)
        assert (await gateway.chat()).headers["x-suffice-reason"] == "kill_switch"
        assert control.routers.version != router.version
        go_on.set()
        await until(lambda: control.routers.version == router.version)
        assert control.state.kill_switch.on


async def test_tightened_tiers_give_requests_up_over_http(tmp_path: Path, sqlite_url: str) -> None:
    async with serving(tmp_path, sqlite_url, policy__exploration_share=0, policy__quality_floor=0.5) as gateway:
        control = gateway.parts.control
        before = await gateway.chat("What is 2 + 2?")
        tier = int(before.headers["x-suffice-tier"])
        assert tier < 4
        closed = dict.fromkeys(range(1, 4), 2.0)
        await control.writer.quarantines.add("default", control.routers.version, closed, "doubt", by="test")
        after = await gateway.chat("What is 2 + 2?")
        assert (after.headers["x-suffice-tier"], after.headers["x-suffice-reason"]) == ("4", "tightened")
        await control.writer.quarantines.add("default", "another router", closed, "doubt", by="test")
        await control.writer.quarantines.release(
            "default", control.routers.version, dict.fromkeys(range(1, 4)), by="test"
        )
        assert int((await gateway.chat("What is 2 + 2?")).headers["x-suffice-tier"]) == tier


async def test_a_promoted_router_serves_and_is_logged(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, database_url) as gateway:
        writer, first = gateway.parts.control.writer, gateway.parts.control.routers.version
        router, content = make_router(tmp_path, "second")
        await writer.routers.add(router, content, by="retrain")
        await writer.routers.promote(router.version, by="ada")
        assert (await gateway.chat()).headers["x-suffice-router-version"] == router.version
        assert await writer.routers.roll_back(by="ada") == first
        assert (await gateway.chat()).headers["x-suffice-router-version"] == first


@pytest.mark.parametrize("content", [b"", b"no router", b"PK\x03\x04 torn"])
async def test_a_router_that_cannot_be_loaded_changes_nothing(tmp_path: Path, sqlite_url: str, content: bytes) -> None:
    async with serving(tmp_path, sqlite_url) as gateway:
        control = gateway.parts.control
        serving_version = control.routers.version
        await control.writer.routers.add(
            RouterVersion(version="broken", created_at=datetime.now(UTC)), content, by="ada"
        )
        await control.writer.routers.promote("broken", by="ada")
        assert (await gateway.chat()).headers["x-suffice-router-version"] == serving_version
        (alert,) = await control.store.list_alerts(only_open=True)
        assert (alert.kind, alert.subject) == ("rollout", "broken")
        assert control.status()["problem"]
        await control.writer.routers.roll_back(by="ada")
        assert control.status()["problem"] == ""


async def test_another_content_under_a_versions_name_is_refused(tmp_path: Path, sqlite_url: str) -> None:
    async with serving(tmp_path, sqlite_url) as gateway:
        control = gateway.parts.control
        router, content = make_router(tmp_path, "real")
        await control.writer.routers.add(replace(router, version="0" * 16), content, by="ada")
        await control.writer.routers.promote("0" * 16, by="ada")
        assert router.version in control.problem
        assert control.routers.version != "0" * 16


async def _versions(gateway: Gateway, num_sessions: int) -> dict[int, str]:
    """Which router served each of these conversations, all asked at once."""
    answers = await gather(*(gateway.chat(suffice={"session_id": f"s{n}"}) for n in range(num_sessions)))
    return {n: answer.headers["x-suffice-router-version"] for n, answer in enumerate(answers)}


async def test_a_canary_has_its_share_of_conversations_and_keeps_them(tmp_path: Path, sqlite_url: str) -> None:
    async with serving(tmp_path, sqlite_url) as gateway:
        control = gateway.parts.control
        router, content = make_router(tmp_path, "canary")
        await control.writer.routers.add(router, content, by="retrain")
        await control.writer.routers.start_rollout(router.version, by="retrain")
        assert set((await _versions(gateway, 20)).values()) == {control.routers.version}, "in shadow it serves nobody"
        canary = control.state.router.canary
        served: dict[float, dict[int, str]] = {}
        for share in (0.25, 0.75):
            await control.writer.routers.move_rollout(replace(canary, stage="partial", share=share), {}, "", by="test")
            for again in range(2):
                found = await _versions(gateway, 100)
                assert again == 0 or found == served[share], "a conversation keeps its router"
                served[share] = found
        num = {share: Counter(found.values())[router.version] for share, found in served.items()}
        assert 10 <= num[0.25] <= 42
        assert 58 <= num[0.75] <= 90
        assert {n for n, v in served[0.25].items() if v == router.version} <= {
            n for n, v in served[0.75].items() if v == router.version
        }, "a rising share keeps its conversations"
        await control.writer.routers.roll_back(by="ada")
        assert router.version not in (await _versions(gateway, 40)).values()
