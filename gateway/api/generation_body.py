"""Decodes bodies of requests for text, and declares the fields that chat and plain completions share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from msgspec import Meta, Struct, ValidationError, convert

from backends.protocol import FREE_CHOICE, PLAIN_TEXT, OutputFormat, SamplingParams, Tool, ToolChoice
from gateway.api.declaration import JsonScalar, Words, explain, fits, limited, read_scalar, schema_of, wrong_type
from gateway.api.request import (
    NO_HINTS,
    NO_PREFERENCES,
    ConversationHints,
    InferenceRequest,
    Prompt,
    RoutingPreferences,
)
from gateway.api.routing_preferences import Name, PreferenceDecoder, RoutingOptions
from gateway.api.tool_fields import FormatField, StructuredOutputs, read_output_format
from gateway.config.sections import ServerConfig
from gateway.errors import InvalidRequest, UnsupportedOption

MAX_OUTPUT_TOKENS = 2**31 - 1
_MAX_TOKEN_ID = 2**31 - 1
# 0 means "only the likeliest token" to OpenAI; samplers want a positive share.
LEAST_SHARE = 1e-9


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

TOKEN_ID_WORDS = Words(kind="an array of token ids", items="token ids", counted="ids")

# What would change the answer's meaning and cannot be done is refused, unless its value asks for nothing.
_REFUSED = Words(error=_unsupported)
Refused = Annotated[None, _REFUSED]
RefusedUnlessEmpty = Annotated[list[Any], Meta(max_length=0), _REFUSED]
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

    functions: RefusedUnlessEmpty | None = None
    function_call: RefusedUnlessFree | None = None
    response_format: FormatField | None = None
    modalities: Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1), _REFUSED] | None = None
    audio: Refused = None
    web_search_options: Refused = None
    suffix: Annotated[Literal[""], _REFUSED] | None = None
    use_beam_search: Annotated[Off, _REFUSED] | None = None
    structured_outputs: StructuredOutputs | None = None
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


S = TypeVar("S", bound=Struct)
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
        self.preferences = PreferenceDecoder(tier_numbers)

    def stop_strings(self) -> tuple[Any, Any]:
        """Return the types of one stop string and of an array of them."""
        server = self.server
        stop = Annotated[str, Meta(min_length=1, max_length=server.max_stop_chars)]
        return stop, Annotated[tuple[stop, ...], Meta(max_length=server.max_stop), Words(items="strings")]

    def messages(self, item: Any) -> Any:
        """Return the type of a conversation of such messages."""
        most = self.server.max_messages

        def wrong_count(value: Any, param: str) -> InvalidRequest | None:
            if not isinstance(value, list) or 1 <= len(value) <= most:
                return None
            return InvalidRequest(f"'{param}' has {len(value)} entries; expected 1 to {most}.", param=param)

        return Annotated[list[item], Meta(min_length=1, max_length=most), Words(error=wrong_count)]

    def tools(self, item: Any) -> Any:
        """Return the type of an array of tools."""
        return Annotated[list[item], Meta(max_length=self.server.max_tools), Words(items="tools")]

    def limit(self, shape: type[B], **more: Any) -> type[B]:
        """Return the declaration of a body of chat or plain completions under these limits, and ``more`` of its own."""
        server = self.server
        stop, stops = self.stop_strings()
        few, few_biases = Meta(max_length=server.max_stop), Meta(max_length=server.max_logit_bias)
        shared: dict[str, Any] = {
            "n": Annotated[int, Meta(ge=1, le=server.max_n)],
            "stop": Annotated[stop | stops, Words(kind="a string or an array of strings")],
            "stop_token_ids": Annotated[tuple[TokenId, ...], few, TOKEN_ID_WORDS],
            "logit_bias": Annotated[dict[BiasKey, Bias], few_biases, Words(value="token ids as keys")],
            "suffice": self.preferences.shape,
        }
        return limited(shape, **shared | more)

    def header_schemas(self) -> dict[str, dict[str, Any]]:
        """Return the JSON Schema of every ``x-suffice-*`` request header."""
        return self.preferences.header_schemas()


class BodyDecoder(Generic[S]):
    """Decodes bodies of one declared shape; base of the decoders of all protocols."""

    def __init__(self, shape: type[S], preferences: PreferenceDecoder) -> None:
        self._shape = shape
        self._preference_decoder = preferences
        # msgspec resolves types at their first use, which takes ten milliseconds: not of the first request's time.
        fits({}, shape)

    def schema(self) -> dict[str, Any]:
        """Return what a body may hold, as JSON Schema."""
        return schema_of(self._shape)

    def _checked(self, raw: Mapping[str, Any]) -> S:
        # As declaration.checked() does: every request comes through here, and saves the detour.
        try:
            return convert(raw, self._shape, dec_hook=read_scalar)
        except ValidationError:
            raise explain(raw, self._shape, "") from None

    def _preferences(
        self, given: RoutingOptions | None, headers: Mapping[str, str], service_tier: str | None
    ) -> RoutingPreferences:
        """Return what body and headers ask of the routing."""
        is_background = service_tier == "flex"
        if given is None and not headers and not is_background:
            return NO_PREFERENCES
        return self._preference_decoder(given, headers, is_background=is_background)


class GenerationDecoder(BodyDecoder[B]):
    """Decodes what bodies of chat and plain completions have in common."""

    def _request(
        self,
        body: B,
        names: Iterable[str],
        headers: Mapping[str, str],
        prompts: tuple[Prompt, ...],
        sampling: dict[str, Any],
        thinking: bool | None = None,
        prediction: str | None = None,
        echo: bool = False,
        tools: tuple[Tool, ...] = (),
        tool_choice: ToolChoice = FREE_CHOICE,
    ) -> InferenceRequest:
        """Return the request.

        Parameters
        ----------
        names : the fields that the body has; asking each of the others for its value would take longer than all else
        sampling : what holds where the body says nothing
        """
        for name in names:
            if name in _SAMPLING and (value := getattr(body, name)) is not None:
                adjust = _SAMPLING[name]
                sampling[name] = value if adjust is None else adjust(value)
        # Two names for one limit: the newer one wins.
        if body.max_completion_tokens is not None:
            sampling["max_tokens"] = body.max_completion_tokens
        output_format: OutputFormat = PLAIN_TEXT
        if body.response_format is not None or body.structured_outputs is not None:
            output_format = read_output_format(body.response_format, body.structured_outputs)
        return InferenceRequest(
            model=body.model,
            prompts=prompts,
            sampling=SamplingParams(**sampling),
            n=body.n or 1,
            stream=bool(body.stream),
            # Some clients send it whether they stream or not.
            include_usage=bool(body.stream and body.stream_options is not None and body.stream_options.include_usage),
            preferences=self._preferences(body.suffice, headers, body.service_tier),
            thinking=thinking,
            prediction=prediction,
            echo=echo,
            tools=tools,
            tool_choice=tool_choice,
            output_format=output_format,
            hints=NO_HINTS
            if body.prompt_cache_key is None and body.metadata is None
            else ConversationHints(body.prompt_cache_key, user_id_of(body.metadata)),
        )


def text_of(body: Mapping[str, Any], name: str, where: str) -> str:
    """Return a text that an object must have.

    Raises
    ------
    InvalidRequest
        It has none; ``param`` begins with ``where``.
    """
    value = body.get(name)
    if not isinstance(value, str):
        raise wrong_type(f"{where}.{name}", "a string", value)
    return value


def user_id_of(metadata: Mapping[str, Any] | None) -> str | None:
    """Return ``metadata.user_id``, where it is text."""
    found = None if metadata is None else metadata.get("user_id")
    return found if isinstance(found, str) else None


# Fields of a body -> what SamplingParams makes of their values.
_SAMPLING: Mapping[str, Callable[[Any], Any] | None] = {
    "temperature": None,
    "top_p": lambda share: share or LEAST_SHARE,
    # -1 is vLLM's older word for "all".
    "top_k": lambda count: max(count, 0),
    "min_p": None,
    "presence_penalty": None,
    "frequency_penalty": None,
    "repetition_penalty": None,
    "logit_bias": lambda biases: {int(key): bias for key, bias in biases.items()},
    "seed": None,
    "max_tokens": None,
    "min_tokens": None,
    "stop": lambda stop: (stop,) if isinstance(stop, str) else stop,
    "stop_token_ids": None,
    "ignore_eos": None,
}
