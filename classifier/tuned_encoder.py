"""Serves a small text encoder fine-tuned to tell which tier suffices, as it travels inside a router.

A transformer, the mean of its last states over the text's tokens, and one linear head a tier below the top. What it
says of a request, the log-odds of each tier's sufficing, is a feature block beside the others: the router's own heads
and calibration rest on it, and its guard for foreign prompts reads the text as ever.

Weights (safetensors, half precision), shape and tokenizer (JSON) are two arrays of the router's artifact. So a router
is still one content under one version, comes to every replica by the database, and is read without running anything
of it: a model whose code is not the transformers library's own is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from classifier.embedding import TUNED, readable
from classifier.errors import EmbeddingError
from classifier.heads import MAX_LOGIT
from classifier.types import RouterRequest

WEIGHTS, SETUP = "tuned_weights", "tuned_setup"
MAX_PARAMETERS = 130_000_000
"""Of an encoder that counts as small: 260 MB in a router's artifact, 16 bytes a parameter while it is tuned."""

_BATCH = 32
# Layers are objects before any weight is allocated; a small encoder has some twelve.
_MAX_LAYERS = 100


class TierHeads(nn.Module):
    """Turns token ids into log-odds.

    Parameters
    ----------
    transformer : gives ``last_hidden_state``
    num_outputs : tiers below the top
    """

    def __init__(self, transformer: nn.Module, num_outputs: int) -> None:
        super().__init__()
        self.transformer = transformer
        self.heads = nn.Linear(int(transformer.config.hidden_size), num_outputs)  # type: ignore[union-attr, arg-type]

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return float32 (B, num_outputs).

        Parameters
        ----------
        ids : int64 (B, T), padded
        mask : int64 (B, T), 1 where there is a token
        """
        states = self.transformer(input_ids=ids, attention_mask=mask).last_hidden_state  # (B, T, hidden)
        shares = mask.unsqueeze(-1).to(states.dtype)
        mean = (states * shares).sum(dim=1) / shares.sum(dim=1).clamp(min=1.0)
        logits: Tensor = self.heads(mean)
        return logits


class TokenReader:
    """Turns texts into padded batches of token ids.

    Parameters
    ----------
    tokenizer : the encoder's, as the tokenizers library writes it
    max_tokens : of a text; what is beyond is not read
    """

    def __init__(self, tokenizer: str, max_tokens: int) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer)
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens)

    @property
    def vocabulary_size(self) -> int:
        """Return how many tokens there are."""
        return int(self._tokenizer.get_vocab_size())

    def read(self, requests: Sequence[RouterRequest]) -> list[list[int]]:
        """Return token ids of the last user turns."""
        return [each.ids for each in self._tokenizer.encode_batch([readable(request) for request in requests])]

    @staticmethod
    def batch(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return ids and mask, int64 (B, T) each, as long as the longest row."""
        longest = max(1, *(len(row) for row in rows))
        ids, mask = np.zeros((2, len(rows), longest), dtype=np.int64)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = row
            mask[place, : max(len(row), 1)] = 1  # of nothing, too, there is a mean
        return torch.from_numpy(ids), torch.from_numpy(mask)


class TunedEncoder:
    """Serves a fine-tuned encoder; a :class:`classifier.embedding.Embedder` that was fitted.

    Parameters
    ----------
    arrays : of the artifact it travels in, see :func:`pack`
    model : what it began as, for the card

    Raises
    ------
    EmbeddingError
        Its arrays are missing or do not fit together.
    """

    source = TUNED

    def __init__(self, arrays: Mapping[str, NDArray[Any]], model: str) -> None:
        self.model = model
        try:
            self.arrays = {name: arrays[name] for name in (WEIGHTS, SETUP)}
            setup = json.loads(arrays[SETUP].tobytes())
            self._reader = TokenReader(setup["tokenizer"], int(setup["max_tokens"]))
            self._net = _net(setup, arrays[WEIGHTS].tobytes())
            _check_vocabulary(self._net, self._reader)
            # The longest text there can be: no request is to find out that it has no place.
            self.embed([RouterRequest((("user", "a " * int(setup["max_tokens"])),))])
        except Exception as error:  # tokenizers raises Exception itself; JSON, safetensors and torch kinds of their own
            problem = f"{type(error).__name__}: {error}"
            raise EmbeddingError(f"The router's fine-tuned encoder cannot be read ({problem}).") from error

    def embed(self, requests: Sequence[RouterRequest]) -> NDArray[np.float32]:
        """Return each tier's log-odds of sufficing, float32 (n, num_tiers - 1), bounded, over the root of their count.

        So :func:`classifier.encoder.append_embedding`, which scales rows of about unit length, gives the log-odds.
        """
        rows = self._reader.read(requests)
        found = np.empty((len(rows), self._net.heads.out_features), dtype=np.float32)
        # Alike lengths together: little is padded.
        order = np.argsort([len(row) for row in rows], kind="stable")
        with torch.inference_mode():
            for start in range(0, len(rows), _BATCH):
                places = order[start : start + _BATCH]
                found[places] = self._net(*self._reader.batch([rows[place] for place in places])).numpy()
        if not np.isfinite(found).all():
            raise EmbeddingError("The fine-tuned encoder gave values that are not finite.")
        bounded: NDArray[np.float32] = np.clip(found, -MAX_LOGIT, MAX_LOGIT) / np.float32(np.sqrt(found.shape[1]))
        return bounded


def stored(net: TierHeads) -> dict[str, Tensor]:
    """Copy the weights by name, to the CPU and the half precision in which they travel."""
    return {
        name: value.detach().to("cpu", torch.float16 if value.is_floating_point() else value.dtype, copy=True)
        for name, value in net.state_dict().items()
    }


def pack(net: TierHeads, state: dict[str, Tensor], tokenizer: str, max_tokens: int) -> dict[str, NDArray[np.uint8]]:
    """Return the arrays of :class:`TunedEncoder`.

    Parameters
    ----------
    net : whose shape it is
    state : its weights, of :func:`stored`
    tokenizer, max_tokens : of its :class:`TokenReader`
    """
    setup = {
        "config": json.loads(net.transformer.config.to_json_string()),  # type: ignore[union-attr, operator]
        "num_outputs": net.heads.out_features,
        "tokenizer": tokenizer,
        "max_tokens": max_tokens,
    }
    described = json.dumps(setup, sort_keys=True).encode()
    return {WEIGHTS: np.frombuffer(save(state), dtype=np.uint8), SETUP: np.frombuffer(described, dtype=np.uint8)}


def _net(setup: Mapping[str, Any], weights: bytes) -> TierHeads:
    """Build the described net with these weights; it is allocated only where it is as large as they are."""
    state = {name: _single(value) for name, value in load(weights).items()}
    with torch.device("meta"):
        described = {name: value.shape for name, value in _build(setup).state_dict().items()}
    if described != {name: value.shape for name, value in state.items()}:
        raise ValueError("the weights are not of the shape that is described")
    net = _build(setup)
    net.load_state_dict(state)
    return net.eval()


def _build(setup: Mapping[str, Any]) -> TierHeads:
    config = dict(setup["config"])
    shape = AutoConfig.for_model(config.pop("model_type"), **config | {"dtype": "float32"})
    if shape.num_hidden_layers > _MAX_LAYERS:
        raise ValueError(f"it has {shape.num_hidden_layers} layers; up to {_MAX_LAYERS} are read")
    transformer = AutoModel.from_config(shape)  # type: ignore[no-untyped-call]
    return TierHeads(transformer, int(setup["num_outputs"]))


def _check_vocabulary(net: TierHeads, reader: TokenReader) -> None:
    known = net.transformer.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if reader.vocabulary_size > known:
        raise ValueError(f"the tokenizer has {reader.vocabulary_size} tokens, the encoder {known}")


def _single(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value
