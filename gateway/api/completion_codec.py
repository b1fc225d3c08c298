"""Reads the requests of ``/v1/completions`` into the internal form and writes its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import orjson
from msgspec import Meta, Struct

from backends.protocol import FinishReason, TokenDelta, TokenLogprob
from gateway.api.answer_encoder import AnswerChoice, CompletionsEncoder, ResponseHead, finite
from gateway.api.declaration import Words, checked, schema_of, wrong_type
from gateway.api.generation_body import (
    TOKEN_ID_WORDS,
    BodyLimits,
    GenerationBody,
    GenerationDecoder,
    RefusedUnlessEmpty,
    RefusedUnlessFree,
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
    tools: RefusedUnlessEmpty | None = None
    tool_choice: RefusedUnlessFree | None = None
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


class CompletionEncoder(CompletionsEncoder):
    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, head: ResponseHead, request: InferenceRequest) -> None:
        super().__init__(head, request)
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> bytes:
        return b""

    def delta(self, index: int, delta: TokenDelta) -> bytes:
        if not (delta.text or delta.logprobs):
            return b""
        if not delta.logprobs:
            return self._frame(index, orjson.dumps(delta.text))
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(delta.text)
        return self._frame(index, orjson.dumps(delta.text), orjson.dumps(_logprobs_json(delta.logprobs, offset)))

    def ending(self, index: int, reason: FinishReason) -> bytes:
        return self._frame(index, b'""', reason=b'"' + reason.encode() + b'"')

    def _frame(self, index: int, text: bytes, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (index, text, logprobs, reason)
        return self._before + choice + self._after

    def held(self, answer: AnswerChoice) -> bytes:
        logprobs = _logprobs_json(_entries(answer), 0)
        return self._frame(answer.index, orjson.dumps(answer.text), orjson.dumps(logprobs))

    def choice(self, answer: AnswerChoice) -> dict[str, Any]:
        entries = _entries(answer)
        return {
            "index": answer.index,
            "text": answer.text,
            "logprobs": _logprobs_json(entries, 0) if entries or answer.wants_logprobs else None,
            "finish_reason": str(answer.finish_reason),
        }


def _entries(answer: AnswerChoice) -> Sequence[TokenLogprob | None]:
    """The tokens of an echoed prompt, then the answer's own."""
    assert answer.finished is not None, "only finished answers are shown whole"
    return [*(answer.finished.prompt_logprobs or ()), *answer.logprobs]


def _logprobs_json(entries: Sequence[TokenLogprob | None], offset: int) -> dict[str, Any]:
    """The older form: parallel arrays. The first token of an echoed prompt has no probability."""
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for entry in entries:
        offsets.append(offset)
        tokens.append(entry.token if entry else "")
        logprobs.append(finite(entry.logprob) if entry else None)
        # The sampled token is always among them, also where it is none of the likeliest.
        tops.append({t: finite(p) for t, _, p in (*entry.top, (entry.token, 0, entry.logprob))} if entry else None)
        offset += len(tokens[-1])
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
