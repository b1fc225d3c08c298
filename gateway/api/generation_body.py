"""Reads the fields that chat and plain completions share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from backends.protocol import Priority
from gateway.api import fields
from gateway.api.fields import Check
from gateway.api.request import NO_PREFERENCES, RoutingPreferences
from gateway.api.routing_preferences import from_header, overrides_of, read_cost_limit, read_regions
from gateway.config.sections import ServerConfig
from gateway.errors import InvalidRequest, UnsupportedOption

_MAX_NAME_CHARS = 256
_MAX_OUTPUT_TOKENS = 2**31 - 1


class SharedFields:
    """Readers of the fields that chat and plain completions share, made once for the limits in force.

    Parameters
    ----------
    limits : the server's
    tier_numbers : tier's name -> its number; preferences may use either
    """

    def __init__(self, limits: ServerConfig, tier_numbers: Mapping[str, int]) -> None:
        self.limits = limits
        self._tier_numbers = tier_numbers
        self._model = fields.string(_MAX_NAME_CHARS, min_chars=1)
        self._n = fields.integer(1, limits.max_n)
        self._sampling = _sampling_checks(limits)
        # An empty answer makes sense where the prompt can be echoed with its probabilities.
        self._sampling_of_text = self._sampling | {"max_tokens": ("max_tokens", fields.integer(0, _MAX_OUTPUT_TOKENS))}
        self._preferences: Mapping[str, Check] = {
            "tier": self._tier,
            "min_tier": self._tier,
            "max_tier": self._tier,
            "explore": fields.boolean,
            "session_id": fields.string(_MAX_NAME_CHARS, min_chars=1),
            "policy": fields.string(_MAX_NAME_CHARS, min_chars=1),
            "priority": fields.one_of("live", "background"),
            "regions": read_regions,
            "max_cost_usd": read_cost_limit,
        }

    def model(self, body: Mapping[str, Any]) -> str:
        """The body's ``model``; it has no default."""
        if body.get("model") is None:
            raise InvalidRequest("You must give a 'model': 'auto', or one that GET /v1/models lists.", param="model")
        model: str = self._model(body["model"], "model")
        return model

    def n(self, body: Mapping[str, Any]) -> int:
        value = body.get("n")
        return 1 if value is None else self._n(value, "n")

    def sampling(self, body: Mapping[str, Any], *, may_be_empty: bool = False) -> dict[str, Any]:
        """Arguments of :class:`SamplingParams` the body gives, checked; all else of the body is not looked at.

        ``may_be_empty``: an answer of no tokens may be asked for.
        """
        given = {}
        checks = self._sampling_of_text if may_be_empty else self._sampling
        for key, value in body.items():
            if value is not None and (entry := checks.get(key)) is not None:
                name, check = entry
                given[name] = check(value, key)
        # Two names for one limit: the newer one wins, whatever their order in the body.
        if body.get("max_completion_tokens") is not None and "max_tokens" in given:
            given["max_tokens"] = checks["max_tokens"][1](body["max_completion_tokens"], "max_completion_tokens")
        return given

    def streaming(self, body: Mapping[str, Any]) -> tuple[bool, bool]:
        """Whether to stream, and whether with usage."""
        stream = body.get("stream")
        options = body.get("stream_options")
        if stream is not None:
            stream = fields.boolean(stream, "stream")
        if options is None:
            return bool(stream), False
        if not stream:
            raise InvalidRequest("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
        include = fields.mapping(options, "stream_options").get("include_usage")
        return True, include is not None and fields.boolean(include, "stream_options.include_usage")

    def thinking(self, body: Mapping[str, Any]) -> bool | None:
        """``chat_template_kwargs.enable_thinking``, else ``reasoning_effort`` (none and minimal switch it off)."""
        kwargs = body.get("chat_template_kwargs")
        if kwargs is not None:
            enable = fields.mapping(kwargs, "chat_template_kwargs").get("enable_thinking")
            if enable is not None:
                return fields.boolean(enable, "chat_template_kwargs.enable_thinking")
        effort = body.get("reasoning_effort")
        if effort is None:
            return None
        return EFFORT(effort, "reasoning_effort") not in ("none", "minimal")

    def preferences(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> RoutingPreferences:
        """The ``suffice`` object over the ``x-suffice-*`` headers: what both say, the body decides."""
        own = body.get("suffice")
        flex = body.get("service_tier") == "flex"
        if own is None and not headers and not flex:
            return NO_PREFERENCES
        given: dict[str, Any] = {"priority": "background"} if flex else {}
        for key, text in headers.items():
            given[key] = self._preferences[key](from_header(key, text), f"x-suffice-{key.replace('_', '-')}")
        for key, value in fields.mapping({} if own is None else own, "suffice").items():
            if key not in self._preferences:
                known = ", ".join(self._preferences)
                raise InvalidRequest(
                    f"'suffice' has no option {key[:80]!r}; it has {known}.", param=f"suffice.{key[:80]}"
                )
            if value is not None:
                given[key] = self._preferences[key](value, f"suffice.{key}")
        return RoutingPreferences(
            overrides_of(given), given.get("policy"), Priority(given.get("priority", "live")), given
        )

    def refuse_unsupported(self, body: Mapping[str, Any]) -> None:
        """Refuse what would change the answer's meaning and cannot be done; what changes nothing is tolerated."""
        for key, value in body.items():
            if value is None:
                continue
            if key in _UNSUPPORTED and not _UNSUPPORTED[key](value):
                raise UnsupportedOption(f"'{key}' is not supported yet with this value; leave it out.", param=key)
            if key in _WITHOUT_EFFECT:
                _WITHOUT_EFFECT[key](value, key)

    def properties(self, *, may_be_empty: bool = False) -> dict[str, fields.Schema]:
        """The JSON Schema of every field that is read here, by name."""
        checks = self._sampling_of_text if may_be_empty else self._sampling
        preferences = {name: fields.schema_of(check) for name, check in self._preferences.items()}
        described: dict[str, fields.Schema] = {
            "model": fields.schema_of(self._model),
            "n": fields.schema_of(self._n),
            "stream": fields.schema_of(fields.boolean),
            "stream_options": {"type": "object", "properties": {"include_usage": fields.schema_of(fields.boolean)}},
            "suffice": {"type": "object", "properties": preferences, "additionalProperties": False},
        }
        described |= {name: fields.schema_of(check) for name, (_, check) in checks.items()}
        return described | {name: fields.schema_of(check) for name, check in _WITHOUT_EFFECT.items()}

    def preference_headers(self) -> dict[str, fields.Schema]:
        """The JSON Schema of every ``x-suffice-*`` request header."""
        return {
            f"x-suffice-{name.replace('_', '-')}": fields.schema_of(check) for name, check in self._preferences.items()
        }

    @fields.lets_through({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]})
    def _tier(self, value: Any, param: str) -> int:
        if isinstance(value, str):
            if value not in self._tier_numbers:
                names = ", ".join(self._tier_numbers)
                raise InvalidRequest(
                    f"'{param}' is {value[:80]!r}; the tiers are {names}.", param=param, code="unknown_tier"
                )
            return self._tier_numbers[value]
        number: int = fields.integer(1, len(self._tier_numbers))(value, param)
        return number


EFFORT = fields.one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _format_is_text(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


_UNSUPPORTED: Mapping[str, Callable[[Any], bool]] = {
    "tools": lambda value: value == [],
    "functions": lambda value: value == [],
    "tool_choice": lambda value: value in ("none", "auto"),
    "function_call": lambda value: value in ("none", "auto"),
    "response_format": _format_is_text,
    "modalities": lambda value: value == ["text"],
    "audio": lambda value: False,
    "web_search_options": lambda value: False,
    "suffix": lambda value: value == "",
    "use_beam_search": lambda value: value is False,
    "structured_outputs": lambda value: value == {},
    "guided_json": lambda value: False,
    "guided_regex": lambda value: False,
    "guided_choice": lambda value: False,
    "guided_grammar": lambda value: False,
}


# OpenAI's fields that change nothing here, but are wrong all the same when they are of the wrong type.
_WITHOUT_EFFECT: Mapping[str, Check] = {
    "user": fields.string(512),
    "safety_identifier": fields.string(512),
    "prompt_cache_key": fields.string(512),
    "metadata": fields.mapping,
    "store": fields.boolean,
    "parallel_tool_calls": fields.boolean,
    "service_tier": fields.string(64),
}


def _sampling_checks(limits: ServerConfig) -> dict[str, tuple[str, Check]]:
    """The body's name -> our name, and the check."""
    return {
        "temperature": ("temperature", fields.number(0, 2)),
        "top_p": ("top_p", _top_p),
        "top_k": ("top_k", _top_k),
        "min_p": ("min_p", fields.number(0, 1)),
        "presence_penalty": ("presence_penalty", fields.number(-2, 2)),
        "frequency_penalty": ("frequency_penalty", fields.number(-2, 2)),
        "repetition_penalty": ("repetition_penalty", fields.number(0.01, 10)),
        "logit_bias": ("logit_bias", fields.biases(limits.max_logit_bias)),
        "seed": ("seed", fields.integer(-(2**63), 2**63 - 1)),
        "max_tokens": ("max_tokens", fields.integer(1, _MAX_OUTPUT_TOKENS)),
        "max_completion_tokens": ("max_tokens", fields.integer(1, _MAX_OUTPUT_TOKENS)),
        "min_tokens": ("min_tokens", fields.integer(0, _MAX_OUTPUT_TOKENS)),
        "stop": ("stop", fields.strings(limits.max_stop, limits.max_stop_chars)),
        "stop_token_ids": ("stop_token_ids", fields.token_ids(limits.max_stop)),
        "ignore_eos": ("ignore_eos", fields.boolean),
    }


_SHARE = fields.number(0, 1)
_COUNT = fields.integer(-1, 2**31 - 1)


@fields.lets_through(fields.schema_of(_SHARE))
def _top_p(value: Any, param: str) -> float:
    # 0 means "only the likeliest token" to OpenAI; samplers want a positive share.
    share: float = _SHARE(value, param)
    return share or 1e-9


@fields.lets_through(fields.schema_of(_COUNT))
def _top_k(value: Any, param: str) -> int:
    # -1 is vLLM's older word for "all".
    count: int = _COUNT(value, param)
    return max(count, 0)
