"""Opens what a refit may rest on besides the words: a text encoder as it is, or one that the checks taught.

A source that learns from checked answers must not be judged, mixed or calibrated on those. So it takes the older part
of them, looks at the next to know when to stop, and leaves the newest untouched: the router's own heads, its
calibration and its thresholds rest on these alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from classifier.embedding import Embedder, SentenceTransformerEmbedder
from classifier.errors import EmbeddingError
from gateway.learn.learning_table import Ints, LearningTable

if TYPE_CHECKING:
    from classifier.encoder_tuner import TuningOptions
    from gateway.config.sections import LearningConfig

_FIT_SHARE, _NEWER_SHARE = 0.5, 0.15
_MIN_FIT_LABELS, _MIN_NEWER_LABELS = 100, 20

Progress = Callable[[float], None]
"""Told the part of opening a source that is done, 0..1."""


@dataclass(frozen=True, slots=True)
class FeatureSource:
    """A source at hand.

    Attributes
    ----------
    embedder : gives its features
    num_seen : checked rows, the oldest, that it must not be judged on
    card : how it came about
    """

    embedder: Embedder
    num_seen: int = 0
    card: Mapping[str, Any] = field(default_factory=dict)


SourceFactory = Callable[[LearningTable, int, Progress], FeatureSource]
"""Opens a further source of features, given checked rows with their prompts, oldest first, and a seed.

Raises EmbeddingError where it cannot be had.
"""


def fixed_source(make: Callable[[], Embedder]) -> SourceFactory:
    """Return a source that learns nothing."""
    return lambda rows, seed, progress: FeatureSource(make())


def tuned_source(model: str, options: TuningOptions) -> SourceFactory:
    """Return a sentence-transformers model that the older checks teach to tell which tiers suffice."""
    return partial(_fine_tune, model, options)


def sources_of(config: LearningConfig) -> list[SourceFactory]:
    """Return the sources that the settings name."""
    if not config.encoder:
        return []
    found = [fixed_source(partial(SentenceTransformerEmbedder, config.encoder, device=config.encoder_device))]
    if config.encoder_tuning_s > 0:
        from classifier.encoder_tuner import TuningOptions

        options = TuningOptions(
            config.encoder_tuning_s,
            config.encoder_steps,
            config.encoder_learning_rate,
            device=config.encoder_device,
        )
        found.append(tuned_source(config.encoder, options))
    return found


def _fine_tune(model: str, options: TuningOptions, rows: LearningTable, seed: int, progress: Progress) -> FeatureSource:
    from classifier.encoder_tuner import TuningRows, tune_encoder

    older, newer, num_seen = _stretches(rows)
    weights = rows.checked().tempered_weights()
    prompts = rows.prompts()
    fit, look = (
        TuningRows(requests=tuple(prompts[row] for row in part), labels=rows.labels[part], weights=weights[part])
        for part in (older, newer)
    )
    tuned = tune_encoder(model, fit, look, options, seed=seed, progress=progress)
    return FeatureSource(tuned.encoder, num_seen, tuned.card)


def _stretches(rows: LearningTable) -> tuple[Ints, Ints, int]:
    """Return rows to learn from, newer ones to stop by, and how many are older than all that must stay unseen.

    A wording that comes again later is left to the later stretch: what was learnt by heart would be taken for skill.

    Raises
    ------
    EmbeddingError
        Too few checked answers.
    """
    begin, end = (int(share * len(rows)) for share in (_FIT_SHARE, _FIT_SHARE + _NEWER_SHARE))
    older = np.flatnonzero(~np.isin(rows.groups[:begin], rows.groups[begin:]))
    newer = begin + np.flatnonzero(~np.isin(rows.groups[begin:end], rows.groups[end:]))
    known = ~np.isnan(rows.labels)
    num_fit, num_newer = int(known[older].sum()), int(known[newer].sum())
    if num_fit < _MIN_FIT_LABELS or num_newer < _MIN_NEWER_LABELS:
        raise EmbeddingError(
            f"{num_fit} checked answers to fine-tune an encoder on and {num_newer} to stop by are too few; "
            f"{_MIN_FIT_LABELS} and {_MIN_NEWER_LABELS} are needed."
        )
    return older, newer, end
