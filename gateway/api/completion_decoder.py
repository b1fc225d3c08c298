"""Decodes ``/v1/completions``: JSON object in, :class:`InferenceRequest` out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from gateway.api.declaration import Words, checked, schema_of, wrong_type
from gateway.api.generation_body import (
    TOKEN_ID_WORDS,
    BodyLimits,
    GenerationBody,
    GenerationDecoder,
    TokenCount,
    TokenId,
)
from gateway.api.request import InferenceRequest, Prompt
from gateway.errors import InvalidRequest, UnsupportedOption

# OpenAI's own default; without one a base model writes to the end of its context.
_DEFAULT_MAX_TOKENS = 16
_MAX_PROMPTS = 128
_MAX_PROMPT_IDS = 2**20


def _no_ids(value: Any, param: str) -> InvalidRequest | None:
    if value != []:
        return None
    return InvalidRequest(f"'{param}' is empty; expected at least one token id.", param=param)


def _wrong_prompt(value: Any, param: str) -> InvalidRequest | None:
    if value == []:
        return InvalidRequest(f"'{param}' is an empty array; expected at least one prompt.", param=param)
    if isinstance(value, list):
        return None
    return wrong_type(param, "a string, an array of strings or an array of token ids", value)


TokenIds = Annotated[
    tuple[TokenId, ...],
    Meta(min_length=1, max_length=_MAX_PROMPT_IDS),
    Words(kind=TOKEN_ID_WORDS.kind, items=TOKEN_ID_WORDS.items, counted=TOKEN_ID_WORDS.counted, error=_no_ids),
]
Prompts = Annotated[
    tuple[Annotated[str | TokenIds, Words(kind=TOKEN_ID_WORDS.kind)], ...],
    Meta(min_length=1, max_length=_MAX_PROMPTS),
    Words(items="prompts"),
]


class IdsBody(Struct):
    """A prompt of token ids."""

    prompt: TokenIds


class PromptsBody(Struct):
    """Several prompts."""

    prompt: Prompts


# An array of integers is one prompt of token ids; every other array holds prompts.
_ARRAY_SCHEMA = {"anyOf": [schema_of(TokenIds), schema_of(Prompts)]}


class CompletionBody(GenerationBody, kw_only=True):
    """A text that is to be continued."""

    checked_first = (*GenerationBody.checked_first, "prompt")

    prompt: Annotated[
        str | Annotated[list[Any], Meta(min_length=1, extra_json_schema=_ARRAY_SCHEMA)], Words(error=_wrong_prompt)
    ]
    # An empty answer makes sense where the prompt can be echoed with its probabilities.
    max_tokens: TokenCount | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class CompletionDecoder(GenerationDecoder[CompletionBody]):
    """Decodes plain completion bodies under the server's limits."""

    def __init__(self, limits: BodyLimits) -> None:
        logprobs = Annotated[int, Meta(ge=0, le=limits.server.max_logprobs)]
        best_of = Annotated[int, Meta(ge=1, le=limits.server.max_n)]
        super().__init__(limits.limit(CompletionBody, logprobs=logprobs, best_of=best_of), limits.preferences)

    def __call__(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> InferenceRequest:
        """Check everything the body says.

        Raises
        ------
        InvalidRequest
            Missing, of the wrong type or out of range; ``param`` names the field.
        UnsupportedOption
            Understood, but nothing here can do it yet.
        """
        given = self._checked(body)
        request = self._request(given, body, headers, _prompts(given.prompt), _defaults(given), echo=bool(given.echo))
        if given.best_of is not None and given.best_of != request.n:
            raise UnsupportedOption("'best_of' is only supported when it equals 'n'.", param="best_of")
        if request.num_choices > _MAX_PROMPTS:
            raise InvalidRequest(
                f"'prompt' times 'n' makes {request.num_choices} answers; at most {_MAX_PROMPTS} are given.", param="n"
            )
        return request


def _defaults(body: CompletionBody) -> dict[str, Any]:
    defaults: dict[str, Any] = {"max_tokens": _DEFAULT_MAX_TOKENS}
    if body.logprobs is not None:
        defaults["logprobs"] = body.logprobs
        if body.echo:
            defaults["prompt_logprobs"] = body.logprobs
    return defaults


def _prompts(given: str | list[Any]) -> tuple[Prompt, ...]:
    """Return a string, an array of strings, an array of token ids, or an array of those, as prompts."""
    if isinstance(given, str):
        return (given,)
    if isinstance(given[0], int):
        return (checked({"prompt": given}, IdsBody, "").prompt,)
    return checked({"prompt": given}, PromptsBody, "").prompt
