"""Serving: any request gets a sound estimate, alone or in a batch, without scikit-learn; foreign ones are noticed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from classifier.embedding import SentenceTransformerEmbedder, embedder_for, unit_rows
from classifier.errors import ArtifactUnsupported, EmbeddingError
from classifier.router import ArtifactRouter
from classifier.table import TrainingTable
from classifier.training import FittedRouter, fit_router
from classifier.types import RouterRequest
from tests.classifier.conftest import SMALL
from tests.classifier.encoders import make_encoder
from tests.classifier.simulated_ladder import draw, request_of

FOREIGN = (
    "Draft a polite resignation letter that mentions my gratitude towards the mentorship programme.",
    "Why did the Western Roman Empire collapse while Byzantium survived for another millennium?",
    "My Kubernetes pod keeps crash-looping with exit code 137; which kernel metrics should I inspect?",
    "Erkläre mir bitte den Unterschied zwischen Dativ und Akkusativ anhand von Beispielen.",
    "Compose a haiku about autumn rain falling on an abandoned lighthouse.",
    "What are the contraindications of combining warfarin with fluconazole in elderly patients?",
    "请用三句话解释量子纠缠。",
    "def quicksort(xs): return xs if len(xs) < 2 else quicksort([x for x in xs[1:] if x < xs[0]])",
)

any_text = st.text(st.characters(codec=None), max_size=300)


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), any_text), max_size=4))
@settings(max_examples=60, deadline=None)
def test_every_request_gets_probabilities(router: ArtifactRouter, turns: list[tuple[str, str]]) -> None:
    (found,) = router.predict([RouterRequest(turns=tuple(turns))])
    assert [tier.tier for tier in found.tiers] == [1, 2, 3, 4]
    assert all(0 < tier.p_right < 1 and 0 < tier.p_as_good <= 1 for tier in found.tiers)
    assert found.tiers[-1].p_as_good == 1
    assert 0 <= found.novelty < 1
    assert found.router_version == router.version
    assert found.latency_s > 0
    assert all(np.isfinite(value) for value in found.features.values())


def test_neighbours_and_threads_do_not_matter(router: ArtifactRouter) -> None:
    requests = [request_of(task.prompt) for task in draw(60, seed=4)[0]]
    alone = [router.predict([request])[0] for request in requests]
    with ThreadPoolExecutor(4) as pool:
        batches = list(pool.map(router.predict, [requests, requests[::-1]]))
    for batch in (batches[0], batches[1][::-1]):
        assert [each.tiers for each in batch] == [each.tiers for each in alone]
    assert router.predict([]) == []


def test_a_megabyte_is_predicted_from_its_ends(router: ArtifactRouter) -> None:
    (found,) = router.predict([request_of("What is 2 plus 2? " * 60_000)])
    assert 0 < found.tiers[0].p_right < 1


def test_familiar_prompts_look_familiar_and_foreign_ones_foreign(router: ArtifactRouter) -> None:
    fresh = router.predict([request_of(task.prompt) for task in draw(1500, seed=11, split="test")[0]])
    novelty = np.array([each.novelty for each in fresh])
    # The conformal promise, with room for its own sampling error.
    assert np.mean(novelty > 0.95) < 0.08
    assert np.mean(novelty > 0.99) < 0.025
    assert np.median(novelty) < 0.7
    assert all(each.novelty > 0.99 for each in router.predict([request_of(prompt) for prompt in FOREIGN]))


def test_serving_needs_no_scikit_learn(fitted: FittedRouter, tmp_path: Path) -> None:
    path = fitted.artifact.save(tmp_path / "router.npz")
    program = f"""
import sys
from classifier.router import ArtifactRouter
from classifier.types import RouterRequest
found = ArtifactRouter.load({str(path)!r}).predict([RouterRequest(turns=(("user", "What is 2 plus 2?"),))])
assert 0 < found[0].tiers[0].p_right < 1
heavy = {{"sklearn", "scipy", "torch", "transformers", "sentence_transformers"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


class NotedEmbedder:
    """Gives each text the vector that was noted for it."""

    source = "notes"
    model = ""
    arrays: Mapping[str, NDArray[Any]] = MappingProxyType({})

    def __init__(self, vectors: Mapping[str, NDArray[np.float32]]) -> None:
        self.vectors = dict(vectors)

    def embed(self, requests: Sequence[RouterRequest]) -> NDArray[np.float32]:
        return unit_rows(np.stack([self.vectors[request.text] for request in requests]))


def noted(table: TrainingTable, is_informative: bool) -> NotedEmbedder:
    """Vectors that know the outcome of tier 2, or know nothing."""
    vectors = np.random.default_rng(0).normal(size=(len(table.requests), 12)).astype(np.float32)
    if is_informative:
        vectors[:, 3] += 6 * (table.scores[:, 1] - 0.5)
    return NotedEmbedder({request.text: vector for request, vector in zip(table.requests, vectors, strict=True)})


@pytest.mark.slow
def test_embeddings_add_what_they_know(table: TrainingTable) -> None:
    part = TrainingTable.build(table.requests[:500], table.scores[:500])
    losses = {}
    for is_informative in (True, False):
        embedder = noted(part, is_informative)
        found = fit_router(part, seed=0, options=SMALL, embedder=embedder)
        losses[is_informative] = float(np.mean((found.p_right[:, 1] - part.scores[:, 1]) ** 2))
    assert losses[True] < 0.6 * losses[False]
    router = ArtifactRouter(found.artifact, embedder=embedder)
    assert router.artifact.metadata["embedding"] == {"source": "notes", "model": "", "dim": 12}
    embedder.vectors |= {"short": np.ones(5, np.float32), "broken": np.full(12, np.nan, np.float32)}
    with pytest.raises(EmbeddingError, match=r"\(1, 5\)"):
        router.predict([request_of("short")])
    with pytest.raises(EmbeddingError, match="finite"):
        router.predict([request_of("broken")])


def test_a_router_on_prefill_states_is_refused_and_the_remedy_named(fitted: FittedRouter, tmp_path: Path) -> None:
    embedding = {"source": "prefill", "model": "", "dim": 0}
    path = fitted.artifact.with_metadata(embedding=embedding).save(tmp_path / "router.npz")
    with pytest.raises(ArtifactUnsupported, match=r"prefill states.*suffice bootstrap"):
        ArtifactRouter.load(path)


@pytest.fixture(scope="module")
def sentence_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real sentence-transformers model with random weights, made here."""
    return make_encoder(tmp_path_factory.mktemp("encoder"), (), layers=1)


def test_any_sentence_transformers_model_by_path(sentence_model: Path, table: TrainingTable, tmp_path: Path) -> None:
    part = TrainingTable.build(table.requests[:200], table.scores[:200])
    embedder = SentenceTransformerEmbedder(sentence_model)
    vectors = embedder.embed(part.requests[:5])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
    artifact = fit_router(part, seed=0, options=SMALL, embedder=embedder).artifact
    loaded = ArtifactRouter.load(artifact.save(tmp_path / "router.npz"))  # finds the model by the path it recorded
    assert loaded.artifact.metadata["embedding"]["dim"] == 32
    mine, theirs = (r.predict(part.requests[:3]) for r in (loaded, ArtifactRouter(artifact, embedder=embedder)))
    for one, other in zip(mine, theirs, strict=True):
        assert one.tiers[0].p_right == pytest.approx(other.tiers[0].p_right, abs=1e-5)
    assert embedder.embed([request_of("lone \ud800 surrogate")]).shape == (1, 32)


def test_a_missing_embedding_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(EmbeddingError, match="nowhere"):
        SentenceTransformerEmbedder(tmp_path / "nowhere")
    with pytest.raises(EmbeddingError, match="unheard"):
        embedder_for("unheard", "")
    assert embedder_for("none", "") is None
