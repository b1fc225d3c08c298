"""Kept texts come back as the router read them, and a router fitted anew from them serves where it is better."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sqlalchemy import update

from classifier.adjustment_fitter import fit_adjustment
from classifier.embedding import Embedder, unit_rows
from classifier.errors import EmbeddingError
from classifier.metrics import roc_auc
from classifier.router import ArtifactRouter
from classifier.types import RouterRequest
from gateway.api.request import TextPart, Turn, prompt_text
from gateway.config.settings import Settings
from gateway.control.router_loader import read_router
from gateway.learn.candidate import fit_candidate
from gateway.learn.feature_sources import fixed_source
from gateway.learn.holdout_split import split_rows
from gateway.learn.prompt_reader import request_of, with_requests
from gateway.learn.refit import can_refit, fit_refit, fit_rows
from gateway.learn.retrain import RetrainRequest, retrain
from gateway.learn.table_reader import read_table
from gateway.store.control import ControlStore
from gateway.store.store import Store
from gateway.store.tables import request_texts
from tests.gateway.learn.test_table import spec_of
from tests.gateway.learn.world import CLEAR_CUT, base_router, draw_prompts, put_in_force, write_log

MakeSettings = Callable[..., Settings]
STRANGE = ("easy", "oaks", "owls")


@pytest.mark.parametrize(
    "turns",
    [
        (("user", "How far is it?"),),
        (("system", "Be brief."), ("user", "One line\nand another: yes"), ("assistant", ""), ("user", "\n and?\n")),
    ],
)
def test_a_stored_prompt_is_read_back_as_its_turns(turns: tuple[tuple[str, str], ...]) -> None:
    assert request_of(prompt_text(tuple(Turn(role, (TextPart(text),)) for role, text in turns))) == RouterRequest(turns)


def test_a_plain_prompt_is_one_turn() -> None:
    assert request_of("Once upon\nuser: a time") == RouterRequest((("user", "Once upon\nuser: a time"),))


async def test_a_text_that_is_not_what_the_row_says_is_left_out(world_settings: MakeSettings) -> None:
    settings = world_settings()
    async with Store(settings.database) as store:
        prompts = draw_prompts(random.Random(1), 60, STRANGE)
        rows = await write_log(store, settings, base_router(), prompts, keep_text=True)
        table = await read_table(store, spec_of())
        async with store.transaction() as connection:
            changed = request_texts.c.request_id == rows[7].request_id
            await connection.execute(update(request_texts).where(changed).values(prompt="user: a\nuser: b"))
        known = await with_requests(store, table)
    assert known.requests is not None
    missing = {name for name, each in zip(known.request_ids, known.requests, strict=True) if each is None}
    assert missing == {rows[7].request_id}
    by_id = {row.request_id: prompt.text for row, prompt in zip(rows, prompts, strict=True)}
    for name, each in zip(known.request_ids, known.requests, strict=True):
        assert each is None or each.text == by_id[name]
    assert known.take(np.array([3, 5])).requests == (known.requests[3], known.requests[5])


@pytest.mark.slow
async def test_words_that_the_base_cannot_tell_apart_are_learnt_from_texts(world_settings: MakeSettings) -> None:
    settings = world_settings(log__prompts="full", **CLEAR_CUT)
    async with Store(settings.database) as store:
        await put_in_force(store, settings, base_router())
        prompts = draw_prompts(random.Random(2), 1000, STRANGE)
        await write_log(store, settings, base_router(), prompts, keep_text=True)
        outcome = await retrain(settings, RetrainRequest(trigger="drift"))
        assert outcome.status == "promoted", outcome.reason
        content = await ControlStore(store).router_bytes(str(outcome.router_version))
        entry = await ControlStore(store).get_router(str(outcome.router_version))
    assert content is not None
    assert entry is not None
    losses = entry.card["refit"]["log_loss_left_out"]
    assert entry.card["refit"]["kind"] == "refit"
    assert losses["refit"] < min(loss for kind, loss in losses.items() if kind != "refit") - 0.05
    assert (entry.parent, entry.card.get("base")) == (base_router().version, None)
    learnt = read_router(str(outcome.router_version), content)
    said = {
        family: learnt.predict(
            [RouterRequest((("user", each.text),)) for each in draw_prompts(random.Random(9), 60, (family,))]
        )
        for family in ("oaks", "owls")
    }
    means = {family: np.mean([each.tiers[0].p_as_good for each in found]) for family, found in said.items()}
    assert means["oaks"] > 0.85
    assert means["owls"] < 0.3
    assert np.mean([each.novelty < 0.995 for each in said["oaks"]]) > 0.9


@pytest.mark.slow
async def test_what_requests_say_of_tools_is_learnt_too(world_settings: MakeSettings) -> None:
    """From rows that a router logged which reads none; rows of the router that does are read with them."""
    settings, families = world_settings(), ("few tools", "many tools")
    async with Store(settings.database) as store:
        prompts = draw_prompts(random.Random(2), 1000, families)
        await write_log(store, settings, base_router(), prompts, keep_text=True)
        table = await with_requests(store, await read_table(store, spec_of()))
        parts = split_rows(table, 0.3, is_urgent=False)
        found = fit_candidate(
            table.take(parts.train),
            table.take(parts.judge),
            base_router(),
            settings.ladder,
            seed=0,
            window="",
            step=lambda stage, done: None,
        )
        learnt = ArtifactRouter(found.artifact)
        said = [learnt.predict([each.request for each in draw_prompts(random.Random(9), 60, (f,))]) for f in families]
        await write_log(store, settings, learnt, draw_prompts(random.Random(3), 400, families))
        spec = spec_of(versions=(learnt.version,), num_components=learnt.num_components, reads_tools=True)
        own = await read_table(store, spec)
    few, many = (np.mean([each.tiers[0].p_as_good for each in part]) for part in said)
    assert (found.kind, learnt.reads_tools) == ("refit", True)
    assert few > 0.85 > 0.3 > many
    assert own.views.dense.shape == (400, len(learnt.artifact.metadata["features"]))
    adjusted = fit_adjustment(own.checked(), learnt.space, seed=0)
    assert np.isfinite(adjusted.left_out).all()


@pytest.mark.slow
async def test_an_adjustment_learns_from_tools_without_texts(world_settings: MakeSettings, tmp_path: Path) -> None:
    """Of a base that reads none; requests without tools keep what the checks say of them."""
    settings, families = world_settings(), ("easy", "few tools", "many tools")
    async with Store(settings.database) as store:
        await write_log(store, settings, base_router(), draw_prompts(random.Random(2), 1200, families))
        table = await read_table(store, spec_of())
    parts = split_rows(table, 0.3, is_urgent=False)
    train, judge = table.take(parts.train), table.take(parts.judge)
    found = fit_candidate(
        train, judge, base_router(), settings.ladder, seed=0, window="", step=lambda stage, done: None
    )
    assert not found.reads_text
    learnt = ArtifactRouter.load(found.artifact.save(tmp_path / "router.npz"))
    assert not learnt.reads_tools
    good = []
    for family in families:
        said = learnt.predict([each.request for each in draw_prompts(random.Random(9), 60, (family,))])
        good.append(np.mean([each.tiers[0].p_as_good for each in said]))
    assert min(good[:2]) > 0.85 > 0.35 > good[2]
    # What the log's rows say of it is what it would have said.
    judged = found.estimates(judge).good[:, 0]
    many = np.array([len(each) > 0 and each[0] > 3.0 for each in judge.tools])
    assert judged[many].mean() < 0.35 < 0.85 < judged[~many].mean()
    # The next retrain begins anew, and again without tools' features where the log has none.
    assert not learnt.space.reads_tools
    plain = dataclasses.replace(train, views=dataclasses.replace(train.views, tools=None))
    again = fit_candidate(plain, judge, learnt, settings.ladder, seed=0, window="", step=lambda stage, done: None)
    assert "adjusts_by_tools" not in again.artifact.metadata


@pytest.mark.slow
async def test_without_texts_there_is_no_refit(world_settings: MakeSettings) -> None:
    settings = world_settings(log__prompts="full")
    async with Store(settings.database) as store:
        await put_in_force(store, settings, base_router())
        await write_log(store, settings, base_router(), draw_prompts(random.Random(2), 800, STRANGE))
    outcome = await retrain(settings, RetrainRequest(trigger="drift", dry_run=True))
    assert outcome.card is not None
    assert "refit" not in outcome.card
    assert "refit" not in outcome.card["adjustment"]["log_loss_left_out"]


@pytest.mark.slow
async def test_few_checks_with_a_text_are_no_ground_for_a_refit(world_settings: MakeSettings) -> None:
    settings = world_settings()
    async with Store(settings.database) as store:
        await write_log(store, settings, base_router(), draw_prompts(random.Random(2), 900, STRANGE), keep_text=True)
        table = await with_requests(store, await read_table(store, spec_of()))
    checked = np.flatnonzero(table.is_checked)
    few, many = table.take(checked[:200]), table.take(checked[: len(checked) - 60])
    judge = table.take(checked[-60:])
    assert not can_refit(few, judge)
    assert can_refit(many, judge)
    assert not can_refit(many, judge.take(np.array([], dtype=np.int64)))
    found = fit_refit(many, base_router(), None, seed=0, window="")
    assert found.good.shape == (len(fit_rows(many)), 2)
    # An answer that is as good as the top tier's is right when that one is, so never more often.
    assert (found.right[:, 0] <= found.good[:, 0] + 0.05).mean() > 0.95


def coin(text: str) -> bool:
    """A side for each text, which its words do not tell."""
    return bool(sha256(text.encode()).digest()[0] & 1)


class CoinEmbedder:
    """Knows the coins, and not exactly."""

    source = "coins"
    model = ""
    arrays: Mapping[str, NDArray[Any]] = MappingProxyType({})

    def embed(self, requests: Sequence[RouterRequest]) -> NDArray[np.float32]:
        rows = [np.random.default_rng(len(each.text)).normal(coin(each.text), 0.3, 8) for each in requests]
        return unit_rows(np.array(rows, dtype=np.float32))


@pytest.mark.slow
async def test_a_source_that_knows_more_than_the_text_is_preferred(world_settings: MakeSettings) -> None:
    settings = world_settings()
    async with Store(settings.database) as store:
        await write_log(store, settings, base_router(), draw_prompts(random.Random(2), 900, ("easy",)), keep_text=True)
        table = await with_requests(store, await read_table(store, spec_of()))
    labels = np.array([0.98 if each and coin(each.text) else 0.03 for each in table.requests or ()])
    table = dataclasses.replace(table, labels=np.where(np.isnan(table.labels), np.nan, labels[:, None]))
    parts = split_rows(table, 0.3, is_urgent=False)
    train, judge = table.take(parts.train), table.take(parts.judge)
    ladder = settings.ladder

    def absent() -> Embedder:
        raise EmbeddingError("no such encoder")

    found = fit_candidate(
        train,
        judge,
        base_router(),
        ladder,
        sources=[fixed_source(absent), fixed_source(CoinEmbedder)],
        seed=0,
        window="",
        step=lambda stage, done: None,
    )
    assert found.kind == "refit with coins"
    assert found.artifact.metadata["refit"]["sources_left_out"] == ["no such encoder"]
    judged = found.judged_rows(judge)
    good, known = found.estimates(judged).good[:, 0], ~np.isnan(judged.labels[:, 0])
    assert roc_auc(good[known], (judged.labels[known, 0] > 0.5).astype(float)) > 0.9
