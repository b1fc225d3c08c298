"""Prompts stay in their regions, and requests within what they may cost, over real HTTP whatever else happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.errors import BackendUnavailable
from backends.testing import Script
from gateway.config.errors import SettingsError
from gateway.config.policy_body import to_body
from gateway.config.settings import Settings
from tests.gateway.admin.kit import administered
from tests.gateway.endpoints.test_pages import FixedRouter
from tests.gateway.harness import (
    ECHO,
    LADDER_TOML,
    Gateway,
    Watched,
    assert_error,
    echo_backends,
    make_settings,
    running,
)

PLACED = {"tiers__simple__region": "eu", "tiers__expert__region": "us"}
NEW = {"if-none-match": "*"}
EU = PLACED | {"policy__allowed_regions": ["eu"]}


def watched(small: Script = ECHO) -> dict[str, Any]:
    return {"small": Watched("small", small), "large": Watched("large")}


def placed(directory: Path, **overrides: Any) -> Settings:
    """The two tiers in two regions, by one policy."""
    toml = LADDER_TOML.replace('[policies.careful]\nallowed_tiers = ["expert"]\n', "")
    assert toml != LADDER_TOML
    return make_settings(directory, toml, **(PLACED | overrides))


def assert_unseen(gateway: Gateway, model: str = "large") -> None:
    assert gateway.backends[model].num_seen == 0
    gateway.assert_idle()


async def test_the_safe_choice_stays_in_the_region_and_the_row_says_why(tmp_path: Path) -> None:
    """Without a router the highest tier is the safe choice; here it is the highest of the region."""
    async with running(placed(tmp_path, **EU), watched()) as gateway:
        response = await gateway.chat()
        assert response.headers["x-suffice-model"] == "small"
        row = await gateway.row()
        assert row.barred == {2: "region"}
        shown = (await gateway.client.get(f"/v1/requests/{row.request_id}")).json()
        assert [(each["barred_by"], each["answered"]) for each in shown["tiers"]] == [(None, True), ("region", False)]
        assert float(shown["tiers"][1]["cost_usd"]) > 0.01
        listed = (await gateway.client.get("/v1/models/auto")).json()
        assert listed["suffice"]["tiers"] == [1]
        assert_unseen(gateway)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "expert"}, "suffice.tier"),
        ({"model": "large"}, "suffice.tier"),
        ({"suffice": {"tier": "expert"}}, "suffice.tier"),
        ({"suffice": {"min_tier": 2}}, "suffice.policy"),
        ({"suffice": {"regions": ["us"]}}, "suffice.regions"),
        ({"suffice": {"regions": ["mars"]}}, "suffice.regions"),
    ],
)
async def test_a_pin_outside_is_refused(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async with running(placed(tmp_path, **EU), watched()) as gateway:
        error = assert_error(await gateway.chat(**body), 400, "region_not_permitted", param)
        assert "policy 'default' allows eu" in error["message"]
        assert await gateway.rows() == []
        assert_unseen(gateway)
        assert_unseen(gateway, "small")


async def test_a_request_narrows_by_body_or_header(tmp_path: Path) -> None:
    async with running(placed(tmp_path), watched()) as gateway:
        assert (await gateway.chat()).headers["x-suffice-model"] == "large", "anywhere is permitted"
        for suffice in ({"regions": "eu"}, {"regions": ["eu", "ch"]}):
            assert (await gateway.chat(suffice=suffice)).headers["x-suffice-model"] == "small"
        headers = {"x-suffice-regions": "ch, eu"}
        body = {"model": "auto", "messages": [{"role": "user", "content": "hi"}]}
        by_header = await gateway.client.post("/v1/chat/completions", json=body, headers=headers)
        assert by_header.headers["x-suffice-model"] == "small"
        by_body = body | {"suffice": {"regions": ["us"]}}
        both = await gateway.client.post("/v1/chat/completions", json=by_body, headers=headers)
        assert both.headers["x-suffice-model"] == "large", "the body decides"
        assert_error(await gateway.chat(suffice={"regions": []}), 400, "invalid_value", "suffice.regions")
        assert len(gateway.backends["large"].requests) == 2
        assert [tuple(row.overrides.get("regions", ())) for row in await gateway.rows()][-2] == ("eu",)


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
async def test_neither_failure_nor_length_lets_a_prompt_out(tmp_path: Path, endpoint: str) -> None:
    """A prompt that has to be counted is counted inside, and what fails inside has failed."""
    settings = placed(tmp_path, **EU, tiers__simple__context_length=2000, tiers__expert__context_length=4000)
    long = "word " * 1900
    body = {"messages": [{"role": "user", "content": long}]} if "chat" in endpoint else {"prompt": long}
    async with running(settings, watched()) as gateway:
        answered = await gateway.client.post(endpoint, json=body | {"model": "auto", "max_tokens": 5})
        assert answered.headers["x-suffice-model"] == "small"
        too_long = await gateway.client.post(endpoint, json=body | {"model": "auto", "max_tokens": 500})
        assert_error(too_long, 400, "context_length_exceeded", "messages")
        assert_unseen(gateway)
    async with running(settings, watched(Script(fail_before=BackendUnavailable("down")))) as gateway:
        assert_error(await gateway.client.post(endpoint, json=body | {"model": "auto"}), 503, "model_unavailable")
        assert_unseen(gateway)


async def test_no_doubt_escalates_beyond_the_region(tmp_path: Path) -> None:
    doubts = {"escalation__mode": "top", "escalation__least_confidence": {"1": 1.0}, "quality_floor": 0.5}
    for regions, num_asked in ((["eu", "us"], 1), (["eu"], 0)):
        policy = {f"policy__{name}": value for name, value in (doubts | {"allowed_regions": regions}).items()}
        settings = placed(tmp_path, **policy, policy__exploration_share=0.0)
        async with running(settings, watched(), router=FixedRouter(0.9, 0.95)) as gateway:
            assert (await gateway.chat()).status_code == 200
            assert len(gateway.backends["small"].requests) == 1
            assert len(gateway.backends["large"].requests) == num_asked


async def test_the_kill_switch_goes_to_the_top_of_the_region(tmp_path: Path) -> None:
    async with running(placed(tmp_path, **EU), watched()) as gateway:
        gateway.parts.request_router.kill_switch = True
        response = await gateway.chat()
        assert response.headers["x-suffice-model"] == "small"
        assert_unseen(gateway)


async def test_vectors_are_made_inside(tmp_path: Path) -> None:
    """``auto`` takes the first model that may; here the first that can may not."""
    settings = placed(tmp_path, policy__allowed_regions=["us"])
    async with running(settings, watched()) as gateway:
        post = gateway.client.post
        answer = await post("/v1/embeddings", json={"model": "auto", "input": "a b"})
        assert (answer.status_code, answer.json()["model"]) == (200, "large")
        named = await post("/v1/embeddings", json={"model": "small", "input": "a b"})
        assert_error(named, 400, "region_not_permitted", "suffice.policy")
        narrowed = await post(
            "/v1/embeddings", json={"model": "auto", "input": "a"}, headers={"x-suffice-regions": "eu"}
        )
        assert_error(narrowed, 400, "region_not_permitted", "suffice.regions")
        by_body = {"model": "auto", "input": "a", "suffice": {"regions": ["us"]}}
        assert (await post("/v1/embeddings", json=by_body)).status_code == 200
        for option in ("region", "policy", "max_cost_usd"):
            limited = {"model": "auto", "input": "a", "suffice": {option: "us"}}
            assert_error(await post("/v1/embeddings", json=limited), 400, "invalid_value", f"suffice.{option}")
        by_policy = await post(
            "/v1/embeddings", json={"model": "auto", "input": "a"}, headers={"x-suffice-policy": "p"}
        )
        assert_error(by_policy, 400, "invalid_value", "x-suffice-policy")
        idle = {"model": "auto", "input": "a", "suffice": {"session_id": "s", "priority": "live"}}
        assert (await post("/v1/embeddings", json=idle)).status_code == 200
        assert_unseen(gateway, "small")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (PLACED | {"policy__allowed_regions": ["uk"]}, r"policy\.allowed_regions"),
        ({"policy__allowed_regions": ["eu"]}, r"policy\.allowed_regions"),
        (EU | {"policy__allowed_tiers": ["expert"]}, r"policy\.allowed_regions"),
        (PLACED | {"policies__careful__allowed_regions": ["eu"]}, r"policies\.careful\.allowed_regions"),
        ({"tiers__simple__region": "eu, us"}, r"tiers\.simple\.region"),
        ({"tiers__expert__region": "us", "tiers__simple__region": "eu", "tiers__expert__model": "small"}, "region"),
        ({"policy__max_cost_usd": -1}, r"policy\.max_cost_usd"),
        ({"policy__budget_usd_per_day": "much"}, r"policy\.budget_usd_per_day"),
    ],
)
def test_what_cannot_stand_is_refused_at_start(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        make_settings(tmp_path, **options)


async def test_a_policy_is_edited_and_checked_by_the_admin_api(tmp_path: Path) -> None:
    async with administered(tmp_path, **PLACED) as admin:
        body = to_body(admin.gateway.parts.catalog.resolve("auto").policy)
        assert body["allowed_regions"] == []
        refused = await admin("PUT", "/policies/local", json=body | {"allowed_regions": ["uk"]}, headers=NEW)
        assert_error(refused, 400, "invalid_value", "allowed_regions")
        limits = {"allowed_regions": ["eu"], "max_cost_usd": "0.005", "budget_usd_per_day": "2.5"}
        made = await admin("PUT", "/policies/local", json=body | limits, headers=NEW)
        assert made.status_code in (200, 201), made.text
        kept = (await admin("GET", "/policies/local")).json()["body"]
        assert {name: kept[name] for name in limits} == limits
        assert (await admin.gateway.chat(model="local")).headers["x-suffice-model"] == "small"
        thresholds = (await admin("GET", "/thresholds")).json()["data"]
        assert len(thresholds) == 3


async def test_dearer_tiers_are_not_permitted(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, policy__max_cost_usd=0.005), echo_backends()) as gateway:
        assert (await gateway.chat()).headers["x-suffice-model"] == "small"
        assert (await gateway.row()).barred == {2: "cost"}
        error = assert_error(await gateway.chat(model="expert"), 400, "cost_not_permitted", "suffice.tier")
        assert "may cost $0.005" in error["message"]
        assert (await gateway.chat(n=10)).status_code == 200
        headers = {"x-suffice-max-cost-usd": "0.0005"}
        body = {"model": "auto", "messages": [{"role": "user", "content": "hi"}], "n": 10}
        by_header = await gateway.client.post("/v1/chat/completions", json=body, headers=headers)
        assert_error(by_header, 400, "cost_not_permitted", "suffice.max_cost_usd")
        assert_error(await gateway.chat(suffice={"max_cost_usd": -1}), 400, "invalid_value", "suffice.max_cost_usd")
        assert gateway.backends["large"].requests == []
        assert len(await gateway.rows()) == 2


async def test_a_request_alone_may_limit_its_cost(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path), echo_backends()) as gateway:
        assert (await gateway.chat(suffice={"max_cost_usd": "0.02"})).headers["x-suffice-model"] == "large"
        assert (await gateway.chat(suffice={"max_cost_usd": 0.0125})).headers["x-suffice-model"] == "small"
        limited = await gateway.chat(suffice={"max_cost_usd": 0.0125}, max_tokens=100)
        assert limited.headers["x-suffice-model"] == "large", "a short answer is expected to cost less"
        assert (await gateway.rows())[0].overrides["max_cost_usd"] == "0.0125"
