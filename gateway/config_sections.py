# ruff: noqa: RUF009  _option only wraps dataclasses.field, whose call is what a field is made of
"""The gateway's own settings, section by section. Every option carries its meaning and its limits as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

AuthMode = Literal["auto", "always", "never"]
LogFormat = Literal["json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]
Retention = Literal["none", "digest", "full"]


def _option(default: Any, help_text: str, *, at_least: float | None = None, at_most: float | None = None) -> Any:
    return field(default=default, metadata={"help": help_text, "at_least": at_least, "at_most": at_most})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the gateway listens and how much it takes."""

    host: str = _option("127.0.0.1", "Address to listen on.")
    port: int = _option(8000, "Port to listen on; 0 takes a free one.", at_least=0, at_most=65535)
    root_path: str = _option("", "Path prefix a reverse proxy strips, such as `/suffice`.")
    cors_origins: tuple[str, ...] = _option((), "Origins that browsers may call from; `*` for all.")
    max_body_bytes: int = _option(4_194_304, "Largest request body; larger ones get 413.", at_least=1024)
    max_json_depth: int = _option(32, "Deepest nesting of a request body.", at_least=4, at_most=256)
    max_messages: int = _option(2048, "Most messages in one request.", at_least=1)
    max_n: int = _option(16, "Largest `n`.", at_least=1, at_most=128)
    max_stop: int = _option(16, "Most stop strings.", at_least=1, at_most=256)
    max_stop_chars: int = _option(256, "Longest stop string.", at_least=1)
    max_logprobs: int = _option(20, "Largest `top_logprobs`.", at_least=0, at_most=1000)
    max_logit_bias: int = _option(1024, "Most entries of `logit_bias`.", at_least=0)
    max_concurrency: int = _option(256, "Most requests being answered at once.", at_least=1)
    queue_limit: int = _option(512, "Most requests waiting for a place; more get 429.", at_least=0)
    request_timeout_s: float = _option(600.0, "Longest life of a request in seconds.", at_least=0.1)
    slow_client_timeout_s: float = _option(
        30.0, "A client that takes nothing for this many seconds is cut off.", at_least=0.1
    )
    keep_alive_timeout_s: float = _option(15.0, "Seconds an idle connection is kept.", at_least=0)
    drain_timeout_s: float = _option(30.0, "Seconds running requests get to finish on SIGTERM.", at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """Who may call."""

    required: AuthMode = _option(
        "auto", "`auto`: open on loopback, a key elsewhere; `always`: a key everywhere; `never`: open everywhere."
    )
    key_cache_s: float = _option(10.0, "Seconds a checked key is remembered; a revoked one lives as long.", at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConfig:
    """Shared state of several gateways; not needed for one."""

    url: str | None = _option(None, "`redis://HOST:PORT/DB`.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is written about requests, and where prompts end up."""

    format: LogFormat = _option("json", "`json`: one line a request; `console`: for reading.")
    level: LogLevel = _option("info", "Least level written.")
    prompts: Retention = _option(
        "digest", "What the decision log keeps of prompts and answers: `none`, a keyed `digest`, or the `full` text."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """What `/metrics` and `/readyz` do."""

    enabled: bool = _option(True, "Whether `/metrics` answers.")
    readiness_ttl_s: float = _option(5.0, "Seconds a tier's health check is believed.", at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """What estimates each tier's chance."""

    artifact: str = _option("none", "`builtin`, `none` (no estimates: the safe choice), or an artifact's path.")
    timeout_s: float = _option(2.0, "A prediction later than this counts as missing.", at_least=0.001)
