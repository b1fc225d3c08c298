"""A retrain with an encoder of its own: fine-tuned on older checks, judged on newer ones, then served."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import delete, func, select

from classifier.embedding import TUNED
from classifier.errors import EmbeddingError
from classifier.log_view import LogViews
from classifier.metrics import roc_auc
from classifier.types import RouterRequest
from gateway.config.errors import SettingsError
from gateway.config.settings import Settings
from gateway.control.control_writer import ControlWriter
from gateway.control.router_loader import read_router
from gateway.learn.errors import RetrainRefused
from gateway.learn.feature_sources import _stretches
from gateway.learn.learning_table import LearningTable
from gateway.learn.retrain import RetrainRequest, retrain
from gateway.learn.retrain_process import retrain_in_child
from gateway.learn.run_store import LEASE, RunStore
from gateway.models.predictor import Predictor
from gateway.store.control import ControlStore
from gateway.store.store import Store
from gateway.store.tables import evaluations, leases, router_versions
from tests.classifier.encoders import OAKS, OWLS, draw_ordered, make_encoder, ordered_words
from tests.gateway.learn.test_retrain import children_of
from tests.gateway.learn.world import CLEAR_CUT, ON_SQLITE, Prompt, base_router, put_in_force, write_log

MakeSettings = Callable[..., Settings]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"), (*OAKS, *OWLS, "number"))


@pytest.fixture
def with_encoder(world_settings: MakeSettings, encoder: Path) -> MakeSettings:
    return partial(
        world_settings,
        log__prompts="full",
        learning__encoder=str(encoder),
        learning__encoder_learning_rate=2e-3,
    )


def draw_prompts(rng: random.Random, count: int) -> list[Prompt]:
    """Prompts of which only the order of words tells whether the cheap tier suffices."""
    families = [rng.choice(("oaks", "owls")) for _ in range(count)]
    return [Prompt(each, f"{ordered_words(rng, each)} {rng.randrange(10_000)}") for each in families]


async def filled(settings: Settings, count: int) -> None:
    async with Store(settings.database) as store:
        await put_in_force(store, settings, base_router())
        await write_log(store, settings, base_router(), draw_prompts(random.Random(4), count), keep_text=True)


@pytest.mark.slow
@ON_SQLITE
async def test_an_order_of_words_is_learnt_and_served_from_the_database(with_encoder: MakeSettings) -> None:
    settings = with_encoder(learning__encoder_steps=500, **CLEAR_CUT)
    await filled(settings, 1100)
    told: list[tuple[str, float]] = []
    outcome = await retrain(settings, RetrainRequest(trigger="weekly"), lambda *each: told.append(each))
    assert outcome.status == "promoted", outcome.reason
    assert outcome.card is not None
    compared = outcome.card["refit"]["log_loss_compared"]
    assert outcome.card["refit"]["kind"] == min(compared, key=compared.__getitem__) == f"refit with {TUNED}"
    assert compared[f"refit with {TUNED}"] < min(compared["refit"], compared["refit with sentence-transformers"]) - 0.1
    assert outcome.card["tuning"]["log_loss"]["after"] < outcome.card["tuning"]["log_loss"]["before"] - 0.2
    assert {"length", "base_rate", "candidate", "serving"} <= set(outcome.card["held_out"][0])
    stages = [stage for stage, _ in told]
    assert stages.count("fine-tune the encoder") == outcome.card["tuning"]["num_steps"]
    assert [done for _, done in told] == sorted(done for _, done in told)
    async with Store(settings.database) as store:
        content = await ControlStore(store).router_bytes(str(outcome.router_version))
    assert content is not None
    router = read_router(str(outcome.router_version), content)
    requests, is_oak = draw_ordered(random.Random(9), 200)
    predictor = Predictor(router, timeout_s=10)
    await predictor.warm_up()
    served = [await predictor.predict(request.turns) for request in requests]
    predictor.close()
    good = [each.tiers[0].p_as_good for each in served if each is not None]
    assert len(good) == 200
    assert roc_auc(np.array(good), is_oak) > 0.95
    foreign = RouterRequest((("user", "Prove the lemma about the topology of this manifold."),))
    assert router.predict([foreign])[0].novelty > 0.98
    assert np.mean([each is not None and each.novelty < 0.98 for each in served]) > 0.8


# So slow a descent that it is under way whenever it is looked at.
ENDLESS = {"learning__encoder_steps": 1_000_000, "learning__encoder_learning_rate": 1e-7, "learning__lease_s": 0.5}


@pytest.mark.slow
async def test_kill_9_while_it_is_fine_tuned_leaves_nothing_behind(
    with_encoder: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = with_encoder(**ENDLESS)
    await filled(settings, 850)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    async with Store(settings.database) as store:
        run_id = await ControlWriter(ControlStore(store)).request_retrain("drift", "test")
        child = asyncio.create_task(retrain_in_child(settings, run_id, "drift"))
        await reached(RunStore(store), run_id, "fine-tune the encoder")
        for pid in children_of(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        assert await child == -signal.SIGKILL
        async with store.transaction() as connection:
            routers = (await connection.execute(select(router_versions.c.version))).scalars().all()
            judged = (await connection.execute(select(func.count()).select_from(evaluations))).scalar()
    assert (routers, judged) == ([base_router().version], 0)
    assert list(scratch.iterdir()) == []


@pytest.mark.slow
@ON_SQLITE
async def test_a_run_that_was_taken_over_stops_fine_tuning(with_encoder: MakeSettings) -> None:
    settings = with_encoder(**ENDLESS)
    await filled(settings, 850)
    told: list[float] = []
    begun, loop = asyncio.Event(), asyncio.get_running_loop()

    def watch(stage: str, done: float) -> None:
        if stage == "fine-tune the encoder":
            told.append(done)
            loop.call_soon_threadsafe(begun.set)

    async with Store(settings.database) as store:
        running = asyncio.create_task(retrain(settings, RetrainRequest(trigger="drift"), watch))
        await asyncio.wait_for(begun.wait(), 120)
        async with store.transaction() as connection:
            await connection.execute(delete(leases).where(leases.c.name == LEASE))
        with pytest.raises(RetrainRefused, match="took over"):
            await running
    num_told = len(told)
    await asyncio.sleep(0.5)
    assert len(told) <= num_told + 1


def test_a_wording_that_comes_again_teaches_nothing_it_is_judged_on() -> None:
    groups = np.arange(400)
    groups[10], groups[20], groups[210] = 390, 220, 391
    older, newer, num_seen = _stretches(rows_of(groups))
    assert num_seen == 260
    assert not {10, 20} & set(older)
    assert 210 not in newer
    assert set(older) | {10, 20} == set(range(200))
    assert set(newer) | {210} == set(range(200, 260))
    assert not set(groups[older]) & set(groups[200:])
    assert not set(groups[newer]) & set(groups[260:])


def test_too_few_checks_are_said() -> None:
    with pytest.raises(EmbeddingError, match="too few"):
        _stretches(rows_of(np.arange(190)))
    with pytest.raises(EmbeddingError, match="0 checked answers"):
        _stretches(rows_of(np.zeros(400, dtype=np.int64)))


def rows_of(groups: np.ndarray) -> LearningTable:
    """Rows of which only groups and labels matter."""
    count = len(groups)
    one, two = np.ones((count, 1)), np.ones((count, 2))
    narrow = np.zeros((count, 1), np.float32)
    views = LogViews(dense=narrow, sketch=narrow, right=two, good=two, novelty=np.zeros(count))
    numbers = np.zeros(count, dtype=np.int64)
    return LearningTable(
        *(("",) * count, np.arange(count) * 1.0, views, numbers, two, one, one, one.astype(np.int8), one[:, 0]),
        *(one[:, 0], numbers, numbers, numbers + 1, groups, ("",) * count, ({},) * count, ((),) * count, count, 0),
    )


def test_settings_that_cannot_be_are_refused(world_settings: MakeSettings) -> None:
    with pytest.raises(SettingsError, match="encoder_device"):
        world_settings(learning__encoder_device="gpu")
    with pytest.raises(SettingsError, match="encoder_tuning_s"):
        world_settings(learning__encoder="/some/model", learning__encoder_tuning_s=900, learning__timeout_s=600)
    assert world_settings(learning__encoder_device="cuda:1").learning.encoder_device == "cuda:1"


async def reached(runs: RunStore, run_id: str, stage: str) -> None:
    for _ in range(6000):
        run = await runs.get(run_id)
        if run is not None and run.stage == stage:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"never came to {stage!r}")
