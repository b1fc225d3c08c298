"""Declares the fields that bodies of chat and of plain completions share."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta, Struct

from backends.protocol import SamplingParams
from gateway.api.declaration import JsonScalar, Words, limited
from gateway.api.request import RoutingPreferences
from gateway.api.routing_preferences import Name, PreferenceDecoder, RoutingOptions
from gateway.config.sections import ServerConfig
from gateway.errors import InvalidRequest, UnsupportedOption

MAX_OUTPUT_TOKENS = 2**31 - 1
_MAX_TOKEN_ID = 2**31 - 1


def _missing_model(value: Any, param: str) -> InvalidRequest | None:
    if value is not None:
        return None
    return InvalidRequest("You must give a 'model': 'auto', or one that GET /v1/models lists.", param=param)


def _unsupported(value: Any, param: str) -> InvalidRequest:
    return UnsupportedOption(f"'{param}' is not supported yet with this value; leave it out.", param=param)


class Off(JsonScalar):
    """False, and nothing else."""

    json_schema: ClassVar[Mapping[str, Any]] = {"const": False}

    @classmethod
    def from_json(cls, value: Any) -> Off:
        if value is not False:
            raise ValueError
        return cls()


class TextFormat(Struct):
    """The one format of answers that is supported."""

    type: Literal["text"]


class StreamOptions(Struct):
    """What a stream carries beside the answer."""

    include_usage: bool | None = None


ModelName = Annotated[Name, Words(error=_missing_model)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0, le=_MAX_TOKEN_ID), Words(kind="a token id", value="a token id from 0")]
TokenCount = Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)]
PositiveTokenCount = Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)]
Label = Annotated[str, Meta(min_length=0, max_length=512)]
# "$" alone would let a line break follow.
BiasKey = Annotated[str, Meta(pattern=r"^[0-9]{1,10}(?!\n)$")]
Bias = Annotated[float, Meta(ge=-100, le=100)]

# What would change the answer's meaning and cannot be done is refused, unless its value asks for nothing.
_REFUSED = Words(error=_unsupported)
Refused = Annotated[None, _REFUSED]
RefusedUnlessEmpty = Annotated[list[Any], Meta(max_length=0), _REFUSED]
RefusedUnlessBare = Annotated[dict[str, Any], Meta(max_length=0), _REFUSED]
RefusedUnlessFree = Annotated[Literal["none", "auto"], _REFUSED]


class GenerationBody(Struct, kw_only=True):
    """What chat and plain completions have in common. What changes nothing is tolerated, if it is of the right type."""

    checked_first: ClassVar[tuple[str, ...]] = (
        "model", "tools", "functions", "tool_choice", "function_call", "response_format", "modalities", "audio",
        "web_search_options", "suffix", "use_beam_search", "structured_outputs", "guided_json", "guided_regex",
        "guided_choice", "guided_grammar", "user", "safety_identifier", "prompt_cache_key", "metadata", "store",
        "parallel_tool_calls", "service_tier",
    )  # fmt: skip

    model: ModelName
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    logit_bias: dict[BiasKey, Bias] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: PositiveTokenCount | None = None
    max_completion_tokens: PositiveTokenCount | None = None
    min_tokens: TokenCount | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[TokenId, ...] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    suffice: RoutingOptions | None = None

    tools: RefusedUnlessEmpty | None = None
    functions: RefusedUnlessEmpty | None = None
    tool_choice: RefusedUnlessFree | None = None
    function_call: RefusedUnlessFree | None = None
    response_format: Annotated[TextFormat, _REFUSED] | None = None
    modalities: Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1), _REFUSED] | None = None
    audio: Refused = None
    web_search_options: Refused = None
    suffix: Annotated[Literal[""], _REFUSED] | None = None
    use_beam_search: Annotated[Off, _REFUSED] | None = None
    structured_outputs: RefusedUnlessBare | None = None
    guided_json: Refused = None
    guided_regex: Refused = None
    guided_choice: Refused = None
    guided_grammar: Refused = None

    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    parallel_tool_calls: bool | None = None
    service_tier: Annotated[str, Meta(min_length=0, max_length=64)] | None = None


B = TypeVar("B", bound=GenerationBody)


class BodyLimits:
    """Limits bodies as the settings and the ladder do.

    Parameters
    ----------
    server : the settings
    tier_numbers : tier's name -> its number; preferences may use either
    """

    def __init__(self, server: ServerConfig, tier_numbers: Mapping[str, int]) -> None:
        self.server = server
        self._preferences = PreferenceDecoder(tier_numbers)

    def limit(self, shape: type[B], **more: Any) -> type[B]:
        """Return a body's declaration under these limits, and ``more`` of its own."""
        server = self.server
        stop = Annotated[str, Meta(min_length=1, max_length=server.max_stop_chars)]
        few, few_biases = Meta(max_length=server.max_stop), Meta(max_length=server.max_logit_bias)
        stops: Any = Annotated[tuple[stop, ...], few, Words(items="strings")]
        shared: dict[str, Any] = {
            "n": Annotated[int, Meta(ge=1, le=server.max_n)],
            "stop": Annotated[stop | stops, Words(kind="a string or an array of strings")],
            "stop_token_ids": Annotated[tuple[TokenId, ...], few, TOKEN_ID_WORDS],
            "logit_bias": Annotated[dict[BiasKey, Bias], few_biases, Words(value="token ids as keys")],
            "suffice": self._preferences.shape,
        }
        return limited(shape, **shared | more)

    def preferences(self, body: GenerationBody, headers: Mapping[str, str]) -> RoutingPreferences:
        """Return the routing preferences of body and headers."""
        return self._preferences(body.suffice, headers, is_background=body.service_tier == "flex")

    def header_schemas(self) -> dict[str, dict[str, Any]]:
        """Return the JSON Schema of every ``x-suffice-*`` request header."""
        return self._preferences.header_schemas()


TOKEN_ID_WORDS = Words(kind="an array of token ids", items="token ids", counted="ids")

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip
_sampling_of = attrgetter(*_SAMPLING)


def sampling_of(body: GenerationBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return how a body wants its tokens drawn; ``defaults`` hold where it says nothing."""
    given = {name: value for name, value in zip(_SAMPLING, _sampling_of(body), strict=True) if value is not None}
    # Two names for one limit: the newer one wins.
    if body.max_completion_tokens is not None:
        given["max_tokens"] = body.max_completion_tokens
    if body.top_p == 0:
        # 0 means "only the likeliest token" to OpenAI; samplers want a positive share.
        given["top_p"] = 1e-9
    if body.top_k == -1:
        # -1 is vLLM's older word for "all".
        given["top_k"] = 0
    if isinstance(body.stop, str):
        given["stop"] = (body.stop,)
    if body.logit_bias is not None:
        given["logit_bias"] = {int(key): bias for key, bias in body.logit_bias.items()}
    return SamplingParams(**{**defaults, **given})


def streaming_of(body: GenerationBody) -> tuple[bool, bool]:
    """Return whether to stream, and whether with usage.

    Raises
    ------
    InvalidRequest
        Options of a stream that is not wanted.
    """
    if body.stream_options is None:
        return bool(body.stream), False
    if not body.stream:
        raise InvalidRequest("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
    return True, bool(body.stream_options.include_usage)
