"""A fine-tuned encoder learns what its frozen states do not tell, travels inside the router, and fails by name."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from transformers import BertTokenizer

from classifier import tuned_encoder
from classifier.artifact import RouterArtifact
from classifier.embedding import SentenceTransformerEmbedder
from classifier.encoder_tuner import TuningOptions, TuningResult, TuningRows, _Batches, tune_encoder
from classifier.errors import EmbeddingError
from classifier.metrics import roc_auc
from classifier.options import FitOptions
from classifier.router import ArtifactRouter
from classifier.table import TrainingTable
from classifier.training import fit_router
from classifier.tuned_encoder import TokenReader
from classifier.types import RouterRequest
from tests.classifier.encoders import OAKS, OWLS, draw_ordered, make_encoder

FAST = TuningOptions(max_seconds=60, max_steps=400, learning_rate=2e-3)
# Of random weights some stay where they began for hundreds of steps before they learn.
PATIENT = TuningOptions(max_seconds=60, max_steps=600, learning_rate=2e-3, patience=40)
SMALL = FitOptions(num_trees=16, num_folds=3, linear_c=(1.0, 8.0))


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Encoders by their seed, each made once."""
    made: dict[int, Path] = {}

    def encoder(seed: int) -> Path:
        if seed not in made:
            made[seed] = make_encoder(tmp_path_factory.mktemp("encoder"), (*OAKS, *OWLS), seed=seed)
        return made[seed]

    return encoder


def rows_of(rng: random.Random, count: int) -> TuningRows:
    """The cheap tier is good at prompts that begin with an oak, nearly always, and seldom at others."""
    requests, is_oak = draw_ordered(rng, count)
    chance = np.where(is_oak > 0.5, 0.97, 0.1)
    labels = np.where([rng.random() < p for p in chance], 0.98, 0.03)[:, None]
    return TuningRows(requests=requests, labels=labels, weights=np.ones(labels.shape))


def tune(path: Path, seed: int = 0, options: TuningOptions = FAST) -> TuningResult:
    rng = random.Random(seed)
    return tune_encoder(str(path), rows_of(rng, 240), rows_of(rng, 60), options, seed=seed)


@pytest.fixture(scope="module")
def learnt(encoders: Callable[[int], Path]) -> TuningResult:
    return tune(encoders(0))


@pytest.fixture(scope="module")
def artifact(learnt: TuningResult) -> RouterArtifact:
    requests, is_oak = draw_ordered(random.Random(7), 60)
    table = TrainingTable.build(requests, np.column_stack([is_oak, np.ones(60)]))
    return fit_router(table, seed=0, options=SMALL, embedder=learnt.encoder).artifact


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_what_frozen_states_do_not_tell(encoders: Callable[[int], Path], seed: int) -> None:
    rng = random.Random(100 + seed)
    requests, is_oak = draw_ordered(rng, 300)
    judged, truth = draw_ordered(rng, 400)
    frozen = SentenceTransformerEmbedder(encoders(seed))
    plain = LogisticRegression(C=10.0, max_iter=3000).fit(frozen.embed(requests) * np.sqrt(32), is_oak)
    found = tune(encoders(seed), seed, PATIENT)
    assert roc_auc(found.encoder.embed(judged)[:, 0], truth) > 0.97
    assert roc_auc(plain.decision_function(frozen.embed(judged) * np.sqrt(32)), truth) < 0.85
    losses = found.card["log_loss"]
    assert losses["after"] < losses["before"] - 0.2
    assert found.card["num_labels"] == {"fit": 240, "newer": 60}


@pytest.mark.slow
def test_a_router_with_it_is_whole_without_the_folder_it_began_as(tmp_path: Path) -> None:
    path = make_encoder(tmp_path / "made", (*OAKS, *OWLS))
    found = tune(path)
    requests, is_oak = draw_ordered(random.Random(7), 150)
    table = TrainingTable.build(requests, np.column_stack([is_oak, np.ones(150)]))
    artifact = fit_router(table, seed=0, options=SMALL, embedder=found.encoder).artifact
    file = artifact.save(tmp_path / "router.npz")
    shutil.rmtree(tmp_path / "made")
    loaded = ArtifactRouter.load(file)
    assert loaded.version == artifact.version
    fresh, truth = draw_ordered(random.Random(8), 200)
    assert len(loaded.predict([RouterRequest(()), RouterRequest((("user", "oak " * 5000),))])) == 2
    ours, theirs = (each.predict(fresh) for each in (ArtifactRouter(artifact, embedder=found.encoder), loaded))
    for one, other in zip(ours, theirs, strict=True):
        assert (one.tiers, one.novelty) == (other.tiers, other.novelty)
    good = np.array([each.tiers[0].p_as_good for each in theirs])
    assert roc_auc(good, truth) > 0.95
    alone = [loaded.predict([each])[0].tiers[0].p_as_good for each in fresh[:20]]
    np.testing.assert_allclose(alone, good[:20], atol=1e-4)
    # The guard reads the words, whatever the encoder makes of them.
    foreign = RouterRequest((("user", "Prove that the manifold has no boundary, and cite the lemma you used."),))
    assert loaded.predict([foreign])[0].novelty > 0.98
    assert np.mean([each.novelty < 0.98 for each in theirs]) > 0.9


def test_the_same_seed_gives_the_same_weights_and_leaves_the_generator_alone(encoders: Callable[[int], Path]) -> None:
    brief = TuningOptions(max_seconds=60, max_steps=10, learning_rate=1e-3)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, same, other = tune(encoders(0), 3, brief), tune(encoders(0), 3, brief), tune(encoders(0), 4, brief)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (one.encoder.arrays[tuned_encoder.WEIGHTS] == same.encoder.arrays[tuned_encoder.WEIGHTS]).all()
    assert one.card == same.card
    assert (one.encoder.arrays[tuned_encoder.WEIGHTS] != other.encoder.arrays[tuned_encoder.WEIGHTS]).any()


@pytest.mark.slow
def test_a_check_counts_by_the_inverse_of_its_chance(encoders: Callable[[int], Path]) -> None:
    """Every prompt was found good as often as not; rare checks, which stand for many, say which answer was rare."""
    rng = random.Random(2)
    requests, is_oak = draw_ordered(rng, 300)
    was_good = np.array([float(rng.random() < 0.5) for _ in requests])
    weights = np.where(was_good == is_oak, 9.0, 1.0) / 5.0
    fit, newer = (
        TuningRows(requests=requests[part], labels=was_good[part, None], weights=weights[part, None])
        for part in (slice(0, 240), slice(240, 300))
    )
    found = tune_encoder(str(encoders(0)), fit, newer, FAST, seed=0)
    judged, truth = draw_ordered(rng, 200)
    log_odds = found.encoder.embed(judged)[:, 0]
    assert roc_auc(log_odds, truth) > 0.95
    # Nine to one is 2.2 in log-odds.
    assert 1.0 < log_odds[truth > 0.5].mean() < 4.0
    assert -4.0 < log_odds[truth < 0.5].mean() < -1.0


def test_a_tier_nobody_checked_is_left_at_even_odds(encoders: Callable[[int], Path]) -> None:
    rows = rows_of(random.Random(0), 60)
    labels = np.hstack([rows.labels, np.full((60, 1), np.nan)])
    wide = TuningRows(requests=rows.requests, labels=labels, weights=np.ones((60, 2)))
    found = tune_encoder(str(encoders(0)), wide, wide, TuningOptions(60, 20, 1e-3), seed=0)
    log_odds = found.encoder.embed(rows.requests) * np.sqrt(2)
    assert log_odds.shape == (60, 2)
    assert np.abs(log_odds[:, 1]).max() < 1.0


def test_out_of_time_it_ends_with_what_it_has(encoders: Callable[[int], Path]) -> None:
    done: list[float] = []
    rows = rows_of(random.Random(0), 60)
    options = TuningOptions(max_seconds=0, max_steps=400, learning_rate=1e-3)
    found = tune_encoder(str(encoders(0)), rows, rows, options, seed=0, progress=done.append)
    assert (found.card["num_steps"], found.card["ended_by"], done) == (1, "time", [1 / 400])
    assert np.isfinite(found.encoder.embed(rows.requests)).all()


@pytest.mark.slow
def test_where_nothing_can_be_learnt_the_base_rate_is_kept(encoders: Callable[[int], Path]) -> None:
    rng = random.Random(0)
    requests, _ = draw_ordered(rng, 200)
    labels = np.array([[float(rng.random() < 0.8)] for _ in requests])
    fit, newer = (
        TuningRows(requests=requests[part], labels=labels[part], weights=np.ones(labels[part].shape))
        for part in (slice(0, 120), slice(120, 200))
    )
    found = tune_encoder(str(encoders(0)), fit, newer, FAST, seed=0)
    assert found.card["ended_by"] == "no lower loss"
    assert found.card["log_loss"]["after"] <= found.card["log_loss"]["before"]
    share = 1 / (1 + np.exp(-found.encoder.embed(requests).mean()))
    assert abs(share - 0.8) < 0.12


def test_a_batch_is_held_in_parts_of_bounded_size(encoders: Callable[[int], Path]) -> None:
    rng = random.Random(0)
    requests = tuple(RouterRequest((("user", "oak " * rng.randrange(1, 250)),)) for _ in range(120))
    tokenizer = BertTokenizer.from_pretrained(str(encoders(0))).backend_tokenizer.to_str()
    rows = TuningRows(requests=requests, labels=np.ones((120, 1)), weights=np.ones((120, 1)))
    batches = _Batches.of(rows, TokenReader(tokenizer, 256), FAST)
    parts = list(batches.parts(np.arange(120)))
    assert sorted(np.concatenate(parts)) == list(range(120))
    sizes = [len(part) * max(len(batches.tokens[row]) for row in part) for part in parts]
    assert max(sizes) <= 1024
    assert np.mean(sizes) > 700


def test_who_watches_the_progress_may_end_it(encoders: Callable[[int], Path]) -> None:
    class Enough(Exception):
        pass

    def stop(done: float) -> None:
        if done > 0.01:
            raise Enough

    rows = rows_of(random.Random(0), 60)
    with pytest.raises(Enough):
        tune_encoder(str(encoders(0)), rows, rows, FAST, seed=0, progress=stop)


def test_what_cannot_be_fine_tuned_is_named(
    encoders: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EmbeddingError, match="nowhere"):
        tune(tmp_path / "nowhere")
    with pytest.raises(EmbeddingError, match="cuda:99"):
        tune(encoders(0), options=TuningOptions(60, 10, device="cuda:99"))
    monkeypatch.setattr("classifier.encoder_tuner.MAX_PARAMETERS", 1000)
    with pytest.raises(EmbeddingError, match="parameters"):
        tune(encoders(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", ["weights", "shape", "giant", "deep", "code", "missing", "outputs", "words", "length"]
)
def test_a_damaged_encoder_is_refused_before_it_serves(
    learnt: TuningResult, artifact: RouterArtifact, damage: str
) -> None:
    arrays = dict(learnt.encoder.arrays)
    setup = json.loads(arrays[tuned_encoder.SETUP].tobytes())
    if damage == "weights":
        arrays[tuned_encoder.WEIGHTS] = arrays[tuned_encoder.WEIGHTS][:-8]
    elif damage == "shape":
        setup["config"]["hidden_size"] = 64
    elif damage == "giant":
        # Half a terabyte, were it allocated before it is looked at.
        setup["config"]["intermediate_size"] = 2_000_000_000
    elif damage == "deep":
        setup["config"]["num_hidden_layers"] = 1_000_000_000
    elif damage == "outputs":
        setup["num_outputs"] = 3
    elif damage == "words":
        tokenizer = json.loads(setup["tokenizer"])
        tokenizer["model"]["vocab"] |= {f"unheard{number}": 5000 + number for number in range(100)}
        setup["tokenizer"] = json.dumps(tokenizer)
    elif damage == "length":
        setup["max_tokens"] = 4096
    elif damage == "code":
        # A model of its own code: nothing in the libraries goes by that name, and nothing is fetched.
        setup["config"] |= {"model_type": "foreign", "auto_map": {"AutoModel": "somewhere--modeling.Model"}}
    else:
        del arrays[tuned_encoder.WEIGHTS]
    arrays[tuned_encoder.SETUP] = np.frombuffer(json.dumps(setup).encode(), dtype=np.uint8)
    kept = {name: value for name, value in artifact.arrays.items() if name not in learnt.encoder.arrays}
    with pytest.raises(EmbeddingError, match="fine-tuned encoder"):
        ArtifactRouter(RouterArtifact.create(kept | arrays, artifact.metadata))
