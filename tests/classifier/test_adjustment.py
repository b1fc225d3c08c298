"""Adjustments learn what moved from a few hundred checks, leave the rest alone, and are the same after a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from classifier.adjustment import Adjustment
from classifier.adjustment_fitter import KINDS, MIN_LABELS, _boosted, fit_adjustment
from classifier.artifact import RouterArtifact
from classifier.checked_rows import CheckedRows
from classifier.errors import ArtifactCorrupt, TrainingError
from classifier.fitting import flatten_boosting
from classifier.log_view import ViewReader
from classifier.router import ArtifactRouter
from classifier.types import RouterRequest
from tests.classifier.checked_answers import NUM_COMPONENTS, NUM_TIERS, SPACE, WIDTH, make_checked, make_views


def every_kind(rows: CheckedRows) -> dict[str, Adjustment]:
    return {name: made for kind in KINDS for name, made in kind.fits(rows, SPACE, 0).items()}


def test_a_shift_is_healed_by_a_few_hundred_checks() -> None:
    rng = np.random.default_rng(0)
    rows, _ = make_checked(rng, 400, share_moved=0.3, p_moved=0.1)
    found = fit_adjustment(rows, SPACE, seed=0)
    moved = make_views(rng, 200, moved=np.ones(200, dtype=np.bool_))
    usual = make_views(rng, 200)
    _, good_moved, novelty = found.adjustment(moved)
    _, good_usual, _ = found.adjustment(usual)
    assert found.kind != "unchanged"
    assert found.losses[found.kind] < found.losses["unchanged"] - 0.1
    assert good_moved[:, :-1].mean() < 0.3
    assert np.abs(good_usual - usual.good)[:, :-1].mean() < 0.08
    assert novelty.mean() < 0.9 * moved.novelty.mean()  # what was checked around is not foreign any more


def test_nothing_moved_moves_little() -> None:
    rng = np.random.default_rng(1)
    rows, _ = make_checked(rng, 400, share_moved=0.0, p_moved=0.5)
    found = fit_adjustment(rows, SPACE, seed=0)
    fresh = make_views(rng, 300)
    _, good, _ = found.adjustment(fresh)
    assert np.abs(good - fresh.good).mean() < 0.04


def test_what_is_far_from_every_check_stays_foreign() -> None:
    rng = np.random.default_rng(2)
    rows, _ = make_checked(rng, 300, share_moved=0.0, p_moved=0.5)
    far = make_views(rng, 50, moved=np.ones(50, dtype=np.bool_))
    _, _, novelty = fit_adjustment(rows, SPACE, seed=0).adjustment(far)
    assert novelty == pytest.approx(far.novelty)


@pytest.mark.parametrize(
    "kind", ["unchanged", "recalibrated", "linear", "neighbours", "boosted", "boosted and neighbours"]
)
def test_every_kind_gives_probabilities_and_survives_its_arrays(kind: str) -> None:
    rng = np.random.default_rng(3)
    rows, _ = make_checked(rng, 500, share_moved=0.4, p_moved=0.2)
    made = every_kind(rows)[kind]
    back = Adjustment.from_arrays(made.arrays(), SPACE, NUM_COMPONENTS, NUM_TIERS - 1)
    assert back is not None
    fresh = make_views(rng, 100, moved=rng.random(100) < 0.5)
    for ours, theirs in zip(made(fresh), back(fresh), strict=True):
        assert (ours >= 0).all()
        assert (ours <= 1).all()
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    right, good, _ = made(fresh)
    assert (right[:, :-1] <= good[:, :-1] + 1e-9).all()
    assert (good[:, -1] == 1).all()


def test_boosted_trees_say_what_scikit_learn_says() -> None:
    from sklearn.ensemble import HistGradientBoostingRegressor

    rng = np.random.default_rng(4)
    x = rng.normal(0, 1, (600, 8)).astype(np.float32)
    models = [
        HistGradientBoostingRegressor(max_iter=20, random_state=0).fit(x, x[:, 0] * x[:, 1] + 0.5),
        None,
        HistGradientBoostingRegressor(max_iter=20, random_state=0).fit(x, np.sin(x[:, 2])),
    ]
    trees = flatten_boosting(models)
    assert trees is not None
    sums = trees.sums(x)
    np.testing.assert_allclose(sums[:, 0], models[0].predict(x), atol=0.01)  # values are kept in half precision
    np.testing.assert_allclose(sums[:, 2], models[2].predict(x), atol=0.01)
    assert (sums[:, 1] == 0).all()
    assert flatten_boosting([None, None]) is None


def test_few_checks_are_refused() -> None:
    rng = np.random.default_rng(5)
    rows, _ = make_checked(rng, 200, share_moved=0.1, p_moved=0.5)
    with pytest.raises(TrainingError, match="cannot carry"):
        fit_adjustment(rows.take(np.arange(MIN_LABELS // 3)), SPACE, seed=0)
    same = replace(rows, groups=np.zeros(len(rows), dtype=np.int64))
    with pytest.raises(TrainingError, match="one wording"):
        fit_adjustment(same, SPACE, seed=0)


def test_rows_of_the_log_come_back_as_they_were_predicted() -> None:
    router = ArtifactRouter.load()
    reader = ViewReader(router.num_tiers, router.num_components)
    said = router.predict([RouterRequest((("user", f"Sort {n}, 4 and 17."),)) for n in range(5)])
    rows = [
        reader.read(each.features, [(t.tier, t.p_right, t.p_as_good) for t in each.tiers], each.novelty)
        for each in said
    ]
    views = reader.stack([row for row in rows if row is not None])
    right, good, novelty = router.revise(views)
    assert len(views) == 5
    assert good.tolist() == [[t.p_as_good for t in each.tiers] for each in said]
    assert right.tolist() == [[t.p_right for t in each.tiers] for each in said]
    assert novelty.tolist() == [each.novelty for each in said]
    assert reader.read({"num_chars": 1.0}, [], 0.0) is None


def test_an_adjusted_router_serves_what_it_would_have_said_of_the_log(tmp_path: Path) -> None:
    base = ArtifactRouter.load()
    requests = [RouterRequest((("user", f"How many letters has {'very ' * (n % 7)}number {n}?"),)) for n in range(120)]
    reader = ViewReader(base.num_tiers, base.num_components)
    views = reader.stack([_row(reader, each) for each in base.predict(requests)])
    labels = np.zeros((120, base.num_tiers - 1))
    labels[::3] = 1.0
    rows = CheckedRows(views=views, labels=labels, weights=np.ones(labels.shape), groups=np.arange(120))
    made = _boosted(rows, base.space, 0)
    path = RouterArtifact.create(
        {**base.artifact.arrays, **made.arrays()}, {**base.artifact.metadata, "base": base.version}
    ).save(tmp_path / "adjusted.npz")
    adjusted = ArtifactRouter.load(path)
    said = adjusted.predict(requests)
    assert adjusted.base_version == base.version
    again = reader.stack([_row(reader, each) for each in said])
    np.testing.assert_allclose(again.good, views.good, atol=1e-12)  # rows of either router are rows of the base
    _, good, novelty = adjusted.revise(again)
    # One prompt and many are multiplied in another order; squared distances are differences of large float32 numbers.
    np.testing.assert_allclose(good, [[t.p_as_good for t in each.tiers] for each in said], atol=1e-3)
    np.testing.assert_allclose(novelty, [each.novelty for each in said], atol=1e-3)
    assert good[:, 0].mean() < views.good[:, 0].mean() - 0.1


def _row(reader: ViewReader, said: object) -> np.ndarray:
    row = reader.read(said.features, [(t.tier, t.p_right, t.p_as_good) for t in said.tiers], said.novelty)  # type: ignore[attr-defined]
    assert row is not None
    return row


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("adjust_linear", np.zeros((3, NUM_TIERS - 1))),
        ("adjust_points", np.zeros((4, WIDTH + NUM_COMPONENTS + 9), dtype=np.float16)),
        ("adjust_tree_feature", np.full(3, 10_000, dtype=np.int32)),
        ("adjust_kernel", np.array([0.0, 4.0])),
    ],
)
def test_arrays_that_do_not_fit_are_refused(name: str, value: np.ndarray) -> None:
    rng = np.random.default_rng(6)
    rows, _ = make_checked(rng, 500, share_moved=0.4, p_moved=0.2)
    arrays = every_kind(rows)["boosted and neighbours"].arrays()
    with pytest.raises((ValueError, KeyError)):
        Adjustment.from_arrays(arrays | {name: value}, SPACE, NUM_COMPONENTS, NUM_TIERS - 1)


def test_a_damaged_adjustment_is_refused_by_name(tmp_path: Path) -> None:
    base = ArtifactRouter.load()
    arrays = {**base.artifact.arrays, "adjust_linear": np.zeros((2, 2))}
    path = RouterArtifact.create(arrays, base.artifact.metadata).save(tmp_path / "bad.npz")
    with pytest.raises(ArtifactCorrupt, match="adjust_linear"):
        ArtifactRouter.load(path)


def test_an_adjustment_by_tools_is_not_taken_for_one_without() -> None:
    rng = np.random.default_rng(7)
    rows, _ = make_checked(rng, 200, share_moved=0.4, p_moved=0.2)
    wide = replace(SPACE, reads_tools=True)
    arrays = fit_adjustment(rows, wide, seed=0).adjustment.arrays()
    assert Adjustment.from_arrays(arrays, wide, NUM_COMPONENTS, NUM_TIERS - 1) is not None
    with pytest.raises(ValueError):
        Adjustment.from_arrays(arrays, SPACE, NUM_COMPONENTS, NUM_TIERS - 1)
