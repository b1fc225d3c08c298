"""The endpoints that only read: models, a request explained, health, readiness, metrics."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from decimal import Decimal
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from backends.protocol import Health
from backends.testing import EchoBackend, Script
from classifier.types import RouterRequest, Sufficiency, TierSufficiency
from gateway.access.authenticator import make_key
from gateway.ids import uuid7
from gateway.observe.metrics import Gauges, Metrics
from tests.gateway.admin.kit import add_key
from tests.gateway.harness import Gateway, assert_error, echo_backends, make_settings, running

DOCS = Path(__file__).parents[3] / "docs"


class FixedRouter:
    """Says the same of every request."""

    version = "fixed-1"
    num_tiers = 2

    def __init__(self, low: float, high: float) -> None:
        self._tiers = (TierSufficiency(1, low, low), TierSufficiency(2, high, 1.0))

    def predict(self, requests: Any) -> list[Sufficiency]:
        assert all(isinstance(each, RouterRequest) for each in requests)
        return [Sufficiency(self._tiers, {"num_chars": 2.0}, 0.25, self.version) for _ in requests]


async def test_models_lists_auto_tiers_models_and_policies(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        listing = (await gateway.client.get("/v1/models")).json()
        assert listing["object"] == "list"
        entries = {entry["id"]: entry for entry in listing["data"]}
        kinds = {name: entry["suffice"]["kind"] for name, entry in entries.items()}
        assert kinds == {
            "auto": "auto", "simple": "tier", "expert": "tier", "tier-1": "tier", "tier-2": "tier",
            "small": "model", "large": "model", "default": "policy", "careful": "policy",
        }  # fmt: skip
        assert entries["tier-2"]["max_model_len"] == 8192
        assert entries["careful"]["suffice"]["tiers"] == [2]
        assert Decimal(entries["expert"]["suffice"]["price_per_request_usd"]) == Decimal("0.01")
        assert (await gateway.client.get("/v1/models/expert")).json() == entries["expert"]
        for name in entries:
            assert (await gateway.chat("hi", model=name)).status_code == 200


async def test_a_request_is_explained_with_what_the_others_would_have_cost(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path), router=FixedRouter(0.99, 0.995)) as gateway:
        response = await gateway.chat("a b c", suffice={"session_id": "s", "explore": False})
        assert response.headers["x-suffice-tier"] == "1"
        assert response.headers["x-suffice-reason"] == "sufficient"
        assert float(response.headers["x-suffice-confidence"]) == 0.99
        assert response.headers["x-suffice-router-version"] == "fixed-1"
        for name in (response.headers["x-suffice-request-id"], response.json()["id"]):
            told = (await gateway.client.get(f"/v1/requests/{name}")).json()
            assert told["decision"]["features"] == {"num_chars": 2.0}
            assert told["decision"]["novelty"] == 0.25
            assert told["decision"]["overrides"] == {"session_id": "s", "explore": False}
            assert sum(tier["propensity"] for tier in told["tiers"]) == 1
            low, high = told["tiers"]
            assert (low["answered"], high["answered"]) == (True, False)
            assert Decimal(low["cost_usd"]) == Decimal(told["cost_usd"]) == Decimal("0.0001")
            assert Decimal(high["cost_usd"]) == Decimal("0.01") + 3 * Decimal("0.00001")
            assert (low["p_right"], high["p_as_good"]) == (0.99, 1.0)
        for strange in (uuid7(), "x", "chatcmpl-", "../etc", "0" * 36, "a" * 5000):
            response = await gateway.client.get(f"/v1/requests/{strange}")
            assert response.status_code == 404, strange


async def test_health_is_a_process_and_readiness_is_a_token(tmp_path: Path) -> None:
    class Sick(EchoBackend):
        num_checks = 0
        is_well = True

        async def health(self) -> Health:
            self.num_checks += 1
            return await super().health() if self.is_well else Health(False, 0.1, "no token came")

    sick = Sick("large")
    backends = {"small": EchoBackend("small"), "large": sick}
    async with running(make_settings(tmp_path, metrics__readiness_ttl_s=0.2), backends) as gateway:
        assert (await gateway.client.get("/healthz")).json() == {"status": "ok"}
        answers = await asyncio.gather(*(gateway.client.get("/readyz") for _ in range(5)))
        assert {answer.status_code for answer in answers} == {200}
        assert sick.num_checks == 1, "askers share a check, and it is believed for a while"
        sick.is_well = False
        await asyncio.sleep(0.25)
        answer = await gateway.client.get("/readyz")
        # The other tier answers requests: a balancer must not take this server away (security review M2).
        assert answer.status_code == 200
        tiers = answer.json()["tiers"]
        assert tiers["simple"]["ok"]
        assert tiers["expert"] == tiers["expert"] | {"ok": False, "detail": "no token came"}
        assert (await gateway.client.get("/healthz")).status_code == 200


async def test_the_servers_state_is_for_administrators(tmp_path: Path) -> None:
    """Addresses, errors of upstreams and the volumes of all callers are no caller's business (security review M3)."""
    secret = "postgresql://me@10.9.8.7/log does not answer"

    class Sick(EchoBackend):
        async def health(self) -> Health:
            return Health(False, 0.1, secret)

    async def asked(gateway: Gateway, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
        answer = await gateway.client.get(path, headers=headers)
        return answer.status_code, answer.text

    backends = {"small": Sick("small"), "large": Sick("large")}
    async with running(make_settings(tmp_path, auth__required="always"), backends) as gateway:
        use, _ = await add_key(gateway)
        admin, _ = await add_key(gateway, scope="admin")
        for headers in ({}, use, {"authorization": "Bearer x"}, {"authorization": f"Bearer {make_key()}"}):
            assert await asked(gateway, "/readyz", headers) == (503, '{"status":"not_ready"}')
            assert (await asked(gateway, "/metrics", headers))[0] == (403 if headers is use else 401)
        status, text = await asked(gateway, "/readyz", admin)
        assert status == 503
        assert secret in text
        assert (await asked(gateway, "/metrics", admin))[0] == 200
        assert (await asked(gateway, "/openapi.json"))[0] == 200
        gateway.parts.admission.is_draining = True
        assert await asked(gateway, "/readyz") == (503, '{"status":"draining"}')
    options = {"auth__required": "always", "metrics__public": True}
    async with running(make_settings(tmp_path, **options), backends) as gateway:
        assert (await asked(gateway, "/metrics"))[0] == 200
        assert secret in (await asked(gateway, "/readyz"))[1]
        assert (await asked(gateway, "/v1/models"))[0] == 401


async def test_metrics_count_what_the_log_says(tmp_path: Path) -> None:
    backends = echo_backends(large=Script(text="a b c", cached_tokens=1, compute_s=0.5))
    async with running(make_settings(tmp_path), backends) as gateway:
        for _ in range(3):
            await gateway.chat("x y", model="expert")
        await gateway.chat("x y", model="expert", stream=True)
        await gateway.chat("x", temperature=9)
        text = (await gateway.client.get("/metrics")).text
        samples = {
            (sample.name, sample.labels.get("tier")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        rows = await gateway.rows()
        assert samples["vllm:generation_tokens_total", "2"] == sum(row.completion_tokens for row in rows) == 12
        assert samples["vllm:prompt_tokens_total", "2"] == sum(row.prompt_tokens for row in rows)
        assert samples["vllm:prefix_cache_hits_total", "2"] == 4
        assert samples["vllm:e2e_request_latency_seconds_count", "2"] == 4
        assert samples["gen_ai_server_time_to_first_token_seconds_count", "2"] == 4
        assert samples["suffice_cost_usd_total", "2"] == float(sum(row.cost_usd for row in rows))
        assert samples["suffice_compute_seconds_total", "2"] == 2.0
        assert samples["suffice_decisions_total", "2"] == 4
        assert samples["suffice_rejected_total", None] == 1
        assert samples["suffice_requests_running", None] == 0


async def test_the_api_is_a_page_to_read_without_scripts(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        answer = await gateway.client.get("/docs")
        document = (await gateway.client.get("/openapi.json")).json()
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    page = answer.text
    style = page.split("<style>")[1].split("</style>")[0]
    assert base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() in policy
    assert "<script" not in page
    assert "http://" not in page
    assert "https://" not in page
    for path, methods in document["paths"].items():
        assert f"<b>{path}</b>" in page
        for operation in methods.values():
            assert f'id="{operation["operationId"]}"' in page
    for name in ("temperature", "x-suffice-max-tier", "idempotency_key", "If-Match"):
        assert f"<code>{name}</code>" in page


def test_every_metric_is_documented() -> None:
    documented = (DOCS / "metrics.md").read_text()
    metrics = Metrics()
    metrics.gauges = Gauges(dict, lambda: 0, lambda: 0, lambda: 0)
    exposed = {family.name for family in metrics.collect()}
    assert [name for name in exposed if f"`{name}`" not in documented] == []


async def test_metrics_can_be_switched_off(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, metrics__enabled=False)) as gateway:
        assert_error(await gateway.client.get("/metrics"), 404, "unknown_url")
