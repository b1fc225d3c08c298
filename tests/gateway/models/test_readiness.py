"""Readiness asks as little as it can, and says what matters to whoever routes traffic (security review M1, M2)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from backends.protocol import Health
from backends.testing import EchoBackend
from tests.backends.provider.server import ProviderServer
from tests.backends.remote_kit import HASTY, make
from tests.gateway.harness import echo_backends, make_settings, running


class Checked(EchoBackend):
    """Counts its checks."""

    num_checks = 0
    is_well = True

    async def health(self) -> Health:
        self.num_checks += 1
        return Health(self.is_well, 0.0)


@pytest.mark.parametrize(("small", "large", "status"), [(1, 0, 200), (0, 1, 200), (0, 0, 503), (1, 1, 200)])
async def test_one_working_tier_is_enough(tmp_path: Path, small: bool, large: bool, status: int) -> None:
    backends = {"small": Checked("small"), "large": Checked("large")}
    backends["small"].is_well, backends["large"].is_well = bool(small), bool(large)
    async with running(make_settings(tmp_path), backends) as gateway:
        answer = await gateway.client.get("/readyz")
        assert answer.status_code == status
        assert [each["ok"] for each in answer.json()["tiers"].values()] == [small, large]


async def test_a_tier_that_no_policy_permits_makes_no_server_ready(tmp_path: Path) -> None:
    backends = {"small": Checked("small"), "large": Checked("large")}
    backends["large"].is_well = False
    settings = make_settings(tmp_path, policy__allowed_tiers=["expert"])
    async with running(settings, backends) as gateway:
        assert (await gateway.client.get("/readyz")).status_code == 503


async def test_a_model_that_has_just_answered_is_not_asked(tmp_path: Path) -> None:
    backends = {"small": Checked("small"), "large": Checked("large")}
    async with running(make_settings(tmp_path, metrics__readiness_ttl_s=60), backends) as gateway:
        assert (await gateway.chat("hi", model="expert")).status_code == 200
        await asyncio.gather(*(gateway.client.get("/readyz") for _ in range(20)))
        assert (backends["small"].num_checks, backends["large"].num_checks) == (1, 0)


async def test_polling_makes_no_hosted_model_generate(tmp_path: Path) -> None:
    with ProviderServer() as server:
        large = make(server, "ok", health_check="models")
        settings = make_settings(tmp_path, metrics__readiness_ttl_s=60)
        async with running(settings, echo_backends() | {"large": large}) as gateway:
            answers = await asyncio.gather(*(gateway.client.get("/readyz") for _ in range(20)))
            assert {answer.status_code for answer in answers} == {200}
        assert [seen.path for seen in server.requests] == ["/v1/models"]


@pytest.mark.parametrize(("behaviour", "is_well"), [("ok", True), ("500", False), ("503", False), ("hang", False)])
async def test_a_hosted_model_is_well_where_it_lists_its_models(behaviour: str, is_well: bool) -> None:
    with ProviderServer() as server:
        backend = make(server, behaviour, health_check="models", timeouts=HASTY)
        assert (await backend.health()).ok == is_well
        await backend.close()
        assert not (await backend.health()).ok


async def test_an_open_breaker_is_told_and_not_closed_by_a_list() -> None:
    with ProviderServer() as server:
        backend = make(server, "ok", health_check="models")
        (replica,) = backend.replicas.replicas
        replica.breaker._trip(0.0)
        replica.breaker._open_until = float("inf")
        health = await backend.health()
        assert not health.ok
        assert "breaker" in health.detail
        assert server.requests == []
        await backend.close()
