"""``/v1/embeddings``: JSON object in, :class:`EmbeddingRequest` out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway import fields
from gateway.errors import InvalidRequest, UnsupportedOption

_MAX_INPUTS = 2048
_MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """``as_base64`` asks for little-endian float32 in base64, as OpenAI's own clients do."""

    model: str
    texts: tuple[str, ...]
    as_base64: bool = False
    dimensions: int | None = None


def read_embedding_request(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Check everything the body says.

    Raises
    ------
    InvalidRequest, UnsupportedOption
    """
    if body.get("model") is None:
        raise InvalidRequest("You must give a 'model': 'auto', or one that GET /v1/models lists.", param="model")
    encoding = body.get("encoding_format")
    dimensions = body.get("dimensions")
    return EmbeddingRequest(
        model=fields.string(_MAX_NAME_CHARS, min_chars=1)(body["model"], "model"),
        texts=_texts(body.get("input")),
        as_base64=encoding is not None and fields.one_of("float", "base64")(encoding, "encoding_format") == "base64",
        dimensions=None if dimensions is None else fields.integer(1, 2**20)(dimensions, "dimensions"),
    )


def _texts(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise fields.wrong_type("input", "a string or an array of strings", value)
    if not 1 <= len(items) <= _MAX_INPUTS:
        raise fields.wrong_value("input", f"1 to {_MAX_INPUTS} strings", f"{len(items)} items")
    if isinstance(items[0], int | list) and not isinstance(items[0], bool):
        raise UnsupportedOption("'input' as token ids is not supported; give text.", param="input")
    for place, item in enumerate(items):
        where = "input" if isinstance(value, str) else f"input[{place}]"
        if not isinstance(item, str):
            raise fields.wrong_type(where, "a string", item)
        if not item:
            raise InvalidRequest(f"'{where}' is empty; expected some text.", param=where)
    return tuple(items)
