"""Computes the memory a local model takes, from its ``config.json`` alone: no weights read, no torch.

Weights of the linear layers take 4 bits plus their group's scale and zero point when quantised; embeddings, the output
head and norms keep 16 bits. A token's KV takes one key and one value per layer and KV head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.errors import ModelLoadError
from engine.config import ModelConfig
from engine.errors import EngineError

BYTES_PER_VALUE: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
# Per group: a float16 scale and a 4-bit zero point.
_SCALE_BYTES = 2.0
_ZERO_BYTES = 0.5


@dataclass(frozen=True, slots=True)
class Footprint:
    """Holds the memory of one model.

    Parameters
    ----------
    num_params : weights, an output head tied to the embedding counted once
    weight_bytes : as loaded; packed where quantised
    kv_bytes_per_token : keys and values of one position
    context_length : positions the model was made for
    """

    num_params: int
    weight_bytes: int
    kv_bytes_per_token: int
    context_length: int


def footprint(model: ModelConfig, dtype: str = "auto") -> Footprint:
    """Return the memory of a model of this shape.

    Parameters
    ----------
    dtype : type of what is not quantised and of the KV cache; ``auto`` takes the checkpoint's own
    """
    width = BYTES_PER_VALUE[model.dtype if dtype == "auto" and model.dtype in BYTES_PER_VALUE else _named(dtype)]
    linear, other = _count_linear(model), _count_other(model)
    linear_bytes = linear * (_packed_bytes(model) if model.quant is not None else width)
    kv_values = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    return Footprint(
        num_params=linear + other,
        weight_bytes=round(linear_bytes) + other * width,
        kv_bytes_per_token=kv_values * width,
        context_length=model.context_length,
    )


def read_shape(folder: Path) -> ModelConfig:
    """Read the shape of a model in Hugging Face layout.

    Raises
    ------
    ModelLoadError
        No readable ``config.json``, or one the engine does not serve.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: {error}") from error
    return shape_of(raw, str(path))


def shape_of(raw: Mapping[str, Any], path: str) -> ModelConfig:
    """Return the shape that a parsed ``config.json`` describes.

    Raises
    ------
    ModelLoadError
        The engine does not serve such a model.
    """
    if not isinstance(raw, Mapping):
        raise ModelLoadError(f"{path}: expected a JSON object, found {type(raw).__name__}.")
    try:
        return ModelConfig.from_hf(raw, path=path)
    except EngineError as error:
        raise ModelLoadError(str(error)) from error


def _named(dtype: str) -> str:
    return dtype if dtype in BYTES_PER_VALUE else "float16"


def _packed_bytes(model: ModelConfig) -> float:
    assert model.quant is not None
    group_size = model.quant.group_size if model.quant.group_size > 0 else model.hidden_size
    return model.quant.bits / 8 + (_SCALE_BYTES + _ZERO_BYTES) / group_size


def _count_linear(model: ModelConfig) -> int:
    attention = model.hidden_size * (2 * model.q_size + 2 * model.kv_size)
    feed_forward = 3 * model.hidden_size * model.intermediate_size
    return model.num_layers * (attention + feed_forward)


def _count_other(model: ModelConfig) -> int:
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    norms = (2 * model.num_layers + 1) * model.hidden_size
    biases = model.num_layers * ((model.q_size + 2 * model.kv_size) if model.qkv_bias else 0)
    return embeddings + norms + biases
