"""A retrain lets tier 1 read the kept prompts, and a server under its router lets it read every request."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from backends.config import LocalModelConfig
from backends.local import LocalBackend
from backends.protocol import Backend
from backends.testing import EchoBackend
from gateway.config.settings import Settings
from gateway.control.loading import read_router
from gateway.control.writes import ControlWriter
from gateway.learn.retrain import Wish, retrain
from gateway.models.prefill import PrefillReader, needs_state
from gateway.store.control import ControlStore
from gateway.store.store import Store
from tests.classifier.encoders import draw_ordered
from tests.gateway.harness import running
from tests.gateway.learn.test_tuned_refit import draw_prompts
from tests.gateway.learn.world import ON_SQLITE, base_router, put_in_force, write_log
from tests.gateway.test_prefill import LOCAL_TOML


@ON_SQLITE
async def test_states_of_the_real_tier_1_are_learnt_from_and_served_with(
    world_settings: Callable[..., Settings],
) -> None:
    settings = world_settings(toml=LOCAL_TOML, log__prompts="full", learning__prefill_probe=True)
    stages: list[str] = []
    async with Store(settings.database) as store:
        await put_in_force(store, settings, base_router())
        await write_log(store, settings, base_router(), draw_prompts(random.Random(4), 900), keep_text=True)
        outcome = await retrain(settings, Wish(trigger="weekly"), lambda stage, done: stages.append(stage))
        version = str(outcome.router_version)
        content = await ControlStore(store).router_bytes(version)
        await ControlWriter(ControlStore(store)).promote_router(version, by="test")
    assert outcome.card is not None
    assert content is not None
    assert list(dict.fromkeys(stages))[:3] == ["read the log", "read the prompts", "fit"]
    found = outcome.card["refit"]
    # The model has read the words in their order; counts of them say nothing here.
    assert (found["kind"], found["sources_left_out"]) == ("refit with prefill", [])
    assert found["log_loss_compared"]["refit with prefill"] < found["log_loss_compared"]["refit"] - 0.05
    learnt = read_router(version, content)
    assert needs_state(learnt)
    (request,), _ = draw_ordered(random.Random(9), 1)
    backends: dict[str, Backend] = {
        "small": LocalBackend("small", LocalModelConfig(path="builtin:tier1")),
        "large": EchoBackend("large"),
    }
    async with running(settings, backends, router=base_router()) as gateway:
        assert (await gateway.chat(request.text)).status_code == 200
        (row, *_) = await gateway.rows()
        tier1 = backends["small"]
        assert isinstance(tier1, LocalBackend)
        (expected,) = learnt.predict([await PrefillReader(tier1).read(request)])
    assert row.router_version == version
    assert row.sufficiency is not None
    served = [each.p_as_good for each in row.sufficiency]
    assert served == pytest.approx([each.p_as_good for each in expected.tiers], abs=1e-3)
