"""``/v1/completions``: JSON object in, :class:`InferenceRequest` out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.protocol import SamplingParams
from gateway.api import fields
from gateway.api.request import InferenceRequest, Prompt
from gateway.api.shared_fields import SharedFields
from gateway.errors import InvalidRequest, UnsupportedOption

# OpenAI's own default; without one a base model writes to the end of its context.
_DEFAULT_MAX_TOKENS = 16
_MAX_PROMPTS = 128
_MAX_PROMPT_IDS = 2**20


class CompletionDecoder:
    """Reads plain completion bodies under the limits in force."""

    def __init__(self, shared: SharedFields) -> None:
        self._shared = shared
        self._logprobs = fields.integer(0, shared.limits.max_logprobs)
        self._best_of = fields.integer(1, shared.limits.max_n)

    def __call__(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> InferenceRequest:
        """Check everything the body says.

        Raises
        ------
        InvalidRequest
            Missing, of the wrong type or out of range; ``param`` names the field.
        UnsupportedOption
            Understood, but nothing here can do it yet.
        """
        shared = self._shared
        model = shared.model(body)
        shared.refuse_unsupported(body)
        prompts = _prompts(body.get("prompt"))
        sampling = {"max_tokens": _DEFAULT_MAX_TOKENS} | shared.sampling(body, may_be_empty=True)
        echo = body.get("echo") is not None and fields.boolean(body["echo"], "echo")
        stream, include_usage = shared.streaming(body)
        if (logprobs := body.get("logprobs")) is not None:
            sampling["logprobs"] = self._logprobs(logprobs, "logprobs")
            if echo:
                sampling["prompt_logprobs"] = sampling["logprobs"]
        n = shared.n(body)
        self._check_best_of(body.get("best_of"), n)
        self._check_choices(len(prompts) * n)
        return InferenceRequest(
            model=model,
            prompts=prompts,
            sampling=SamplingParams(**sampling),
            n=n,
            stream=stream,
            include_usage=include_usage,
            echo=echo,
            preferences=shared.preferences(body, headers),
        )

    def schema(self) -> dict[str, Any]:
        """What a body may hold, as JSON Schema."""
        properties = self._shared.properties(may_be_empty=True) | {
            "prompt": _PROMPT,
            "echo": fields.schema_of(fields.boolean),
            "logprobs": fields.schema_of(self._logprobs),
            "best_of": fields.schema_of(self._best_of),
        }
        return fields.open_object(properties, required=("model", "prompt"))

    def _check_best_of(self, value: Any, n: int) -> None:
        if value is not None and self._best_of(value, "best_of") != n:
            raise UnsupportedOption("'best_of' is only supported when it equals 'n'.", param="best_of")

    def _check_choices(self, num_choices: int) -> None:
        if num_choices > _MAX_PROMPTS:
            raise InvalidRequest(
                f"'prompt' times 'n' makes {num_choices} answers; at most {_MAX_PROMPTS} are given.", param="n"
            )


_IDS = fields.token_ids(_MAX_PROMPT_IDS)
_TEXT_OR_IDS = {"anyOf": [{"type": "string"}, fields.schema_of(_IDS) | {"minItems": 1}]}
_PROMPT = {
    "anyOf": [
        *_TEXT_OR_IDS["anyOf"],
        {"type": "array", "items": _TEXT_OR_IDS, "minItems": 1, "maxItems": _MAX_PROMPTS},
    ]
}


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """A string, an array of strings, an array of token ids, or an array of those."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise fields.wrong_type("prompt", "a string, an array of strings or an array of token ids", value)
    if not value:
        raise InvalidRequest("'prompt' is an empty array; expected at least one prompt.", param="prompt")
    if isinstance(value[0], int):
        return (_IDS(value, "prompt"),)
    if len(value) > _MAX_PROMPTS:
        raise fields.wrong_value("prompt", f"at most {_MAX_PROMPTS} prompts", f"{len(value)} prompts")
    return tuple([_prompt(each, f"prompt[{place}]") for place, each in enumerate(value)])


def _prompt(value: Any, where: str) -> Prompt:
    if isinstance(value, str):
        return value
    ids: tuple[int, ...] = _IDS(value, where)
    if not ids:
        raise InvalidRequest(f"'{where}' is empty; expected at least one token id.", param=where)
    return ids
