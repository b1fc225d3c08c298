"""No tenant can tell by its counters what another has sent (security review H3)."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from backends.local import LocalBackend
from backends.testing import EchoBackend
from engine.drafter import ModelDrafter
from gateway.config.settings import load_settings
from gateway.models.catalog import Catalog
from gateway.models.loader import make_backends
from policies.policy import Policy
from tests.drills import tenant_isolation as drill
from tests.gateway.harness import Gateway, make_settings, running

SECRET = "The account of Mrs Smith has the number 42 17 93 55 and its password is swordfish. " * 4


@pytest_asyncio.fixture(params=[False, True], ids=["apart", "shared"])
async def gateway(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Gateway, bool]]:
    overrides = {"verification.enabled": False, "server.share_prefix_cache": request.param}
    settings = load_settings(environ={"HOME": str(tmp_path)}, overrides=overrides)
    async with running(settings, make_backends(settings)) as up:
        yield up, request.param


def _cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.slow
async def test_a_prefix_is_found_again_by_its_own_tenant_alone(gateway: tuple[Gateway, bool]) -> None:
    """At every tier and path, with drafts too; `server.share_prefix_cache` lets tenants share on purpose."""
    up, is_shared = gateway
    first, second = [await drill.add_key(up, tenant) for tenant in ("first", "second")]
    same_tenant = await drill.add_key(up, "first")
    for tier in (1, 2, 3, 4):
        # Tiers of the same weights share a cache, within a tenant.
        text = f"{tier} {SECRET}"
        messages = {"messages": [{"role": "user", "content": text}]}
        for path, body in (("/v1/chat/completions", messages), ("/v1/completions", {"prompt": text})):
            asked = {"model": f"tier-{tier}", "max_tokens": 8, "temperature": 0} | body

            async def cached(headers: dict[str, str], path: str = path, asked: Any = asked) -> int:
                answer = await up.client.post(path, json=asked, headers=headers)
                assert answer.status_code == 200, answer.text
                return _cached(answer.json()["usage"])

            assert await cached(first) < 64
            assert await cached(same_tenant) >= 64
            assert (await cached(second) >= 64) == is_shared
    for backend in up.backends.values():
        assert isinstance(backend, LocalBackend)
        speculator = backend.engine.core.speculator
        if speculator is not None:
            # A drafter's keys and values belong to one sequence; none is found again by what it holds.
            assert isinstance(speculator.drafter, ModelDrafter)
            assert speculator.drafter.pool.num_cached == 0


async def test_every_prompt_that_a_model_sees_has_its_tenants_salt(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as up:
        for tenant in ("first", "second"):
            headers = await drill.add_key(up, tenant)
            for body in ({"model": "auto"}, {"model": "expert", "n": 2}, {"model": "simple", "stream": True}):
                asked = body | {"messages": [{"role": "user", "content": "hi"}]}
                assert (await up.client.post("/v1/chat/completions", json=asked, headers=headers)).status_code == 200
        salts = {each.cache_salt(name) for each in (up.parts.catalog,) for name in ("first", "second")}
        seen = [r.extra["cache_salt"] for b in up.backends.values() if isinstance(b, EchoBackend) for r in b.requests]
        assert set(seen) == salts
        assert len(salts) == 2
        assert len(seen) == 8
        assert not any("first" in salt or "second" in salt for salt in salts)


def test_a_salt_cannot_be_guessed_and_sharing_has_none() -> None:
    catalogs = [Catalog((), Policy(), {}, {}) for _ in range(2)]
    assert len({each.cache_salt("t") for each in catalogs}) == 2
    assert Catalog((), Policy(), {}, {}, shares_prefix_cache=True).cache_salt("t") == ""


def test_the_drill_tells_chance_from_a_leak() -> None:
    rng = np.random.default_rng(1)
    labels = np.arange(2000) % 2 == 0
    chance, leak = rng.normal(size=2000), rng.normal(size=2000) - 0.3 * labels
    assert drill.auc(chance, labels).is_chance
    assert drill.auc(leak, labels).low > 0.5
    assert 0.5 < drill.findable_auc(1000, 1000) < 0.55
    same, other = (("cached_tokens", 0),), (("cached_tokens", 128),)
    probes = [drill.Probe(bool(s), same, t, 1.0) for s, t in zip(labels, chance, strict=True)]
    assert drill.report(probes)[1]
    assert not drill.report([*probes, drill.Probe(True, other, 0.0, 1.0)])[1]
    timed = [drill.Probe(bool(s), same, t, 1.0) for s, t in zip(labels, leak - labels, strict=True)]
    assert not drill.report(timed)[1]
    assert drill.make_text(random.Random(1)) != drill.make_text(random.Random(2))
