# ruff: noqa: RUF009 - option returns a dataclasses.field
"""Declares the gateway's settings, section by section. Every option carries its meaning and its limits as data."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from backends.config import device_key, option
from backends.errors import InvalidConfig

AuthMode = Literal["auto", "always", "never"]
LogFormat = Literal["json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]
Retention = Literal["none", "digest", "full"]
KeptResponses = Literal["off", "asked", "all"]
VerificationMethod = Literal["auto", "generate", "score"]
GraderName = Literal["final_answer", "overlap", "embedding", "likelihood", "judge"]

_HOST_NAME = re.compile(r"\[[0-9a-fA-F:.]+\]|[0-9A-Za-z._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Sets where the gateway listens and how much it takes."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", at_least=0, at_most=65535)
    root_path: str = option("", "Path prefix a reverse proxy strips, such as `/suffice`.")
    cors_origins: tuple[str, ...] = option((), "Origins that browsers may call from; `*` for all.")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Names beside those of loopback that a request without a key may call an open server by (`Host`, no port); "
        'with `auth.required = "never"` none listed means any.',
    )
    trusted_proxies: tuple[str, ...] = option(
        (),
        "Addresses or networks of proxies whose `X-Forwarded-For` names the caller in the audit log; with any, no "
        "request is let in for coming from this machine.",
    )
    share_prefix_cache: bool = option(
        False,
        "Whether tenants read each other's prefixes from the KV cache; `cached_tokens` and the time to the first token "
        "then tell what others have sent.",
    )
    max_body_bytes: int = option(4_194_304, "Largest request body; larger ones get 413.", at_least=1024)
    max_body_bytes_in_flight: int = option(
        134_217_728,
        "Most bytes of bodies being read or answered; more get 429. A body of the largest size always fits.",
        at_least=0,
    )
    max_body_bytes_in_flight_per_key: int = option(33_554_432, "Likewise of one key.", at_least=0)
    body_timeout_s: float = option(60.0, "Seconds in which a body must be whole.", at_least=0.1)
    max_connections: int = option(
        4096, "Most open connections; a new one then takes the place of the longest idle.", at_least=1
    )
    max_json_depth: int = option(32, "Deepest nesting of a request body.", at_least=4, at_most=256)
    max_messages: int = option(2048, "Most messages in one request.", at_least=1)
    max_tools: int = option(512, "Most tools of one request.", at_least=1)
    max_n: int = option(16, "Largest `n`.", at_least=1, at_most=128)
    max_stop: int = option(16, "Most stop strings.", at_least=1, at_most=256)
    max_stop_chars: int = option(256, "Longest stop string.", at_least=1)
    max_logprobs: int = option(20, "Largest `top_logprobs`.", at_least=0, at_most=1000)
    max_logit_bias: int = option(1024, "Most entries of `logit_bias`.", at_least=0)
    max_concurrency: int | None = option(
        None,
        "Most requests being answered at once over all models; by default as many as the models take together.",
        at_least=1,
    )
    conversation_ttl_s: float = option(
        86_400.0, "What a conversation stands at is forgotten when it rests longer.", at_least=1
    )
    queue_limit: int = option(1024, "Most requests waiting for a place; more get 429.", at_least=0)
    max_queue_s: float = option(
        5.0,
        "Longest queue before a model, in seconds that it takes to serve it, or as long as a request holds its place "
        "if that is longer; what would make it longer gets 429.",
        at_least=0,
    )
    request_timeout_s: float = option(
        600.0, "Longest life of a request in seconds, from the end of its head to the end of its answer.", at_least=0.1
    )
    slow_client_timeout_s: float = option(
        30.0, "A client that takes nothing for this many seconds is cut off.", at_least=0.1
    )
    sse_ping_s: float = option(
        15.0,
        "Seconds of silence after which a stream is sent a comment that clients skip, its head with the first; 0 sends "
        "none.",
        at_least=0,
    )
    keep_alive_timeout_s: float = option(
        75.0,
        "Seconds an idle connection is kept; longer than a load balancer keeps its own, of which 60 is common.",
        at_least=0,
    )
    lame_duck_s: float = option(
        5.0,
        "Seconds after SIGTERM in which `/readyz` says that the server is leaving while it still takes requests. "
        "Ctrl-C does not wait.",
        at_least=0,
    )
    drain_timeout_s: float = option(30.0, "Seconds running requests get to finish on SIGTERM.", at_least=0)

    def __post_init__(self) -> None:
        for each in self.allowed_hosts:
            if not _HOST_NAME.fullmatch(each):
                raise InvalidConfig("allowed_hosts", each, "names or addresses, without scheme and port")
        for each in self.trusted_proxies:
            try:
                ipaddress.ip_network(each)
            except ValueError:
                raise InvalidConfig("trusted_proxies", each, "addresses, or networks such as 10.0.0.0/8") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """Sets who may call."""

    required: AuthMode = option(
        "auto",
        "`auto`: open on loopback to what comes straight from this machine, a key elsewhere; `always`: a key "
        "everywhere; `never`: open to whoever can connect.",
    )
    key_cache_s: float = option(10.0, "Seconds a checked key is remembered; a revoked one lives as long.", at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingConfig:
    """Prices the vectors of one served model."""

    price_per_token_usd: Decimal = option(
        Decimal(0), "Price of a token that is read for its vector; without the table that of its tier.", at_least=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConfig:
    """Names the state that several gateways share; one gateway needs none."""

    url: str | None = option(None, "`redis://HOST:PORT/DB`.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Sets what is written about requests, and what is kept of prompts."""

    format: LogFormat = option("json", "`json`: one line a request; `console`: for reading.")
    level: LogLevel = option("info", "Least level written.")
    prompts: Retention = option(
        "digest", "What the decision log keeps of prompts and answers: `none`, a keyed `digest`, or the `full` text."
    )
    texts_days: float | None = option(
        None, "Texts older than this many days are deleted; without it none are.", at_least=0
    )
    responses: KeptResponses = option(
        "asked",
        "Answers of `/v1/responses` that are kept, to be read and gone on from: of requests with `store: true` "
        "(`asked`), of those without `store` too, as at OpenAI (`all`), or of none (`off`, as with `prompts` `none`).",
    )
    responses_days: float | None = option(
        30.0, "Kept responses older than this are deleted; `texts_days` deletes them too.", at_least=0
    )
    rows_days: float | None = option(
        None, "Rows of the log older than this are deleted, with all that hangs on them.", at_least=0
    )
    sessions_days: float | None = option(None, "Conversations that rest longer than this start anew.", at_least=0)
    history_days: float | None = option(
        None,
        "What is older than this is deleted of the audit log, resolved alerts, evaluations, ended retrains and "
        "rollouts, and routers out of use.",
        at_least=0,
    )

    @property
    def keeps_responses(self) -> bool:
        """Return whether any response may be kept: not where nothing of a text is."""
        return self.responses != "off" and self.prompts != "none"

    @property
    def readable_days(self) -> float | None:
        """Return how long a kept response may be read, whether or not it was deleted yet; for ever when None."""
        return min((each for each in (self.responses_days, self.texts_days) if each is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Sets what `/metrics` and `/readyz` do."""

    enabled: bool = option(True, "Whether `/metrics` answers.")
    public: bool = option(
        False, "Whether `/metrics`, and what `/readyz` says beside its status, need no key where keys are asked for."
    )
    readiness_ttl_s: float = option(5.0, "Seconds a tier's health check is believed.", at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Names the router, which estimates each tier's chance of a good answer."""

    artifact: str = option("none", "`builtin`, `none` (no estimates: the safe choice), or an artifact's path.")
    timeout_s: float = option(2.0, "A prediction later than this counts as missing.", at_least=0.001)

    @property
    def source(self) -> str | None:
        """Return what names the router, ``builtin`` or a path; None where nothing estimates."""
        return None if self.artifact == "none" else self.artifact


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminConfig:
    """Sets the limits of the administration, `/admin/v1`."""

    enabled: bool = option(True, "Whether it answers at all.")
    max_body_bytes: int = option(1_048_576, "Largest body; larger ones get 413.", at_least=1024)
    max_artifact_bytes: int = option(67_108_864, "Largest router that may be uploaded.", at_least=1024)
    what_if_max_rows: int = option(20_000, "Most rows of the log that a what-if reads.", at_least=1)
    what_if_timeout_s: float = option(20.0, "A what-if ends after this long with what it has read.", at_least=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationConfig:
    """Sets how sampled answers are verified in the background."""

    enabled: bool = option(True, "Whether answers are sampled at all; how many is the policy's `sampling_share`.")
    worker: bool = option(True, "Whether this server checks them itself; else `suffice verify-worker` does.")
    method: VerificationMethod = option(
        "auto",
        "`generate`: the top tier answers too, and both are compared; `score`: it only reads the cheap answer; "
        "`auto`: generates while the budget allows, else reads.",
    )
    graders: tuple[GraderName, ...] = option(
        ("final_answer", "overlap", "likelihood"), "What looks at a pair of answers."
    )
    combination: str = option("builtin", "What makes one probability of the graders' scores: `builtin`, or a file.")
    max_cost_share: float = option(
        0.05, "Most of what serving cost in the same hour that checks may cost.", at_least=0, at_most=10
    )
    max_usd_per_hour: float | None = option(None, "Most dollars an hour for checks.", at_least=0)
    max_usd_per_day: float | None = option(None, "Most dollars a day for checks.", at_least=0)
    max_compute_s_per_hour: float | None = option(None, "Most device seconds an hour for checks.", at_least=0)
    max_compute_s_per_day: float | None = option(None, "Most device seconds a day for checks.", at_least=0)
    allowance_usd: float = option(
        0.001, "Dollars an hour that checks may cost however little was served, within the other limits.", at_least=0
    )
    concurrency: int = option(1, "Most checks at once in one process.", at_least=1, at_most=64)
    max_live_requests: int = option(4, "No check begins while more live requests than this are answered.", at_least=0)
    overdue_s: float = option(
        600.0, "A check that has waited longer than this begins beside any number of them, but not while one waits."
    )
    poll_s: float = option(0.5, "Seconds between two looks for work and for waiting requests.", at_least=0.01)
    lease_s: float = option(60.0, "Seconds after which the job of a worker that died is taken by another.", at_least=1)
    max_attempts: int = option(5, "Tries before a job counts as failed.", at_least=1)
    retry_base_s: float = option(5.0, "Seconds before the second try; doubled with each further one.", at_least=0)
    max_age_s: float = option(86_400.0, "A job older than this is given up.", at_least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    """Sets how servers agree on the active settings, and how a new router is rolled out."""

    poll_s: float = option(
        0.5, "Seconds between two looks for changes; with Redis they are heard of sooner.", at_least=0.05, at_most=10
    )
    lease_s: float = option(10.0, "Seconds after which a leader that died is followed by another.", at_least=1)
    shadow_share: float = option(
        0.25,
        "Share of requests that a shadow router predicts for as well; those sampled for a check it always does.",
        at_least=0,
        at_most=1,
    )
    rollout_every_s: float = option(5.0, "Seconds between two looks at a rollout.", at_least=0.05)
    rollout_shares: tuple[float, ...] = option(
        (0.1, 0.5, 1.0), "Shares of sticky keys that a canary router serves, stage by stage."
    )
    rollout_min_stage_s: float = option(3600.0, "Least seconds in each stage.", at_least=0)
    rollout_max_stage_s: float = option(
        604_800.0,
        "A stage that has too few checked answers, or in shadow too few decisions, after this many seconds is rolled "
        "back.",
        at_least=1,
    )
    rollout_checks: float = option(
        4.0,
        "Checks of a canary router at every stage, as a multiple of those that all traffic has.",
        at_least=0,
        at_most=100,
    )
    rollout_min_shadow_decisions: int = option(100, "Least shadow decisions before it serves any.", at_least=0)
    rollout_min_checked: int = option(50, "Least checked answers that tell of it in each canary stage.", at_least=0)

    def __post_init__(self) -> None:
        shares = self.rollout_shares
        is_rising = all(low < high for low, high in zip((0.0, *shares), shares, strict=False))
        if not shares or not is_rising or shares[-1] != 1.0:
            raise InvalidConfig("rollout_shares", shares, "rising shares above 0 that end at 1")
        if self.rollout_max_stage_s < self.rollout_min_stage_s:
            raise InvalidConfig("rollout_max_stage_s", self.rollout_max_stage_s, "at least rollout_min_stage_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """Sets how floor, drift and tenants are monitored."""

    enabled: bool = option(True, "Whether the leader monitors; reports can be had in any case.")
    every_s: float = option(30.0, "Seconds between two looks.", at_least=0.05)
    act: bool = option(True, "Whether it moves traffic up and asks for a retrain, or only reports and alerts.")
    window_days: float = option(28.0, "Days of checked answers that a certificate rests on.", at_least=0.01)
    min_checked: int = option(50, "Checked answers before anything is concluded against a tier.", at_least=1)
    min_gold: int = option(
        20,
        "Known faults and known sound answers, each, before verdicts are corrected for the grader's errors.",
        at_least=1,
    )
    drift_in_order: float = option(
        0.1, "Rate of needed upgrades among checked answers that is in order; at least what the floor permits."
    )
    drift_risen: float = option(0.2, "Rate that is to be noticed.")
    false_alarm: float = option(
        0.05, "Probability of ever raising a drift alarm while all is in order, over all views together."
    )
    tenant_baseline: int = option(200, "Decisions of a tenant that make its baseline.", at_least=1)
    tenant_min_rise: float = option(
        0.1, "Rise of a tenant's share of the top tier that is no cause for an alert.", at_least=0, at_most=0.9
    )

    def __post_init__(self) -> None:
        if not 0.0 < self.drift_in_order < 1.0:
            raise InvalidConfig("drift_in_order", self.drift_in_order, "a rate between 0 and 1")
        if not self.drift_in_order < self.drift_risen <= 1.0:
            raise InvalidConfig("drift_risen", self.drift_risen, "a rate above drift_in_order, at most 1")
        if not 0.0 < self.false_alarm < 1.0:
            raise InvalidConfig("false_alarm", self.false_alarm, "a probability between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningConfig:
    """Sets how the router is retrained from the log."""

    enabled: bool = option(True, "Whether this server's leader retrains, by the week and when asked.")
    every_days: float = option(7.0, "Days between two retrains; 0 retrains only when asked.", at_least=0)
    look_every_s: float = option(10.0, "Seconds between two looks for a retrain that is due.", at_least=0.05)
    window_days: float = option(28.0, "Days of the log that are learnt from.", at_least=0.01)
    min_labels: int = option(200, "Checked answers before anything is learnt.", at_least=40)
    judge_share: float = option(
        0.3, "Share of the checked answers, the newest, that candidates are judged on.", at_least=0.05, at_most=0.8
    )
    max_checked_rows: int = option(100_000, "Checked requests read; beyond that a sample of them.", at_least=100)
    max_unchecked_rows: int = option(30_000, "Other requests read; beyond that a sample of them.", at_least=100)
    encoder: str = option(
        "",
        "A sentence-transformers model, by folder or id, that routers fitted anew from kept texts may read as well: as "
        "it is, and fine-tuned on the checked answers.",
    )
    encoder_tuning_s: float = option(
        900.0, "Seconds the encoder may be fine-tuned in a retrain; 0 leaves it as it is.", at_least=0
    )
    encoder_steps: int = option(1000, "Batches of 16 prompts it is fine-tuned on, at most.", at_least=1)
    encoder_learning_rate: float = option(5e-5, "Step size of its fine-tuning (AdamW).", at_least=1e-7, at_most=0.1)
    encoder_device: str = option(
        "cpu", "Where a retrain reads and fine-tunes it: `cpu`, `cuda` or `cuda:N`. It serves on the CPU."
    )
    quality_value_usd: Decimal | None = option(
        None,
        "What a point of quality, 0 to 1, is worth in dollars a request when routers are compared; by default as the "
        "policy or its router says, else 20 times what the top tier costs more than the cheapest.",
        at_least=0,
    )
    max_quality_loss: float = option(0.01, "Quality that a new router may give up for cost.", at_least=0, at_most=1)
    confidence: float = option(
        0.95, "Confidence, one-sided, that a promoted router is better.", at_least=0.5, at_most=0.999
    )
    min_effective_rows: float = option(
        100.0, "Least effective requests on which the log agrees with a candidate.", at_least=2
    )
    lease_s: float = option(60.0, "Seconds after which a retrain that died counts as abandoned.", at_least=0.5)
    timeout_s: float = option(7200.0, "A retrain that takes longer is ended.", at_least=1)
    nice: int = option(10, "Niceness of the process that retrains.", at_least=0, at_most=19)

    def __post_init__(self) -> None:
        if device_key(self.encoder_device) is None:
            raise InvalidConfig("encoder_device", self.encoder_device, "cpu, cuda or cuda:N")
        if self.encoder and self.encoder_tuning_s >= self.timeout_s:
            raise InvalidConfig(
                "encoder_tuning_s", self.encoder_tuning_s, "less than timeout_s, which ends the retrain"
            )
