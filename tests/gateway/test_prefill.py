"""A router that rests on tier 1's states gets them from the real tier 1, and is refused where there are none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from backends.config import LocalModelConfig
from backends.local import LocalBackend
from backends.protocol import Backend
from backends.testing import EchoBackend
from classifier.embedding import PrefillEmbedder
from classifier.errors import ArtifactUnsupported
from classifier.options import FitOptions
from classifier.router import ArtifactRouter
from classifier.table import TrainingTable
from classifier.training import fit_router
from classifier.types import RouterRequest
from gateway.config.errors import SettingsError
from gateway.models.loader import load_router
from gateway.models.prefill import PrefillReader, ReadsPrompts, needs_state
from gateway.outcomes.halves import FITTING_HALF, draw_half
from tests.gateway.harness import LADDER_TOML, echo_backends, make_settings, running

LOCAL_TOML = LADDER_TOML.replace('[models.small]\nkind = "echo"', '[models.small]\npath = "builtin:tier1"')


@pytest.fixture
async def tier1() -> AsyncIterator[LocalBackend]:
    backend = LocalBackend("small", LocalModelConfig(path="builtin:tier1"))
    await backend.start()
    yield backend
    await backend.close()


async def router_on_states(tier1: LocalBackend) -> ArtifactRouter:
    """Tier 1 suffices for tasks of the lower grades."""
    tasks = draw_half(FITTING_HALF, 1, 120)
    asked = [RouterRequest((("user", task.prompt),)) for task in tasks]
    read = await PrefillReader(tier1).read_all(asked)
    scores = np.array([[float(task.grade <= 2), 1.0] for task in tasks])
    table = TrainingTable.build([each for each in read if each is not None], scores)
    options = FitOptions(num_trees=8, num_folds=2, linear_c=(1.0,))
    return ArtifactRouter(fit_router(table, seed=0, options=options, embedder=PrefillEmbedder()).artifact)


async def test_requests_are_read_by_tier_1_before_they_are_routed(tier1: LocalBackend, tmp_path: Path) -> None:
    router = await router_on_states(tier1)
    assert needs_state(router)
    asked = RouterRequest((("user", "12 + 30 = ?"),))
    alone = await PrefillReader(tier1).read(asked)
    (both, nothing) = await PrefillReader(tier1).read_all([asked, None])
    assert both is not None
    assert nothing is None
    np.testing.assert_allclose(alone.prefill_state or (), both.prefill_state or (), atol=1e-4)
    (expected,) = router.predict([alone])
    settings = make_settings(tmp_path, LOCAL_TOML)
    backends: dict[str, Backend] = {"small": tier1, "large": EchoBackend("large")}
    async with running(settings, backends, router=router) as gateway:
        body = {"model": "auto", "messages": [{"role": "user", "content": asked.text}]}
        assert (await gateway.client.post("/v1/chat/completions", json=body)).status_code == 200
        (row,) = await gateway.rows()
    found = [(each.tier, each.p_right, each.p_as_good) for each in row.sufficiency or ()]
    assert np.allclose(found, [(each.tier, each.p_right, each.p_as_good) for each in expected.tiers], atol=1e-3)


async def test_where_tier_1_has_no_states_to_show_the_router_is_refused(tier1: LocalBackend, tmp_path: Path) -> None:
    router = await router_on_states(tier1)
    path = router.artifact.save(tmp_path / "router.npz")
    assert not isinstance(echo_backends()["small"], ReadsPrompts)
    with pytest.raises(ArtifactUnsupported, match="tier 1's states"):
        load_router(make_settings(tmp_path, router__artifact=str(path)))
    assert load_router(make_settings(tmp_path, LOCAL_TOML, router__artifact=str(path))) is not None
    with pytest.raises(SettingsError, match=r"learning\.prefill_probe"):
        make_settings(tmp_path, learning__prefill_probe=True)
    assert make_settings(tmp_path, LOCAL_TOML, learning__prefill_probe=True).learning.prefill_probe
