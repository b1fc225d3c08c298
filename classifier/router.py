"""Brings an artifact to life: requests in, calibrated sufficiency per tier out, by numpy alone."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classifier.adjustment import Adjustment, Space
from classifier.artifact import RouterArtifact
from classifier.confidence import AnswerConfidence
from classifier.embedding import Embedder, embedder_for
from classifier.encoder import EncodedRequests, Encoder, RawRows, append_embedding, read_requests
from classifier.errors import ArtifactCorrupt, ArtifactUnsupported, EmbeddingError
from classifier.features import feature_names
from classifier.hashing import HashConfig
from classifier.heads import CalibratorBank, ForestHead, LinearHead
from classifier.log_view import SKETCH_DECIMALS, LogViews, base_entries, sketch_names, tool_entries, tool_matrix
from classifier.novelty import NoveltyScale, SeenWords, readings
from classifier.rows import Floats
from classifier.types import RouterRequest, Sufficiency, TierSufficiency

_Estimate = tuple[list[float], list[float], float, dict[str, float]]
"""P(right) and P(as good as the top tier) per tier, novelty, and features."""

# Requests whose trees are walked together: more would leave the caches.
_TOGETHER = 256
# Routers that earlier versions fitted may name it.
_REMOVED_SOURCE = "prefill"
MAX_TIERS = 64
ADJUSTS_BY_TOOLS = "adjusts_by_tools"
"""Entry of an artifact's metadata: its adjustment reads what requests say of tools, which its base does not."""
BUILTIN = Path(__file__).parent / "builtin" / "router.npz"


@dataclass(frozen=True, slots=True)
class Estimator:
    """Holds everything between an encoded request and its probabilities.

    Attributes
    ----------
    encoder : the fitted encoding
    projection : float32 (num_buckets, num_components), orthonormal columns
    component_scale : float32 (num_components,), to unit variance over the training window
    linear, forest : the two heads
    forest_weight : share of the forest in the mean of the two log-odds, 0..1
    """

    encoder: Encoder
    projection: NDArray[np.float32]
    component_scale: NDArray[np.float32]
    linear: LinearHead
    forest: ForestHead
    forest_weight: float


class ArtifactRouter:
    """Serves a :class:`RouterArtifact`; implements :class:`classifier.types.Router`.

    Thread-safe: it holds read-only arrays and no state between calls.

    Parameters
    ----------
    artifact : a fitted router
    embedder : the sentence-embedding source, when the artifact uses one and it is at hand already
    path : named in errors
    encoders : the models that it may name to be loaded; None permits any, for artifacts of one's own

    Attributes
    ----------
    confidence : what the tiers' own log-probabilities are worth, where it was measured

    Raises
    ------
    ArtifactUnsupported
        Its features are not those this version computes, or it reads tier 1's prefill states.
    ArtifactCorrupt
        Arrays are missing or their shapes disagree.
    EmbeddingError
        Its embedding source cannot be had.
    """

    def __init__(
        self,
        artifact: RouterArtifact,
        *,
        embedder: Embedder | None = None,
        path: Path | str = "(in memory)",
        encoders: Collection[str] | None = None,
    ) -> None:
        self.artifact = artifact
        # Attributes, since every request reads them.
        self.version = artifact.version
        try:
            self.num_tiers = artifact.num_tiers
            _check_schema(artifact, path)
            self._estimator, self._seen, self._scale = _unpack(artifact)
            self._calibrators = _calibrators(artifact)
            _check(artifact, self._estimator, self._calibrators, self._seen)
            self._scale.check()
            _check_source(artifact, path)
            space = replace(self.space, reads_tools=bool(artifact.metadata.get(ADJUSTS_BY_TOOLS, False)))
            self.num_components = len(self._estimator.component_scale)
            self._adjustment = Adjustment.from_arrays(
                artifact.arrays, space, self.num_components, artifact.num_tiers - 1
            )
            self.confidence = AnswerConfidence.from_json(artifact.metadata.get("confidence", {}))
            self.reads_tools = reads_tools(artifact)
            self._is_binary = bool(artifact.metadata["is_binary"])
            described = artifact.metadata["embedding"]
            source, model, self._embedding_dim = described["source"], described["model"], int(described["dim"])
        except (KeyError, ValueError, IndexError, TypeError, AttributeError, OverflowError) as error:
            raise ArtifactCorrupt(path, f"arrays are missing or do not fit together ({error}).") from error
        self._hash_config = self._estimator.encoder.config
        # Side by side: what is looked up for one is looked up for the other.
        self._columns = np.hstack([self._estimator.projection, self._estimator.linear.sparse])
        self._num_plain = len(feature_names(self.num_tiers))
        self._names = (*feature_names(self.num_tiers), *sketch_names(self.num_components))
        self._embedder = embedder or embedder_for(source, model, artifact.arrays, encoders)

    @classmethod
    def load(
        cls,
        path: Path | str = BUILTIN,
        *,
        embedder: Embedder | None = None,
        encoders: Collection[str] | None = None,
    ) -> ArtifactRouter:
        """Read an artifact from disk; the shipped one by default."""
        return cls(RouterArtifact.load(path), embedder=embedder, path=path, encoders=encoders)

    @property
    def base_version(self) -> str:
        """Return the router whose rows in the log can judge this one: what an adjustment rests on, else itself."""
        return str(self.artifact.metadata.get("base", self.version))

    @property
    def space(self) -> Space:
        """Return the coordinates of adjustments to this router."""
        return Space(self._estimator.encoder.mean, self._estimator.encoder.scale)

    def revise(self, views: LogViews) -> tuple[Floats, Floats, Floats]:
        """Return what this router would have said of requests in the log, from what their rows keep.

        Parameters
        ----------
        views : rows of requests that a router of the same base estimated

        Returns
        -------
        P(right), P(as good as the top tier), float64 (n, num_tiers) each, and novelty, float64 (n,)
        """
        if self._adjustment is None:
            return views.right, views.good, views.novelty
        return self._adjustment(views)

    @property
    def decision(self) -> Mapping[str, Any]:
        """Return what was derived with the router for a policy to use: thresholds, quality value, novelty bound."""
        found: Mapping[str, Any] = self.artifact.metadata.get("decision", {})
        return found

    def predict(self, requests: Sequence[RouterRequest]) -> list[Sufficiency]:
        """Estimate each request.

        Raises
        ------
        EmbeddingError
            The router rests on an embedding and the source failed.
        """
        found: list[Sufficiency] = []
        for start in range(0, len(requests), _TOGETHER):
            found += self._predict(requests[start : start + _TOGETHER])
        return found

    def _predict(self, requests: Sequence[RouterRequest]) -> list[Sufficiency]:
        """Estimate all at once: on the few hundred numbers of one text numpy takes longer to begin than to work."""
        started = time.perf_counter()
        raw = read_requests(requests, self.num_tiers, self._hash_config, reads_tools=self.reads_tools)
        adjusts_by_tools = self._adjustment is not None and self._adjustment.space.reads_tools
        tools = tool_matrix([request.tools for request in requests]) if adjusts_by_tools else None
        estimates = self._estimates(raw, None if self._embedder is None else self._embed(requests), tools)
        latency_s = (time.perf_counter() - started) / len(requests)
        return [
            Sufficiency(
                tiers=tuple(
                    [TierSufficiency(tier, *both) for tier, both in enumerate(zip(right, good, strict=True), start=1)]
                ),
                features=features,
                novelty=novelty,
                router_version=self.version,
                latency_s=latency_s,
            )
            for right, good, novelty, features in estimates
        ]

    def _embed(self, requests: Sequence[RouterRequest]) -> NDArray[np.float32]:
        assert self._embedder is not None
        vectors = self._embedder.embed(requests)
        if vectors.shape != (len(requests), self._embedding_dim):
            expected = (len(requests), self._embedding_dim)
            raise EmbeddingError(f"The embedding source gave shape {vectors.shape}; the router expects {expected}.")
        return vectors

    def _estimates(
        self, raw: RawRows, vectors: NDArray[np.float32] | None, tools: NDArray[np.float32] | None
    ) -> Iterator[_Estimate]:
        part = self._estimator
        encoded = part.encoder.encode(raw)
        dense = encoded.dense if vectors is None else append_embedding(encoded.dense, vectors)
        summed = encoded.sparse.dot(self._columns)
        projected, linear = summed[:, : self.num_components], summed[:, self.num_components :]
        places = projected * part.component_scale
        forest = part.forest.logits(np.hstack([dense, places]))
        right, good = self._calibrated(
            part.forest_weight * forest + (1 - part.forest_weight) * part.linear.logits(dense, linear)
        )
        novelty = self._novelty(raw, encoded, projected)
        # As it is stored: what training reads is what serving used.
        sketches: Floats = places.astype(np.float64).round(SKETCH_DECIMALS)
        values = np.hstack([raw.dense[:, : self._num_plain], sketches]).tolist()
        rows = zip(right.tolist(), good.tolist(), novelty, values, strict=True)
        for row, (p_right, p_good, foreign, numbers) in enumerate(rows):
            features = dict(zip(self._names, numbers, strict=True))
            if self.reads_tools:
                features |= tool_entries(raw.dense[row, self._num_plain :].tolist())
            if self._adjustment is None:
                yield p_right, p_good, foreign, features
                continue
            features |= base_entries(p_right, p_good, foreign)
            one = slice(row, row + 1)
            # One by one, so that what a request is told does not depend on who is asked about beside it.
            view = LogViews(
                dense=raw.dense[one],
                sketch=sketches[one].astype(np.float32),
                right=right[one],
                good=good[one],
                novelty=np.array([foreign]),
                tools=None if tools is None else tools[one],
            )
            revised_right, revised_good, revised_novelty = self._adjustment(view)
            yield revised_right[0].tolist(), revised_good[0].tolist(), float(revised_novelty[0]), features

    def _novelty(self, raw: RawRows, encoded: EncodedRequests, projected: NDArray[np.float32]) -> list[float]:
        known = self._seen.knows(raw)
        found = readings(self._seen, raw, encoded, projected).tolist()
        return [0.0 if is_known else self._scale.novelty(each) for is_known, each in zip(known, found, strict=True)]

    def _calibrated(self, logits: Floats) -> tuple[Floats, Floats]:
        outputs = self._calibrators(logits)
        right, good = outputs[:, : self.num_tiers], np.ones((len(logits), self.num_tiers))
        good[:, :-1] = outputs[:, self.num_tiers :]
        return right, cohere(right, good) if self._is_binary else good


def cohere(right: Floats, good: Floats) -> Floats:
    """Bring P(as good) between the bounds that P(right) sets where answers are right or wrong.

    A right answer is as good as any, and so is any answer where the top tier's is wrong; a wrong answer beside a right
    one is not. Hence ``max(right_t, 1 - right_top) <= good_t <= right_t + 1 - right_top``. The last axis is the tier.
    """
    top_wrong = 1 - right[..., -1:]
    return np.minimum(np.maximum(good, np.maximum(right, top_wrong)), np.minimum(right + top_wrong, 1.0))


def reads_tools(artifact: RouterArtifact) -> bool:
    """Return whether a router reads what requests say of tools, beside their texts."""
    names: list[str] = artifact.metadata["features"]
    return names == list(feature_names(artifact.num_tiers, reads_tools=True))


def _check_schema(artifact: RouterArtifact, path: Path | str) -> None:
    # Before names are made of a number that anybody could have written.
    if not 2 <= artifact.num_tiers <= MAX_TIERS:
        raise ArtifactUnsupported(path, f"it is for {artifact.num_tiers} tiers; 2 to {MAX_TIERS} are read.")
    known = [list(feature_names(artifact.num_tiers, reads_tools=each)) for each in (False, True)]
    if artifact.metadata.get("features") not in known:
        raise ArtifactUnsupported(
            path, "it was fitted on other features than this version computes; fit it again with `suffice bootstrap`."
        )


def _check_source(artifact: RouterArtifact, path: Path | str) -> None:
    if artifact.metadata["embedding"]["source"] == _REMOVED_SOURCE:
        raise ArtifactUnsupported(
            path,
            "it reads tier 1's prefill states, which this version does not compute; serve another router, or fit one "
            "anew with `suffice bootstrap`.",
        )


def _unpack(artifact: RouterArtifact) -> tuple[Estimator, SeenWords, NoveltyScale]:
    a, described = artifact.arrays, artifact.metadata
    schema = dict(described["hashing"])
    config = HashConfig(**schema | {"char_ngrams": tuple(schema["char_ngrams"])})
    encoder = Encoder(config, a["encoder_idf"], a["encoder_mean"], a["encoder_scale"])
    linear = LinearHead(a["linear_sparse"].astype(np.float32), a["linear_dense"], a["linear_bias"])
    forest = ForestHead(
        a["forest_roots"].astype(np.intp),
        a["forest_child"].astype(np.intp),
        a["forest_feature"].astype(np.intp),
        a["forest_threshold"],
        a["forest_value"],
        int(described["forest_depth"]),
    )
    estimator = Estimator(
        encoder,
        a["projection"].astype(np.float32),
        a["component_scale"],
        linear,
        forest,
        float(described["forest_weight"]),
    )
    bits = (np.unpackbits(a["seen_words"]).astype(np.bool_), np.unpackbits(a["seen_pairs"]).astype(np.bool_))
    scale = NoveltyScale(a["novelty_grids"], a["novelty_combined"], int(described["novelty"]["num_held_out"]))
    return estimator, SeenWords(*bits, a["seen_prompts"]), scale


def _calibrators(artifact: RouterArtifact) -> CalibratorBank:
    a = artifact.arrays
    return CalibratorBank(a["calibration_platt"], a["calibration_offsets"], a["calibration_x"], a["calibration_y"])


def _check(artifact: RouterArtifact, estimator: Estimator, calibrators: CalibratorBank, seen: SeenWords) -> None:
    """Raise ValueError where arrays do not fit together, so that no request finds out."""
    a, described = artifact.arrays, artifact.metadata
    estimator.encoder.config.check()
    outputs, num_features = 2 * artifact.num_tiers - 1, len(described["features"])
    buckets, num_dense = estimator.encoder.config.num_buckets, num_features + int(described["embedding"]["dim"])
    components = a["component_scale"].shape[0]
    expected = {
        "encoder_idf": (buckets,),
        "encoder_mean": (num_features,),
        "encoder_scale": (num_features,),
        "projection": (buckets, components),
        "linear_sparse": (buckets, outputs),
        "linear_dense": (num_dense, outputs),
        "linear_bias": (outputs,),
        "calibration_platt": (outputs, 2),
        "calibration_offsets": (outputs + 1,),
    }
    for name, shape in expected.items():
        if a[name].shape != shape:
            raise ValueError(f"{name} has shape {a[name].shape}, expected {shape}")
    for name, array in a.items():
        if array.dtype.kind == "f":
            # Leaves lie under infinite thresholds.
            is_sound = ~np.isnan(array) if name.endswith("threshold") else np.isfinite(array)
            if not is_sound.all():
                raise ValueError(f"{name} holds values that are not finite")
    if not 0 <= estimator.forest_weight <= 1:
        raise ValueError(f"the forest's share is {estimator.forest_weight}, expected 0 to 1")
    estimator.forest.check(num_dense + components, outputs)
    calibrators.check()
    seen.check()
