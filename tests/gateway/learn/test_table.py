"""The training table says what the log says, on both databases, and its weights undo how the log was drawn."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import insert, select, update

from gateway.config.settings import Settings
from gateway.ids import uuid7
from gateway.learn.holdout_split import split_rows
from gateway.learn.learning_table import LabelOrigin, LearningTable
from gateway.learn.table_reader import TableSpec, read_table, read_texts
from gateway.learn.threshold_derivation import tier_costs_usd
from gateway.store.store import Store
from gateway.store.tables import gold_labels, requests, verifications
from tests.gateway.harness import running
from tests.gateway.learn.world import (
    DOWN_CHANCE,
    ON_SQLITE,
    P_CHEAP_GOOD,
    UP_CHANCE,
    base_router,
    draw_prompts,
    put_in_force,
    write_log,
)

MakeSettings = Callable[..., Settings]
ALL = ("easy", "hard", "new")


def spec_of(**changes: object) -> TableSpec:
    router, now = base_router(), datetime.now(UTC)
    made = TableSpec(2, router.num_components, (router.version,), now - timedelta(days=28), now)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


async def table_of(settings: Settings, count: int, **changes: object) -> LearningTable:
    async with Store(settings.database) as store:
        await write_log(store, settings, base_router(), draw_prompts(random.Random(1), count, ALL), keep_text=True)
        return await read_table(store, spec_of(**changes))


async def test_rows_carry_what_was_estimated_drawn_and_checked(world_settings: MakeSettings) -> None:
    settings = world_settings()
    async with Store(settings.database) as store:
        rows = await write_log(store, settings, base_router(), draw_prompts(random.Random(1), 300, ALL), keep_text=True)
        done: list[float] = []
        table = await read_table(store, spec_of(), done.append)
        async with store.transaction() as connection:
            checks = {row.request_id: row for row in await connection.execute(select(verifications))}
        texts = await read_texts(store, table.request_ids[:50])
    assert done[-1] == 1.0
    assert table.num_requests == len(table) == 300
    assert list(table.created_s) == sorted(table.created_s)
    by_id = {row.request_id: row for row in rows}
    for place, request_id in enumerate(table.request_ids):
        row, check = by_id[request_id], checks.get(request_id)
        assert table.served[place] == row.final_tier - 1  # type: ignore[operator]
        assert table.propensity[place].tolist() == [row.propensities.get(tier, 0.0) for tier in (1, 2)]
        assert table.views.good[place].tolist() == [each.p_as_good for each in row.sufficiency]
        assert table.cost_usd[place] == pytest.approx(float(row.cost_usd))
        assert np.isnan(table.labels[place, 0]) == (check is None)
        if check is not None:
            assert table.labels[place, 0] == check.p_good
            assert table.label_origins[place, 0] == (LabelOrigin.UP if check.direction == "up" else LabelOrigin.DOWN)
            assert table.chance[place, 0] == check.inclusion_probability
    assert len(texts) == 50
    assert all(text.startswith("user: ") for text in texts.values())


@pytest.mark.slow
async def test_weights_undo_the_draws(world_settings: MakeSettings) -> None:
    """Whatever the guess, the corrected outcomes have the truth's mean: exploration and both checks are undone."""
    table = await table_of(world_settings(), 1800)
    truth = np.mean([P_CHEAP_GOOD[family] for family in ALL]) * 0.95 + 0.03  # as the soft labels say it
    for wrong in (0.1, 0.9):
        guess = np.full((len(table), 2), wrong)
        outcomes = table.shifted_outcomes(guess)
        error = outcomes[:, 0].std() / np.sqrt(len(table))
        assert outcomes[:, 0].mean() == pytest.approx(truth, abs=4 * error)
        assert (outcomes[:, 1] == 1.0).all()
    seen, chance = table.sights()
    looked = seen == 0
    assert looked.mean() == pytest.approx(chance[:, 0].mean(), abs=0.05)
    weights = table.weights()
    by_own_check = table.label_origins[:, 0] == LabelOrigin.UP
    expected = 1 / (table.propensity[by_own_check, 0] * UP_CHANCE)
    np.testing.assert_allclose(weights[by_own_check, 0], expected)
    beside = table.label_origins[:, 0] == LabelOrigin.DOWN
    np.testing.assert_allclose(weights[beside, 0], 1 / (table.propensity[beside, 1] * DOWN_CHANCE))


async def test_what_cannot_be_used_is_left_out(world_settings: MakeSettings) -> None:
    settings = world_settings()
    async with Store(settings.database) as store:
        rows = await write_log(store, settings, base_router(), draw_prompts(random.Random(1), 60, ALL))
        ids = [row.request_id for row in rows]
        async with store.transaction() as connection:
            for place, values in enumerate(
                (
                    {"error_code": "model_failed"},
                    {"final_tier": 3 - rows[1].final_tier},  # type: ignore[operator]
                    {"router_version": "another"},
                    {"reason": "pinned"},
                    {"features": {"num_chars": 1.0}},
                    {"propensities": {"1": 0.0, "2": 0.0}},
                )
            ):
                wanted = requests.c.request_id == ids[place]
                await connection.execute(update(requests).where(wanted).values(**values))
        table = await read_table(store, spec_of())
    assert set(table.request_ids) == set(ids[6:])


@ON_SQLITE
async def test_wordings_are_numbered_alike_wherever_they_were_logged(
    world_settings: MakeSettings, tmp_path: Path
) -> None:
    """Folds are dealt by these numbers; the digests behind them differ with every installation's key."""
    prompts = draw_prompts(random.Random(1), 40, ALL)
    tables = []
    for name in ("one", "another"):
        async with Store(world_settings(database__url=f"sqlite:///{tmp_path / name}.db").database) as store:
            await write_log(store, world_settings(), base_router(), [*prompts, *prompts[::-1]])
            tables.append(await read_table(store, spec_of()))
    assert [table.groups.tolist() for table in tables] == [[*range(40), *reversed(range(40))]] * 2


@pytest.mark.slow
async def test_limits_bound_the_rows_and_the_sample_stands_for_all(world_settings: MakeSettings) -> None:
    table = await table_of(world_settings(), 1500, max_checked=200, max_unchecked=200)
    checked = table.is_checked
    assert 130 < checked.sum() < 270
    assert 130 < (~checked).sum() < 270
    assert table.num_requests == 1500
    assert table.sampling_weight.sum() == pytest.approx(1500, rel=0.15)


async def test_gold_beats_a_grader_and_stands_for_nobody(world_settings: MakeSettings) -> None:
    settings = world_settings()
    async with Store(settings.database) as store:
        rows = await write_log(store, settings, base_router(), draw_prompts(random.Random(1), 200, ALL))
        before = await read_table(store, spec_of())
        unchecked = before.request_ids[int(np.flatnonzero(~before.is_checked)[0])]
        checked = before.request_ids[int(np.flatnonzero(before.is_checked)[0])]
        entry = {"tier": 1, "source": "feedback", "created_at": datetime.now(UTC), "note": ""}
        async with store.transaction() as connection:
            for request_id, label in ((unchecked, 1.0), (checked, 0.0)):
                made = {"gold_id": uuid7(), "request_id": request_id, "label": label}
                await connection.execute(insert(gold_labels).values(**entry, **made))
        table = await read_table(store, spec_of())
    assert len(rows) == len(table)
    for request_id, label in ((unchecked, 1.0), (checked, 0.0)):
        place = table.request_ids.index(request_id)
        assert table.label_origins[place, 0] == LabelOrigin.GOLD
        top_right = table.views.right[place, 1]
        assert table.labels[place, 0] == pytest.approx(label + (1 - label) * (1 - top_right))
    outcomes = table.shifted_outcomes(table.views.good)
    assert outcomes[table.request_ids.index(unchecked), 0] == table.views.good[table.request_ids.index(unchecked), 0]


@pytest.mark.slow
async def test_both_splits_keep_time_and_wordings_apart(world_settings: MakeSettings) -> None:
    table = await table_of(world_settings(), 600)
    weekly = split_rows(table, 0.3, is_urgent=False)
    assert table.created_s[weekly.train].max() < table.created_s[weekly.judge].max()
    share = table.is_checked[weekly.judge].sum() / table.is_checked.sum()
    assert share == pytest.approx(0.3, abs=0.03)
    urgent = split_rows(table, 0.3, is_urgent=True)
    assert table.created_s[urgent.train].max() > np.quantile(table.created_s, 0.9)  # what is new can be learnt
    for split in (weekly, urgent):
        assert set(table.groups[split.train]).isdisjoint(table.groups[split.judge])
        assert len(split.train) + len(split.judge) == len(table)


@pytest.mark.slow
@pytest.mark.parametrize("retention", ["digest", "full"])
async def test_a_log_that_a_server_wrote_can_be_learnt_from(world_settings: MakeSettings, retention: str) -> None:
    """Over HTTP, with real backends: what the server logs is what the table needs, texts or not."""
    settings = world_settings(log__prompts=retention, policy__sampling_share=0.5, verification__enabled=True)
    router = base_router()
    async with running(settings, router=router) as gateway:
        for prompt in draw_prompts(random.Random(2), 40, ("easy", "hard")):
            response = await gateway.chat(prompt.text)
            assert response.status_code == 200
        store: Store = gateway.parts.store
        async with store.transaction() as connection:
            done = {"status": "done", "p_good": 0.9, "finished_at": datetime.now(UTC)}
            await connection.execute(update(verifications).values(**done))
            num_checks = len((await connection.execute(select(verifications.c.request_id))).all())
        table = await read_table(store, spec_of(versions=(router.version,), until=datetime.now(UTC)))
        texts = await read_texts(store, table.request_ids)
    assert len(table) == 40
    assert num_checks > 0
    assert table.is_checked.sum() == num_checks
    assert len(texts) == (40 if retention == "full" else 0)


async def test_nothing_in_force_means_nothing_read(world_settings: MakeSettings) -> None:
    settings = world_settings()
    async with Store(settings.database) as store:
        await put_in_force(store, settings, base_router())
        table = await read_table(store, spec_of())
    assert len(table) == 0
    assert table.num_requests == 0


async def test_a_turn_is_one_row_with_what_all_its_steps_took(world_settings: MakeSettings) -> None:
    settings = world_settings()
    async with Store(settings.database) as store:
        rows = await write_log(store, settings, base_router(), draw_prompts(random.Random(1), 200, ALL), keep_text=True)
        before = await read_table(store, spec_of())
        async with store.transaction() as connection:
            checks = {row.request_id: row for row in await connection.execute(select(verifications))}
        first = next(row for row in rows if row.request_id in checks)
        for _ in range(3):
            step = dataclasses.replace(first, request_id=uuid7(), turn_id=first.request_id, reason="locked")
            await store.record(step)
            async with store.transaction() as connection:
                check = dict(checks[first.request_id]._mapping) | {"verification_id": uuid7(), "p_good": 0.5}
                check |= {"request_id": step.request_id, "turn_id": first.request_id}
                await connection.execute(insert(verifications).values(**check))
        after = await read_table(store, spec_of())
    place = after.request_ids.index(first.request_id)
    assert after.request_ids == before.request_ids
    assert after.num_requests == before.num_requests
    assert after.num_steps.tolist() == [4 if here == place else 1 for here in range(len(after))]
    assert after.cost_usd[place] == pytest.approx(4 * before.cost_usd[place])
    assert after.prompt_tokens[place] == 4 * before.prompt_tokens[place]
    assert after.labels[place, 0] == pytest.approx((before.labels[place, 0] + 3 * 0.5) / 4)
    assert after.chance[place, 0] == before.chance[place, 0]
    costs = [tier_costs_usd(table, settings.ladder)[place] for table in (before, after)]
    assert costs[1] == pytest.approx(4 * costs[0])
