"""Describes served models as typed tables for ``[models.NAME]``, without loading anything.

Every option carries its meaning and its limits as data (``dataclasses.fields(...)[i].metadata``), so the settings
reader, the reference page and the check in ``__post_init__`` say the same thing. Mappings are copied, never shared.
"""

# ruff: noqa: RUF009 - option returns a dataclasses.field, and the config classes used as defaults are frozen

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import isfinite
from typing import Any, ClassVar, Literal, get_args
from urllib.parse import urlsplit

from backends.errors import InvalidConfig
from backends.protocol import Capability

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CpuCompute = Literal["auto", "int8", "int4", "exact"]
Activations = Literal["auto", "fp8"]
LoadFormat = Literal["auto", "dummy"]
ToolFormatName = Literal["auto", "hermes", "llama3_json", "mistral", "qwen3_coder"]
SpeculationMode = Literal["off", "draft", "ngram"]
Transport = Literal["auto", "httpx", "aiohttp"]
ScoreApi = Literal["none", "vllm", "echo"]
ThinkingParameter = Literal["none", "chat_template_kwargs", "reasoning_effort"]
HealthCheck = Literal["models", "token"]
MaxTokensParameter = Literal["max_tokens", "max_completion_tokens"]

_DEVICE = re.compile(r"cpu|cuda(?::(\d{1,3}))?", re.ASCII)


def option(
    default: Any,
    help_text: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    choices: tuple[Any, ...] | None = None,
) -> Any:
    """Declare a field of a config class, with its meaning and its limits as data.

    Parameters
    ----------
    default : ``MISSING`` where the option must be given
    at_least, at_most : limits of a number, both allowed
    choices : the only values allowed
    """
    metadata = {"help": help_text, "at_least": at_least, "at_most": at_most, "choices": choices}
    return field(default=default, metadata=metadata)


def check_limits(config: Any) -> None:
    """Check every field of a dataclass instance against the limits in its metadata.

    Raises
    ------
    InvalidConfig : names the field, shows the value and what was expected
    """
    for each in fields(config):
        value = getattr(config, each.name)
        if value is None:
            continue
        low, high, choices = (each.metadata.get(key) for key in ("at_least", "at_most", "choices"))
        if choices is not None and value not in choices:
            raise InvalidConfig(each.name, value, "one of " + ", ".join(map(repr, choices)))
        if (low is not None or high is not None) and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InvalidConfig(each.name, value, "a number")
        if isinstance(value, float) and not isfinite(value):
            raise InvalidConfig(each.name, value, "a finite number")
        if low is not None and value < low:
            raise InvalidConfig(each.name, value, f"at least {low}")
        if high is not None and value > high:
            raise InvalidConfig(each.name, value, f"at most {high}")


class _LimitedConfig:
    """Checks the limits of its fields as soon as it is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig(_LimitedConfig):
    """Says how a tier drafts its own tokens."""

    mode: SpeculationMode = option(
        "off",
        "`draft` lets a smaller model propose, `ngram` proposes from the text so far.",
        choices=get_args(SpeculationMode),
    )
    max_draft_tokens: int = option(5, "Most tokens proposed per step.", at_least=1, at_most=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModelConfig:
    """Describes a model served by the engine in this process."""

    kind: ClassVar[str] = "local"

    path: str = option(
        MISSING,
        "A folder in Hugging Face layout, a hub id (`owner/name@revision` pins it), or `builtin:tier1` … `tier3`.",
    )
    dtype: Dtype = option(
        "auto", "Type of weights that are not quantised, and of activations.", choices=get_args(Dtype)
    )
    cpu_compute: CpuCompute = option(
        "auto",
        "How 4-bit weights are multiplied on a CPU: `int8` copies (fast), packed `int4`, or `exact` (slow).",
        choices=get_args(CpuCompute),
    )
    activations: Activations = option(
        "auto",
        "What 4-bit weights meet on a Hopper GPU: `fp8` rounds activations to 8 bits where a step has 49 rows or more.",
        choices=get_args(Activations),
    )
    load_format: LoadFormat = option(
        "auto",
        "`dummy` draws random weights from `config.json` alone, for measuring; the tokenizer is still read.",
        choices=get_args(LoadFormat),
    )
    tensor_parallel: int = option(
        1, "GPUs of this host that the model is cut over, from `device` on; for what does not fit one.", at_least=1
    )
    thinking: bool = option(False, "Whether the model thinks step by step unless a request says otherwise.")
    tool_format: ToolFormatName = option(
        "auto",
        "How the model writes tool calls; `auto` reads it from the chat template, else teaches it `hermes`.",
        choices=get_args(ToolFormatName),
    )
    drafter: str | None = option(None, "The model that drafts: another served model's name, or a path as above.")
    speculation: SpeculationConfig = option(SpeculationConfig(), "How the tier drafts.")
    max_num_seqs: int = option(32, "Most sequences in one step.", at_least=1, at_most=4096)
    max_outstanding: int | None = option(
        None,
        "Most answers the gateway lets into it at once, the others wait in its queue; by default `max_num_seqs`, on a "
        "CPU at most 8. Models on one CPU share the least of theirs.",
        at_least=1,
    )
    max_batch_tokens: int = option(1024, "Most tokens in one step, prefill chunks included.", at_least=16)
    kv_cache_bytes: int | None = option(
        None, "Memory for the KV cache; by default sized from what is free.", at_least=1
    )
    context_length: int | None = option(None, "Longest prompt and answer; by default the model's own.", at_least=8)
    device: str = option("auto", "`cpu`, `cuda`, `cuda:1`, …; `auto` takes a GPU when there is one.")
    threads: int | None = option(None, "CPU threads per operation; by default chosen for this machine.", at_least=1)

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise InvalidConfig("path", self.path, "a folder, a hub id or builtin:tierN")
        check_limits(self)
        if self.speculation.mode == "draft" and self.drafter is None:
            raise InvalidConfig("drafter", None, "a model name or path, because speculation.mode is 'draft'")
        if self.activations == "fp8" and self.device == "cpu":
            raise InvalidConfig("activations", "fp8", "'auto', because device is 'cpu'")
        if self.activations == "fp8" and self.tensor_parallel > 1:
            raise InvalidConfig("activations", "fp8", "'auto', because tensor_parallel is above 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig(_LimitedConfig):
    """Says what the models on one device share."""

    kv_bytes: int = option(
        MISSING,
        "Memory for the keys and values of all its models without `kv_cache_bytes` of their own, in one.",
        at_least=1,
    )


def device_key(name: str) -> str | None:
    """Return the one spelling of a device's name, `cuda` being `cuda:0`; None if it is none."""
    match = _DEVICE.fullmatch(name)
    return match and (f"cuda:{int(match[1] or 0)}" if name != "cpu" else name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """Says when a replica is left alone, and for how long."""

    failure_threshold: int = option(
        3, "Requests failed in a row that open the breaker; the tries of one count once.", at_least=1
    )
    open_s: float = option(5.0, "Seconds a breaker stays open before one probe is let through.", at_least=0)
    max_open_s: float = option(60.0, "Longest wait; the time doubles with each failed probe.", at_least=0)

    def __post_init__(self) -> None:
        check_limits(self)
        if self.max_open_s < self.open_s:
            raise InvalidConfig("max_open_s", self.max_open_s, f"at least open_s ({self.open_s})")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryConfig(_LimitedConfig):
    """Says how failures before the first token are retried.

    Waits are drawn uniformly up to a doubling cap (full jitter).
    """

    max_attempts: int = option(3, "Attempts in all, over all replicas.", at_least=1, at_most=20)
    base_s: float = option(0.25, "Cap of the first wait in seconds.", at_least=0)
    max_s: float = option(8.0, "Cap of any wait; a longer Retry-After ends the retries.", at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutConfig(_LimitedConfig):
    """Limits, in seconds, each silence of a server."""

    connect_s: float = option(5.0, "To open a connection.", at_least=0.001)
    first_token_s: float = option(120.0, "From sending a request to its first token.", at_least=0.001)
    gap_s: float = option(60.0, "Between two tokens.", at_least=0.001)
    trailer_s: float = option(2.0, "From the last token to the token counts.", at_least=0.001)
    health_s: float = option(30.0, "For a health check's whole completion.", at_least=0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModelConfig:
    """Describes a model served by one or several replicas of an OpenAI-compatible server."""

    kind: ClassVar[str] = "remote"

    urls: tuple[str, ...] = option(MISSING, "Base URL of each replica, up to and including `/v1`.")
    model: str = option(MISSING, "The model's name at the server.")
    api_key_env: str | None = option(None, "The environment variable that holds the server's API key.")
    timeouts: TimeoutConfig = option(TimeoutConfig(), "Limits on silence.")
    retry: RetryConfig = option(RetryConfig(), "Retries before the first token.")
    breaker: BreakerConfig = option(BreakerConfig(), "When a failing replica is left alone.")
    max_outstanding: int = option(256, "Most requests in flight per replica.", at_least=1)
    context_length: int | None = option(None, "The model's context in tokens, where known.", at_least=8)
    capabilities: tuple[Capability, ...] = option(
        ("generate", "logprobs", "tools", "structured_output"),
        "What the server offers; `continue` is vLLM's `continue_final_message`: it ends an answer that broke off.",
    )
    thinking: bool | None = option(None, "Whether the model is asked to think unless a request says otherwise.")
    thinking_parameter: ThinkingParameter = option(
        "chat_template_kwargs", "How the server is told to think.", choices=get_args(ThinkingParameter)
    )
    max_tokens_parameter: MaxTokensParameter = option(
        "max_tokens", "The name the server gives the limit on an answer.", choices=get_args(MaxTokensParameter)
    )
    max_stop: int = option(
        4, "Most stop strings the server takes (OpenAI: 4); the others are applied here.", at_least=1
    )
    score_api: ScoreApi = option(
        "none",
        "How the server scores a given text: vLLM's `prompt_logprobs`, or `echo` with `logprobs`.",
        choices=get_args(ScoreApi),
    )
    health_check: HealthCheck = option(
        "models",
        "How a server that has answered nothing lately is checked: `models` lists its models, `token` has it generate "
        "one, which a hosted one bills.",
        choices=get_args(HealthCheck),
    )
    extra_body: Mapping[str, Any] = field(
        default_factory=dict, metadata={"help": "Fields added to every request, such as `service_tier`."}
    )
    extra_headers: Mapping[str, str] = field(
        default_factory=dict, metadata={"help": "Headers added to every request; not for secrets."}
    )
    transport: Transport = option(
        "auto",
        "HTTP client: `aiohttp` costs less CPU and is taken by `auto` when installed.",
        choices=get_args(Transport),
    )
    cache_salt: bool = option(
        False, "Whether the server takes vLLM's `cache_salt`, which keeps the prefixes of tenants apart in its cache."
    )
    proxy: str | None = option(None, "URL of an HTTP proxy.")
    verify_tls: bool = option(True, "Whether certificates are checked.")

    def __post_init__(self) -> None:
        # A TOML array arrives as a list; a tuple cannot be changed by whoever holds the other reference.
        urls: Sequence[str] | str = self.urls
        object.__setattr__(self, "urls", (urls,) if isinstance(urls, str) else tuple(urls))
        object.__setattr__(self, "capabilities", tuple(self.capabilities))
        object.__setattr__(self, "extra_body", dict(self.extra_body))
        object.__setattr__(self, "extra_headers", dict(self.extra_headers))
        check_limits(self)
        self._check_urls()
        if not isinstance(self.model, str) or not self.model:
            raise InvalidConfig("model", self.model, "the model's name at the server")
        unknown = sorted(set(self.capabilities) - set(get_args(Capability)))
        if unknown:
            raise InvalidConfig("capabilities", unknown[0], "one of " + ", ".join(get_args(Capability)))
        if "score" in self.capabilities and self.score_api == "none":
            raise InvalidConfig("score_api", "none", "'vllm' or 'echo', because capabilities has 'score'")

    def _check_urls(self) -> None:
        if not self.urls:
            raise InvalidConfig("urls", [], "at least one base URL")
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise InvalidConfig("urls", url, "http://HOST[:PORT]/v1 or https://…")
            if parts.username is not None or parts.password is not None:
                raise InvalidConfig("urls", f"{parts.scheme}://…@{parts.hostname}", "no credentials; use api_key_env")
        if len(set(self.urls)) < len(self.urls):
            raise InvalidConfig("urls", list(self.urls), "each replica once")


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoModelConfig(_LimitedConfig):
    """Describes a model that repeats its prompt: for trying a configuration and measuring the gateway alone."""

    kind: ClassVar[str] = "echo"

    text: str | None = option(None, "The answer; by default the last message.")
    first_delay_s: float = option(0.0, "Seconds before the first token.", at_least=0)
    token_delay_s: float = option(0.0, "Seconds after each token.", at_least=0)
    context_length: int | None = option(8192, "Longest prompt and answer in the fake's tokens.", at_least=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayModelConfig:
    """Describes a model whose answers were recorded earlier, for evaluation."""

    kind: ClassVar[str] = "replay"

    path: str = option(
        MISSING,
        "A folder in Hugging Face layout, a hub id (`owner/name@revision` pins one), or `builtin:tier1` … "
        "`builtin:tier3`.",
    )
    context_length: int | None = option(None, "The recorded model's context in tokens, where known.", at_least=8)

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise InvalidConfig("path", self.path, "a JSON Lines file")
        check_limits(self)


ModelConfig = LocalModelConfig | RemoteModelConfig | EchoModelConfig | ReplayModelConfig

MODEL_KINDS: Mapping[str, type[ModelConfig]] = {
    each.kind: each for each in (LocalModelConfig, RemoteModelConfig, EchoModelConfig, ReplayModelConfig)
}
"""``kind`` in a ``[models.NAME]`` table → the class that describes it."""
