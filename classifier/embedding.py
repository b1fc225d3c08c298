"""Gives sentence embeddings as further features: of a sentence-transformers model, or of one that was fine-tuned
and travels with the router (:mod:`classifier.tuned_encoder`).

A router may do without (the shipped one does, see docs/router.md for the measurement). The library is imported when a
model is asked for, not before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from classifier.errors import EmbeddingError
from classifier.text import clip
from classifier.types import RouterRequest

SENTENCE_TRANSFORMERS = "sentence-transformers"
TUNED = "fine-tuned encoder"


class Embedder(Protocol):
    """Gives one vector a request.

    ``source`` and ``model`` go into the artifact, so that serving uses what training used.
    """

    @property
    def source(self) -> str: ...

    @property
    def model(self) -> str: ...

    def embed(self, requests: Sequence[RouterRequest]) -> NDArray[np.float32]:
        """Return float32 (num_requests, dim), each row of about unit length."""
        ...

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """Return what of it travels in the artifact."""
        ...


class SentenceTransformerEmbedder:
    """Embeds by any sentence-transformers model, by hub id or folder.

    Parameters
    ----------
    model : hub id or path
    device : torch device name
    batch_size : texts a step

    Raises
    ------
    EmbeddingError
        The library is missing, or the model cannot be loaded.
    """

    source = SENTENCE_TRANSFORMERS
    arrays: Mapping[str, NDArray[Any]] = MappingProxyType({})

    def __init__(self, model: str | Path, *, device: str = "cpu", batch_size: int = 32) -> None:
        self.model = str(model)
        self._batch_size = batch_size
        self._encoder = load_sentence_transformer(self.model, device)

    def embed(self, requests: Sequence[RouterRequest]) -> NDArray[np.float32]:
        """Return embeddings of the last user turns, clipped; the model truncates further to its own length."""
        texts = [readable(request) for request in requests]
        vectors = self._encoder.encode(
            texts, batch_size=self._batch_size, convert_to_numpy=True, show_progress_bar=False
        )
        return unit_rows(np.asarray(vectors, dtype=np.float32))


def readable(request: RouterRequest) -> str:
    """Return the last user turn as encoders read it: clipped, and without lone surrogates, which no tokenizer takes."""
    return clip(request.text).encode("utf-8", "replace").decode()


def load_sentence_transformer(model: str, device: str) -> Any:
    """Load a ``SentenceTransformer`` by hub id or folder.

    Raises
    ------
    EmbeddingError
        It cannot be had.
    """
    try:
        from sentence_transformers import SentenceTransformer

        loaded: Any = SentenceTransformer(model, device=device)
    except Exception as error:  # the hub, torch and the tokenizer each raise kinds of their own
        raise EmbeddingError(
            f"Sentence-transformers model {model!r} cannot be loaded ({type(error).__name__}: {error}). "
            "Give a folder that holds it, or a hub id this machine can reach."
        ) from error
    return loaded


def unit_rows(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale rows to unit length; a zero row stays zero.

    Raises
    ------
    EmbeddingError
        A value is not finite.
    """
    if not np.isfinite(vectors).all():
        raise EmbeddingError("The embedding source gave values that are not finite.")
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: NDArray[np.float32] = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return scaled


def embedder_for(
    source: str,
    model: str,
    arrays: Mapping[str, NDArray[Any]] = MappingProxyType({}),
    encoders: Collection[str] | None = None,
) -> Embedder | None:
    """Make the embedder that an artifact names, of what travels in it; None where it uses none.

    ``encoders`` are the models that may be loaded for it; None permits any.

    Raises
    ------
    EmbeddingError
        An unknown source, or its model may not or cannot be loaded.
    """
    if source == "none":
        return None
    if source == SENTENCE_TRANSFORMERS and encoders is not None and model not in encoders:
        raise EmbeddingError(
            f"The router names the encoder {model!r}, which the settings do not. Nothing was loaded; name it in "
            "learning.encoder if this server shall load it."
        )
    if source == SENTENCE_TRANSFORMERS:
        return SentenceTransformerEmbedder(model)
    if source == TUNED:
        from classifier.tuned_encoder import TunedEncoder

        return TunedEncoder(arrays, model)
    known = ", ".join(("none", SENTENCE_TRANSFORMERS, TUNED))
    raise EmbeddingError(f"Unknown embedding source {source!r}; expected one of {known}.")
