"""``/v1/embeddings``: JSON object in, :class:`EmbeddingRequest` out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.api import fields
from gateway.api.routing_preferences import from_header, read_regions
from gateway.errors import InvalidRequest, UnsupportedOption

_MAX_INPUTS = 2048
_MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """``as_base64`` asks for little-endian float32 in base64, as OpenAI's own clients do.

    ``regions`` are those that the texts may be sent to; anywhere that the policy permits when empty.
    """

    model: str
    texts: tuple[str, ...]
    as_base64: bool = False
    dimensions: int | None = None
    regions: tuple[str, ...] = ()


_MODEL = fields.string(_MAX_NAME_CHARS, min_chars=1)
_ENCODING = fields.one_of("float", "base64")
_DIMENSIONS = fields.integer(1, 2**20)
# Of what may be asked of a chat's routing these limit nothing.
_WITHOUT_EFFECT = ("explore", "session_id", "priority")


def embedding_schema() -> dict[str, Any]:
    """What a body may hold, as JSON Schema."""
    text = {"type": "string", "minLength": 1}
    wishes = {"regions": fields.schema_of(read_regions)} | {key: {} for key in _WITHOUT_EFFECT}
    properties = {
        "model": fields.schema_of(_MODEL),
        "input": {"anyOf": [text, {"type": "array", "items": text, "minItems": 1, "maxItems": _MAX_INPUTS}]},
        "encoding_format": fields.schema_of(_ENCODING),
        "dimensions": fields.schema_of(_DIMENSIONS),
        "suffice": {"type": "object", "properties": wishes, "additionalProperties": False},
    }
    return fields.open_object(properties, required=("model", "input"))


def read_embedding_request(body: Mapping[str, Any], headers: Mapping[str, str]) -> EmbeddingRequest:
    """Check everything the body says, and the regions that body or ``x-suffice-*`` headers narrow.

    Raises
    ------
    InvalidRequest, UnsupportedOption
    """
    if body.get("model") is None:
        raise InvalidRequest("You must give a 'model': 'auto', or one that GET /v1/models lists.", param="model")
    encoding = body.get("encoding_format")
    dimensions = body.get("dimensions")
    return EmbeddingRequest(
        model=_MODEL(body["model"], "model"),
        texts=_texts(body.get("input")),
        as_base64=encoding is not None and _ENCODING(encoding, "encoding_format") == "base64",
        dimensions=None if dimensions is None else _DIMENSIONS(dimensions, "dimensions"),
        regions=_regions(body, headers),
    )


def _regions(body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[str, ...]:
    """What the body says; else what the header does.

    Raises
    ------
    InvalidRequest
        Another limit is asked for, or a misspelt one: it would be dropped in silence.
    """
    own = body.get("suffice")
    said = {} if own is None else fields.mapping(own, "suffice")
    asked = [(f"x-suffice-{key.replace('_', '-')}", key) for key in headers]
    for param, key in asked + [(f"suffice.{key[:80]}", key) for key in said]:
        if key != "regions" and key not in _WITHOUT_EFFECT:
            raise InvalidRequest(
                f"Embeddings have no option {param!r}; of the routing they have 'regions'.", param=param
            )
    if said.get("regions") is not None:
        return read_regions(said["regions"], "suffice.regions")
    if "regions" in headers:
        return read_regions(from_header("regions", headers["regions"]), "x-suffice-regions")
    return ()


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
