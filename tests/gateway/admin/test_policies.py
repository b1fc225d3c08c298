"""Policies over HTTP: saved as versions, refused when stale or wrong, in force at once, brought back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gateway.admin.kit import Admin, administered

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"colour": 1}, "colour"),
    ({"quality_floor": 1.2}, "quality_floor"),
    ({"quality_floor": "high"}, "quality_floor"),
    ({"mode": "guess"}, "mode"),
    ({"allowed_tiers": [1, 9]}, "allowed_tiers"),
    ({"allowed_tiers": "one"}, "allowed_tiers"),
    ({"thresholds": {"7": 0.5}}, "thresholds"),
    ({"thresholds": {"1": 3}}, "thresholds.1"),
    ({"thresholds": {"one": 0.5}}, "thresholds"),
    ({"sampling": {"shares": {"1": 2}}}, "sampling"),
    ({"sampling": {"share": 1}}, "sampling.share"),
    ({"sampling": 5}, "sampling"),
    ({"quality_value_usd": -1}, "quality_value_usd"),
    ({"expected_output_tokens": 0}, "expected_output_tokens"),
    ({"max_fallbacks": 1.5}, "max_fallbacks"),
    ({"name": "other"}, "name"),
    ({"version": "7"}, "version"),
]


async def test_a_saved_policy_is_in_force_at_once_and_its_history_stays(tmp_path: Path, database_url: str) -> None:
    async with administered(tmp_path, database__url=database_url) as admin:
        body, tag = await admin.body()
        saved = await admin(
            "PUT", "/policies/default?note=up", json=body | {"allowed_tiers": [1]}, headers={"if-match": tag}
        )
        assert saved.status_code == 200
        assert saved.headers["etag"] != tag
        assert (await admin.gateway.chat("hi")).headers[
            "x-suffice-policy-version"
        ] == f"default@{saved.json()['version']}"
        assert (await admin.gateway.chat("hi")).headers["x-suffice-reason"] == "only_allowed"
        versions = (await admin.get("/policies/default/versions"))["data"]
        assert [each["author"] for each in versions] == ["anonymous", "config"]
        assert versions[0]["note"] == "up"
        diff = await admin.get(f"/policies/default/diff?from={tag.strip(chr(34))}")
        assert diff["changes"] == [{"field": "allowed_tiers", "from": [], "to": [1]}]
        back = await admin("POST", "/policies/default/rollback")
        assert back.headers["etag"] == tag
        again = await admin("POST", "/policies/default/activate", json={"version": versions[0]["version"]})
        assert again.json()["body"]["allowed_tiers"] == [1]


async def test_an_edit_outlives_a_restart(tmp_path: Path, database_url: str) -> None:
    async with administered(tmp_path, database__url=database_url) as admin:
        body, tag = await admin.body()
        await admin("PUT", "/policies/default", json=body | {"quality_floor": 0.5}, headers={"if-match": tag})
    async with administered(tmp_path, database__url=database_url) as admin:
        assert (await admin.body())[0]["quality_floor"] == 0.5


async def test_only_who_has_read_may_write(tmp_path: Path, database_url: str) -> None:
    async with administered(tmp_path, database__url=database_url) as admin:
        body, tag = await admin.body()
        new = body | {"quality_floor": 0.9}
        await admin.error("PUT", "/policies/default", 428, "precondition_required", "If-Match", json=new)
        assert (await admin("PUT", "/policies/default", json=new, headers={"if-match": tag})).status_code == 200
        stale = {"json": body | {"quality_floor": 0.8}, "headers": {"if-match": tag}}
        await admin.error("PUT", "/policies/default", 412, "precondition_failed", "If-Match", **stale)
        assert (await admin.body())[0]["quality_floor"] == 0.9
        create = {"json": body, "headers": {"if-none-match": "*"}}
        await admin.error("PUT", "/policies/default", 412, "precondition_failed", "If-Match", **create)
        made = await admin("PUT", "/policies/frugal", **create)
        assert made.status_code == 200
        assert (await admin.gateway.chat("hi", model="frugal")).status_code == 200
        await admin.error("DELETE", "/policies/frugal", 428, "precondition_required", "If-Match")
        gone = await admin("DELETE", "/policies/frugal", headers={"if-match": made.headers["etag"]})
        assert gone.json() == {"name": "frugal", "is_active": False}
        assert (await admin.gateway.chat("hi", model="frugal")).status_code == 404
        listed = {each["name"]: each["is_active"] for each in (await admin.get("/policies"))["data"]}
        assert listed == {"default": True, "careful": True, "frugal": False}
        _, tag = await admin.body()
        await admin.error("DELETE", "/policies/default", 400, "invalid_value", "name", headers={"if-match": tag})


@pytest.mark.parametrize(("change", "param"), WRONG, ids=str)
async def test_a_wrong_field_is_named_by_saving_trying_and_validating(
    tmp_path: Path, change: dict[str, Any], param: str
) -> None:
    async with administered(tmp_path) as admin:
        body, tag = await admin.body()
        wrong = body | change
        refused = await admin("PUT", "/policies/default", json=wrong, headers={"if-match": tag})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith(param), refused.text
        tried = await admin("POST", "/what-if", json={"policy": wrong})
        assert tried.json()["error"]["param"].startswith(f"policy.{param}")
        found = (await admin("POST", "/policies/default/validate", json=wrong)).json()
        assert not found["valid"]
        assert found["problems"][0]["param"].startswith(param)
        assert (await admin.body())[0] == body


async def test_validate_says_the_version_a_policy_would_be(tmp_path: Path) -> None:
    async with administered(tmp_path) as admin:
        body, tag = await admin.body()
        found = (await admin("POST", "/policies/default/validate", json=body | {"quality_floor": 0.5})).json()
        assert found["valid"]
        saved = await admin("PUT", "/policies/default", json=body | {"quality_floor": 0.5}, headers={"if-match": tag})
        assert saved.json()["version"] == found["version"]


async def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    async with administered(tmp_path) as admin:
        for method, path, options in (
            ("GET", "/policies/none", {}),
            ("GET", "/policies/none/versions", {}),
            ("GET", "/policies/none/diff?from=x", {}),
            ("GET", "/policies/default/diff?from=x", {}),
            ("POST", "/policies/none/activate", {"json": {"version": "x"}}),
            ("POST", "/policies/default/activate", {"json": {"version": "x"}}),
            ("POST", "/policies/none/rollback", {}),
            ("POST", "/policies/none/default", {}),
            ("POST", "/policies/none/release", {}),
            ("DELETE", "/policies/none", {"headers": {"if-match": '"x"'}}),
        ):
            await admin.error(method, path, 404, "not_found", **options)
        await admin.error("POST", "/policies/default/rollback", 409, "conflict")
        await admin.error("GET", "/policies/default/diff", 400, "invalid_value", "from")
        await admin.error("POST", "/policies/default/activate", 400, "invalid_value", "version", json={})
        name = await admin("PUT", "/policies/a%20b", json={}, headers={"if-none-match": "*"})
        assert name.json()["error"]["param"] == "name"


async def test_another_default_and_a_release(tmp_path: Path) -> None:
    async with administered(tmp_path) as admin:
        assert (await admin("POST", "/policies/careful/default")).json()["is_default"]
        assert (await admin.gateway.chat("hi")).headers["x-suffice-policy-version"].startswith("careful@")
        plane = admin.gateway.parts.control
        await plane.writer.quarantines.add("careful", None, {1: 2.0}, "a test", by="monitor")
        assert (await _thresholds(admin))["careful"][0]["is_closed"]
        assert (await admin.get("/policies/careful"))["tightened"]["none"]["1"]["least"] == 2.0
        released = await admin("POST", "/policies/careful/release", json={"reason": "looked at"})
        assert list(released.json()["released"]["none"]) == ["1"]
        assert not (await _thresholds(admin))["careful"][0]["is_closed"]
        assert (await admin("POST", "/policies/careful/release")).json()["released"] == {}


async def _thresholds(admin: Admin) -> dict[str, list[dict[str, Any]]]:
    return {each["policy"]: each["tiers"] for each in (await admin.get("/thresholds"))["data"]}
