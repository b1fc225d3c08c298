"""Decodes ``/v1/embeddings``: JSON object in, :class:`EmbeddingRequest` out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from gateway.api.declaration import ClosedShape, Words, checked
from gateway.api.generation_body import ModelName
from gateway.api.routing_preferences import Regions, from_header, named_regions
from gateway.errors import InvalidRequest, UnsupportedOption

_MAX_INPUTS = 2048


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


def _empty_text(value: Any, param: str) -> InvalidRequest | None:
    return InvalidRequest(f"'{param}' is empty; expected some text.", param=param) if value == "" else None


def _token_ids(value: Any, param: str) -> InvalidRequest | None:
    first = value[0] if isinstance(value, list) and 1 <= len(value) <= _MAX_INPUTS else None
    if isinstance(first, bool) or not isinstance(first, int | list):
        return None
    return UnsupportedOption(f"'{param}' as token ids is not supported; give text.", param=param)


InputText = Annotated[str, Meta(min_length=1), Words(error=_empty_text)]
InputTexts = Annotated[
    tuple[InputText, ...],
    Meta(min_length=1, max_length=_MAX_INPUTS),
    Words(value=f"1 to {_MAX_INPUTS} strings", counted="items"),
]


class EmbeddingRoutingOptions(ClosedShape, frozen=True, kw_only=True):
    """What may be asked of the routing of embeddings; the options without a type limit nothing here."""

    regions: Regions | None = None
    explore: Any = None
    session_id: Any = None
    priority: Any = None

    @classmethod
    def unknown(cls, name: str, param: str) -> InvalidRequest:
        """Return the error for another limit, or a misspelt one: it would be dropped in silence."""
        return _unknown_option(f"{param}.{name[:80]}")


class EmbeddingBody(Struct, kw_only=True):
    """Texts whose vectors are wanted."""

    model: ModelName
    input: Annotated[InputText | InputTexts, Words(kind="a string or an array of strings", error=_token_ids)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    suffice: EmbeddingRoutingOptions | None = None


def decode_embedding_request(body: Mapping[str, Any], headers: Mapping[str, str]) -> EmbeddingRequest:
    """Check everything the body says, and the regions that body or ``x-suffice-*`` headers narrow.

    Raises
    ------
    InvalidRequest, UnsupportedOption
    """
    for key in headers:
        if key not in EmbeddingRoutingOptions.__struct_fields__:
            raise _unknown_option(f"x-suffice-{key.replace('_', '-')}")
    given = checked(body, EmbeddingBody, "")
    return EmbeddingRequest(
        model=given.model,
        texts=(given.input,) if isinstance(given.input, str) else given.input,
        as_base64=given.encoding_format == "base64",
        dimensions=given.dimensions,
        regions=_regions(given.suffice, headers),
    )


def _regions(own: EmbeddingRoutingOptions | None, headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return what the body says; else what the header does."""
    if own is not None and own.regions is not None:
        return named_regions(own.regions)
    if "regions" in headers:
        return named_regions(checked(from_header("regions", headers["regions"]), Regions, "x-suffice-regions"))
    return ()


def _unknown_option(param: str) -> InvalidRequest:
    return InvalidRequest(f"Embeddings have no option {param!r}; of the routing they have 'regions'.", param=param)
