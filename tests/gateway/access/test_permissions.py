"""Keys bound to policies, tiers and regions, over real HTTP: nothing a caller says leaves them (security review M9)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.errors import BackendUnavailable
from backends.testing import Script
from gateway.access.key_permissions import read_permissions
from gateway.admin.decision_replay import facts_of
from gateway.errors import InvalidRequest
from gateway.store.tables import verifications
from tests.gateway.access.test_limits_http import limited
from tests.gateway.admin.kit import Admin, administered
from tests.gateway.endpoints.test_pages import FixedRouter
from tests.gateway.harness import ECHO, Gateway, Watched, assert_error

LADDER = """
[[tiers]]
name = "simple"
model = "small"
region = "eu"
price_per_request_usd = 0.0001

[[tiers]]
name = "expert"
model = "large"
region = "us"
price_per_request_usd = 0.01

[models.small]
kind = "echo"

[models.large]
kind = "echo"

[policies.local]
allowed_regions = ["eu"]

[policies.open]
exploration_share = 1.0
{policy}
"""
WAYS_OUT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as it comes", {}),
    ("the tier's name", {"model": "expert"}),
    ("the tier's number", {"model": "tier-2"}),
    ("the model", {"model": "large"}),
    ("the policy as the model", {"model": "open"}),
    ("the policy", {"suffice": {"policy": "open"}}),
    ("the default policy", {"suffice": {"policy": "default"}}),
    ("a pin", {"suffice": {"tier": "expert"}}),
    ("a pin by number", {"suffice": {"tier": 2}}),
    ("the least tier", {"suffice": {"min_tier": 2}}),
    ("regions", {"suffice": {"regions": ["us"]}}),
    ("policy and pin", {"suffice": {"policy": "open", "tier": 2, "regions": ["us", "eu"]}}),
    ("a conversation", {"suffice": {"session_id": "at the expert's"}}),
    ("exploration", {"suffice": {"explore": True}}),
    ("many answers", {"n": 3}),
    ("a long prompt", {"messages": [{"role": "user", "content": "word " * 1500}], "max_tokens": 300}),
    ("in the background", {"suffice": {"priority": "background"}}),
)
BINDINGS: tuple[dict[str, Any], ...] = (
    {"allowed_tiers": ["simple"]},
    {"allowed_regions": ["eu"]},
    {"allowed_policies": ["local"]},
    {"allowed_policies": ["local", "open"], "allowed_tiers": [1]},
)


@asynccontextmanager
async def bound(
    directory: Path, permissions: Mapping[str, Any], *, small: Script = ECHO, policy: str = "", **overrides: Any
) -> AsyncIterator[tuple[Admin, dict[str, str]]]:
    """A server of two tiers in two regions, and a key made by its administration."""
    backends = {"small": Watched("small", small), "large": Watched("large")}
    toml = LADDER.replace("{policy}", policy)
    router = FixedRouter(0.2, 0.99)
    async with administered(directory, backends=backends, router=router, toml=toml, **overrides) as admin:
        made = await admin("POST", "/keys", json={"permissions": permissions})
        assert made.status_code == 201, made.text
        yield admin, {"authorization": f"Bearer {made.json()['key']}"}


async def ask(gateway: Gateway, key: Mapping[str, str], /, path: str = "chat/completions", **body: Any) -> Any:
    asked: dict[str, Any] = {"model": "auto"} | body
    if path == "chat/completions":
        asked = {"messages": [{"role": "user", "content": "hi"}]} | asked
    else:
        asked = {"prompt": "hi"} | {name: each for name, each in asked.items() if name != "messages"}
    return await gateway.client.post(f"/v1/{path}", json=asked, headers=key)


def assert_kept_in(response: httpx.Response) -> None:
    """Answered where the key may, or refused with what is to blame."""
    if response.status_code == 200:
        assert response.headers["x-suffice-model"] == "small"
        return
    error = response.json()["error"]
    assert error["code"] in {
        "policy_not_permitted",
        "tier_not_permitted",
        "region_not_permitted",
        "context_length_exceeded",
    }, error
    assert error["param"] is not None


async def test_another_policy_is_refused_where_the_first_one_ends(tmp_path: Path) -> None:
    """The reproduction: a policy whose budget is used up, and a caller who names another one."""
    options = {"policy__allowed_regions": ["eu"], "policy__budget_usd_per_day": 0}
    wide = 'allowed_regions = ["eu", "us"]\nbudget_usd_per_day = 100'
    async with bound(tmp_path, {"allowed_policies": ["default"]}, policy=wide, **options) as (admin, key):
        gateway = admin.gateway
        assert_error(await ask(gateway, key), 429, "insufficient_quota")
        by_body = await ask(gateway, key, suffice={"policy": "open"})
        error = assert_error(by_body, 403, "policy_not_permitted", "suffice.policy")
        assert "'open'" in error["message"]
        by_header = await ask(gateway, key | {"x-suffice-policy": "open"})
        assert_error(by_header, 403, "policy_not_permitted", "suffice.policy")
        assert_error(await ask(gateway, key, model="open"), 403, "policy_not_permitted", "model")
        both = await ask(gateway, key, model="open", suffice={"policy": "default"})
        assert_error(both, 403, "policy_not_permitted", "model")
        unknown = await ask(gateway, key, suffice={"policy": "nobody's"})
        assert_error(unknown, 403, "policy_not_permitted", "suffice.policy")
        assert gateway.backends["large"].num_seen == 0
        assert (await gateway.chat(suffice={"policy": "open"})).status_code == 200, "others may"


@pytest.mark.slow
@pytest.mark.parametrize("permissions", BINDINGS, ids=str)
async def test_no_way_leads_out(tmp_path: Path, permissions: dict[str, Any]) -> None:
    """Every word a caller has, on both endpoints, routed freely, by the kill switch, and with the tier down."""
    async with bound(tmp_path, permissions, policy__sampling_share=1.0) as (admin, key):
        gateway = admin.gateway
        seen = gateway.backends["large"]
        first = await gateway.chat(model="expert", suffice={"session_id": "at the expert's"})
        assert first.headers["x-suffice-model"] == "large"
        before = seen.num_seen
        for is_on in (False, True):
            gateway.parts.request_router.kill_switch = is_on
            for path in ("chat/completions", "completions"):
                for words, body in WAYS_OUT:
                    assert_kept_in(await ask(gateway, key, path, **body))
                    assert seen.num_seen == before, (words, path, is_on)
        gateway.parts.request_router.kill_switch = False
        assert (await ask(gateway, key)).headers["x-suffice-model"] == "small"


@pytest.mark.parametrize("permissions", BINDINGS, ids=str)
async def test_neither_failure_nor_doubt_leads_out(tmp_path: Path, permissions: dict[str, Any]) -> None:
    async with bound(tmp_path, permissions, small=Script(fail_before=BackendUnavailable("down"))) as (admin, key):
        assert_error(await ask(admin.gateway, key), 503, "model_unavailable")
        assert admin.gateway.backends["large"].num_seen == 0
    doubts = 'escalation = {mode = "top", least_confidence = {"1" = 1.0}}\nquality_floor = 0.1'
    options = {"policy__escalation__mode": "top", "policy__escalation__least_confidence": {"1": 1.0}}
    async with bound(tmp_path, permissions, policy=doubts, **options) as (admin, key):
        assert (await ask(admin.gateway, key)).headers["x-suffice-model"] == "small"
        assert admin.gateway.backends["large"].num_seen == 0


@pytest.mark.parametrize("permissions", BINDINGS, ids=str)
async def test_no_check_leads_out(tmp_path: Path, permissions: dict[str, Any]) -> None:
    """Every answer would be drawn, and is where the key permits it; a bound prompt has no job that could leave."""
    share = "sampling_share = 1.0\nallowed_tiers = [1, 2]"
    options = {"policy__sampling_share": 1.0, "verification__worker": False}
    async with bound(tmp_path, permissions, policy=share, **options) as (admin, key):
        gateway = admin.gateway
        for body in ({}, {"suffice": {"policy": "open"}}):
            await ask(gateway, key, **body)
        async with gateway.parts.store.transaction() as connection:
            assert (await connection.execute(verifications.select())).all() == []
        drawn = await gateway.chat(suffice={"max_tier": 1})
        assert drawn.headers["x-suffice-model"] == "small"
        async with gateway.parts.store.transaction() as connection:
            assert len((await connection.execute(verifications.select())).all()) == 1, "others' are drawn"


@pytest.mark.parametrize("permissions", BINDINGS, ids=str)
async def test_models_are_those_the_key_may_use(tmp_path: Path, permissions: dict[str, Any]) -> None:
    """What is listed can be asked for, nothing else is, and errors tell no other names."""
    async with bound(tmp_path, permissions) as (admin, key):
        gateway = admin.gateway
        listed = (await gateway.client.get("/v1/models", headers=key)).json()["data"]
        names = [each["id"] for each in listed]
        assert "auto" in names
        assert not {"expert", "tier-2", "large"} & set(names)
        assert "allowed_policies" not in permissions or "default" not in names
        everything = [each["id"] for each in (await gateway.client.get("/v1/models")).json()["data"]]
        for name in everything:
            status = (await gateway.client.get(f"/v1/models/{name}", headers=key)).status_code
            assert (status == 200) == (name in names)
            answered = await ask(gateway, key, model=name)
            assert_kept_in(answered)
            assert answered.status_code == 200 or name not in names or "policies" in str(permissions), name
            if name not in names:
                assert answered.status_code in (400, 403), name
        missing = assert_error(await ask(gateway, key, model="none"), 404, "model_not_found", "model")
        hidden = set(everything) - set(names)
        told = missing["message"].partition("lists what is: ")[2].rstrip(".").split(", ")
        assert not hidden & set(told)


async def test_a_bound_key_has_a_default_policy_of_its_own(tmp_path: Path) -> None:
    """The default one where it may use it, else its first; none of them served is an error that says so."""
    async with bound(tmp_path, {"allowed_policies": ["open", "default"]}) as (admin, key):
        gateway = admin.gateway
        assert (await ask(gateway, key)).status_code == 200
        assert (await gateway.row()).policy_name == "default"
        made = await admin("POST", "/keys", json={"permissions": {"allowed_policies": ["local", "open"]}})
        other = {"authorization": f"Bearer {made.json()['key']}"}
        assert (await ask(gateway, other)).status_code == 200
        assert (await gateway.rows())[0].policy_name == "local"
        for name in ("local", "open"):
            _, etag = await admin.body(name)
            assert (await admin("DELETE", f"/policies/{name}", headers={"if-match": etag})).status_code == 200
        error = assert_error(await ask(gateway, other), 403, "policy_not_permitted", "suffice.policy")
        assert "local, open" in error["message"]
        assert (await gateway.client.get("/v1/models", headers=other)).json()["data"] == []


async def test_vectors_are_made_by_permitted_models(tmp_path: Path) -> None:
    async with bound(tmp_path, {"allowed_tiers": ["expert"]}) as (admin, key):
        post, body = admin.gateway.client.post, {"model": "auto", "input": "a b"}
        answered = await post("/v1/embeddings", json=body, headers=key)
        assert (answered.status_code, answered.json()["model"]) == (200, "large")
        for name in ("small", "simple"):
            refused = await post("/v1/embeddings", json=body | {"model": name}, headers=key)
            assert_error(refused, 403, "tier_not_permitted", "model")
        assert admin.gateway.backends["small"].num_seen == 0


async def test_the_row_says_what_the_key_barred_and_can_be_replayed(tmp_path: Path) -> None:
    async with bound(tmp_path, {"allowed_tiers": [1, "simple"]}) as (admin, key):
        gateway = admin.gateway
        await ask(gateway, key)
        row = await gateway.row()
        assert row.barred == {2: "key"}
        assert row.overrides == {"permissions": {"allowed_tiers": ["simple"]}}
        shown = (await gateway.client.get(f"/v1/requests/{row.request_id}", headers=key)).json()
        assert [each["barred_by"] for each in shown["tiers"]] == [None, "key"]
        assert facts_of(row, gateway.parts.catalog).overrides.permissions.allowed_tiers == ("simple",)
        replayed = (await admin.get(f"/requests/{row.request_id}"))["replay"]["today"]
        assert (replayed["tier"], replayed["differs"]) == (1, False)


async def test_what_a_key_may_use_is_changed(tmp_path: Path) -> None:
    async with bound(tmp_path, {"allowed_tiers": ["simple"]}) as (admin, key):
        gateway = admin.gateway
        listed = (await admin.get("/keys"))["data"][0]
        assert listed["permissions"] == {"allowed_tiers": ["simple"]}
        assert_error(await ask(gateway, key, model="expert"), 403, "tier_not_permitted", "suffice.tier")
        changed = await admin("PUT", f"/keys/{listed['id']}/permissions", json={"permissions": None})
        assert changed.json()["permissions"] == {}
        assert (await ask(gateway, key, model="expert")).status_code == 200
        tag = {"if-match": "other"}
        path = f"/keys/{listed['id']}/permissions"
        await admin.error("PUT", path, 412, "precondition_failed", "If-Match", json={}, headers=tag)
        await admin.error("PUT", "/keys/none/permissions", 404, "not_found", json={})
        assert [each["action"] for each in (await admin.get("/audit"))["data"]].count("bind_key") >= 2


@pytest.mark.parametrize(
    ("permissions", "param"),
    [
        ([], "permissions"),
        ({"tiers": ["simple"]}, "permissions.tiers"),
        ({"allowed_tiers": []}, "permissions.allowed_tiers"),
        ({"allowed_tiers": ["simple", "gone"]}, "permissions.allowed_tiers[1]"),
        ({"allowed_tiers": [3]}, "permissions.allowed_tiers[0]"),
        ({"allowed_tiers": [True]}, "permissions.allowed_tiers[0]"),
        ({"allowed_regions": ["mars"]}, "permissions.allowed_regions[0]"),
        ({"allowed_regions": "eu"}, "permissions.allowed_regions"),
        ({"allowed_policies": ["default", "gone"]}, "permissions.allowed_policies[1]"),
        ({"allowed_policies": [""]}, "permissions.allowed_policies[0]"),
    ],
    ids=str,
)
async def test_wrong_permissions_are_refused(tmp_path: Path, permissions: Any, param: str) -> None:
    async with bound(tmp_path, {}) as (admin, _):
        refused = await admin("POST", "/keys", json={"permissions": permissions})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        listed = (await admin.get("/keys"))["data"]
        assert len(listed) == 1
        path = f"/keys/{listed[0]['id']}/permissions"
        assert (await admin("PUT", path, json={"permissions": permissions})).json()["error"]["param"] == param


async def test_a_key_for_administration_has_no_permissions(tmp_path: Path) -> None:
    async with bound(tmp_path, {}) as (admin, _):
        body = {"scope": "admin", "permissions": {"allowed_tiers": ["simple"]}}
        assert_error(await admin("POST", "/keys", json=body), 400, "invalid_value", "permissions")


async def test_a_key_whose_tier_is_gone_opens_nothing(tmp_path: Path) -> None:
    """Names that the ladder lost permit nothing: a key must not open more with another configuration."""
    async with bound(tmp_path, {}) as (admin, _):
        key = await limited(admin.gateway, permissions={"allowed_tiers": ["gone"]})
        error = assert_error(await ask(admin.gateway, key), 403, "tier_not_permitted", "suffice.policy")
        assert "none of the tiers" in error["message"]
        assert (await admin.gateway.client.get("/v1/models", headers=key)).json()["data"] == []


def test_a_permission_names_one_to_sixty_four_things_by_names_as_long() -> None:
    for member in ("allowed_policies", "allowed_tiers", "allowed_regions"):
        for named in (["n"], ["n" * 64], [f"n{number}" for number in range(64)]):
            assert getattr(read_permissions({member: named}, "permissions"), member) == tuple(named)
        for named in ([], [""], ["n" * 65], [f"n{number}" for number in range(65)]):
            with pytest.raises(InvalidRequest) as refused:
                read_permissions({member: named}, "permissions")
            assert refused.value.param.startswith(f"permissions.{member}")
