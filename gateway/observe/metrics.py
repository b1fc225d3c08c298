"""Serves ``/metrics``: the same observations under vLLM's, OpenTelemetry's and our own names.

Observations are kept once, in plain numbers, and given their names when Prometheus asks; so a request costs no label
look-ups and dashboards made for vLLM or for ``gen_ai.*`` work unchanged. The names are listed in docs/metrics.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from backends.protocol import Load
from gateway.observe.log_writer import standard_error
from gateway.store.records import BROKEN, RequestRecord
from policies.pricing import NANO_USD_PER_USD, to_nano_usd

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

ModelKey = tuple[str, str]
"""Tier's number as text, and the served model's name."""


# Seconds: gateway work is microseconds, tokens are milliseconds, answers are minutes.
FAST_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.4, 0.8, 1.6)
ANSWER_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)


class Distribution:
    """Counts per bucket (upper bounds inclusive, the last open) and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus' form: (upper bound, how many at most that)."""
        buckets, seen = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            seen += count
            buckets.append((bound, float(seen)))
        return buckets


def observe_each(values: Iterable[tuple[Distribution, float | None]]) -> None:
    """Count one value in each distribution; None is not counted. One call for what each request adds."""
    for distribution, value in values:
        if value is not None:
            distribution.counts[bisect_left(distribution.bounds, value)] += 1
            distribution.total += value


class ModelMetrics:
    """Sums one tier's answers."""

    def __init__(self) -> None:
        self.ttft_s = Distribution(ANSWER_S)
        self.itl_s = Distribution(TOKEN_S)
        self.e2e_s = Distribution(ANSWER_S)
        self.queue_s = Distribution(ANSWER_S)
        self.input_tokens = Distribution(TOKENS)
        self.output_tokens = Distribution(TOKENS)
        self.endings: Counter[str] = Counter()
        self.cached_tokens = 0
        self.reasoning_tokens = 0
        self.draft_tokens = 0
        self.accepted_draft_tokens = 0
        self.compute_s = 0.0
        self.cost_nano_usd = 0
        self.measured_cost_nano_usd = 0

    def observe(self, record: RequestRecord) -> None:
        observe_each(
            (
                (self.e2e_s, record.total_s),
                (self.queue_s, record.queue_s),
                (self.ttft_s, record.ttft_s),
                (self.itl_s, record.itl_s),
                (self.input_tokens, record.prompt_tokens),
                (self.output_tokens, record.completion_tokens),
            )
        )
        self.endings[str(record.finish_reason)] += 1
        self.cached_tokens += record.cached_tokens
        self.reasoning_tokens += record.reasoning_tokens
        self.draft_tokens += record.draft_tokens
        self.accepted_draft_tokens += record.accepted_draft_tokens
        self.compute_s += record.compute_s or 0.0
        self.cost_nano_usd += to_nano_usd(record.cost_usd)
        if record.measured_cost_usd is not None:
            self.measured_cost_nano_usd += to_nano_usd(record.measured_cost_usd)


@dataclass(frozen=True, slots=True)
class Gauges:
    """State that is read when asked for, not counted."""

    loads: Callable[[], Mapping[ModelKey, Load]]
    num_running: Callable[[], int]
    num_waiting: Callable[[], int]
    num_pending_rows: Callable[[], int]


class MetricSource(Protocol):
    """A room that counts for itself."""

    def collect(self) -> Iterable[Metric]: ...


class Metrics(Collector):
    """Every counter of the gateway, and through ``others`` those of its rooms. Touched only from the loop's thread."""

    def __init__(self) -> None:
        self.models: dict[ModelKey, ModelMetrics] = {}
        self.decisions: Counter[tuple[str, str, str, str]] = Counter()
        self.rejected: Counter[tuple[str, str]] = Counter()
        self.failed_attempts: Counter[tuple[str, str]] = Counter()
        self.faulty_answers: Counter[tuple[str, str]] = Counter()
        self.resumed_answers: Counter[tuple[str, str]] = Counter()
        self.http: Counter[tuple[str, str]] = Counter()
        self.overhead_s = Distribution(FAST_S)
        self.routing_s = Distribution(FAST_S)
        self.commit_s = Distribution(FAST_S)
        self.gauges: Gauges | None = None
        self.others: list[MetricSource] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def observe(self, record: RequestRecord) -> None:
        """Count one committed request."""
        tier = str(record.final_tier or record.decided_tier or 0)
        key = (tier, record.model_served or "none")
        model = self.models.get(key)
        if model is None:
            model = self.models[key] = ModelMetrics()
        model.observe(record)
        self.decisions[record.endpoint, tier, record.reason, record.policy_name] += 1
        self.overhead_s.observe(record.overhead_s)
        for attempt in record.attempts:
            if attempt.error is not None:
                self.failed_attempts[str(attempt.tier), attempt.error] += 1
                if attempt.error == BROKEN and record.error_code is None:
                    self.resumed_answers[str(attempt.tier), tier] += 1

    def reject(self, endpoint: str, code: str) -> None:
        """Count one request that ended without a row: refused before it was admitted."""
        self.rejected[endpoint, code] += 1

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        yield from self._per_model()
        yield from self._own()
        if self.gauges is not None:
            yield from self._now(self.gauges)
        for other in self.others:
            yield from other.collect()

    def _per_model(self) -> Iterable[Metric]:
        for names, help_text, pick in _HISTOGRAMS:
            for name in names:
                yield self._histogram(name, help_text, pick)
        yield self._token_usage()
        for name, help_text, amount in _COUNTERS:
            family = CounterMetricFamily(name, help_text, labels=_MODEL_LABELS)
            for key, model in self.models.items():
                family.add_metric(key, amount(model))
            yield family
        endings = CounterMetricFamily(
            "vllm:request_success", "Requests by how they ended.", labels=[*_MODEL_LABELS, "finished_reason"]
        )
        for key, model in self.models.items():
            for reason, count in model.endings.items():
                endings.add_metric([*key, reason], count)
        yield endings

    def _histogram(self, name: str, help_text: str, pick: Callable[[ModelMetrics], Distribution]) -> Metric:
        is_otel = name.startswith("gen_ai")
        labels = _OTEL_LABELS if is_otel else _MODEL_LABELS
        family = HistogramMetricFamily(name, help_text, labels=labels)
        for (tier, model), each in self.models.items():
            values = _otel_values(tier, model) if is_otel else [tier, model]
            _add(family, values, pick(each))
        return family

    def _token_usage(self) -> Metric:
        family = HistogramMetricFamily(
            "gen_ai_client_token_usage", "Tokens per request.", labels=[*_OTEL_LABELS, "gen_ai_token_type"]
        )
        for (tier, model), each in self.models.items():
            _add(family, [*_otel_values(tier, model), "input"], each.input_tokens)
            _add(family, [*_otel_values(tier, model), "output"], each.output_tokens)
        return family

    def _own(self) -> Iterable[Metric]:
        yield _counter(
            "suffice_decisions", "Admitted requests.", ["endpoint", "tier", "reason", "policy"], self.decisions
        )
        yield _counter("suffice_rejected", "Requests refused before admission.", ["endpoint", "code"], self.rejected)
        yield _counter(
            "suffice_failed_attempts",
            "Tries whose answer was not sent.",
            ["tier", "error"],
            self.failed_attempts,
        )
        yield _counter(
            "suffice_faulty_answers",
            "Answers sent that broke what their request asks of calls or form.",
            ["tier", "fault"],
            self.faulty_answers,
        )
        yield _counter(
            "suffice_resumed_answers",
            "Answers that broke off at a tier and were gone on with to their end.",
            ["broken_tier", "tier"],
            self.resumed_answers,
        )
        yield CounterMetricFamily(
            "suffice_log_lines_dropped", "Log lines that nobody read in time.", value=standard_error().num_dropped
        )
        yield _counter("suffice_http_responses", "Responses by status.", ["endpoint", "status"], self.http)
        for name, help_text, distribution in (
            ("suffice_overhead_seconds", "The gateway's own time before a tier was asked.", self.overhead_s),
            ("suffice_routing_seconds", "Estimating and deciding.", self.routing_s),
            ("suffice_commit_seconds", "Waiting for the log row's commit.", self.commit_s),
        ):
            family = HistogramMetricFamily(name, help_text)
            _add(family, [], distribution)
            yield family

    def _now(self, gauges: Gauges) -> Iterable[Metric]:
        loads = gauges.loads()
        for name, help_text, read in _GAUGES:
            family = GaugeMetricFamily(name, help_text, labels=_MODEL_LABELS)
            for key, load in loads.items():
                family.add_metric(key, read(load))
            yield family
        odd = CounterMetricFamily(
            "suffice_remote_oddities",
            "Answers of remote servers that were mended here.",
            labels=[*_MODEL_LABELS, "kind"],
        )
        for key, load in loads.items():
            odd.add_metric([*key, "too_long"], load.num_cut)
            odd.add_metric([*key, "bad_usage"], load.num_bad_usage)
        yield odd
        yield GaugeMetricFamily("suffice_requests_running", "Requests holding a place.", gauges.num_running())
        yield GaugeMetricFamily("suffice_requests_waiting", "Requests waiting for a place.", gauges.num_waiting())
        yield GaugeMetricFamily("suffice_log_pending_rows", "Rows waiting for commit.", gauges.num_pending_rows())


_MODEL_LABELS = ["tier", "model_name"]
_OTEL_LABELS = ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_response_model", "tier"]

_HISTOGRAMS: Sequence[tuple[tuple[str, ...], str, Callable[[ModelMetrics], Distribution]]] = (
    (
        ("vllm:time_to_first_token_seconds", "gen_ai_server_time_to_first_token_seconds"),
        "Request accepted to first token.",
        lambda each: each.ttft_s,
    ),
    (
        ("vllm:inter_token_latency_seconds", "gen_ai_server_time_per_output_token_seconds"),
        "Mean gap between two tokens of a request.",
        lambda each: each.itl_s,
    ),
    (
        ("vllm:e2e_request_latency_seconds", "gen_ai_server_request_duration_seconds"),
        "Request accepted to ended.",
        lambda each: each.e2e_s,
    ),
    (("vllm:request_queue_time_seconds",), "Waiting for a place in the engine.", lambda each: each.queue_s),
    (("vllm:request_prompt_tokens",), "Prompt tokens per request.", lambda each: each.input_tokens),
    (("vllm:request_generation_tokens",), "Completion tokens per request.", lambda each: each.output_tokens),
)

_COUNTERS: Sequence[tuple[str, str, Callable[[ModelMetrics], float]]] = (
    ("vllm:prompt_tokens", "Prompt tokens.", lambda each: each.input_tokens.total),
    ("vllm:generation_tokens", "Completion tokens.", lambda each: each.output_tokens.total),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda each: each.input_tokens.total),
    ("vllm:prefix_cache_hits", "Prompt tokens found there.", lambda each: each.cached_tokens),
    ("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", lambda each: each.draft_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted.", lambda each: each.accepted_draft_tokens),
    ("suffice_reasoning_tokens", "Completion tokens spent thinking.", lambda each: each.reasoning_tokens),
    ("suffice_compute_seconds", "Device seconds, where measured.", lambda each: each.compute_s),
    ("suffice_cost_usd", "Cost by the price table.", lambda each: each.cost_nano_usd / NANO_USD_PER_USD),
    (
        "suffice_measured_cost_usd",
        "Cost by device seconds, where measured.",
        lambda each: each.measured_cost_nano_usd / NANO_USD_PER_USD,
    ),
)

_GAUGES: Sequence[tuple[str, str, Callable[[Load], float]]] = (
    ("vllm:num_requests_running", "Requests in the engine's batch.", lambda load: load.running),
    ("vllm:num_requests_waiting", "Requests waiting in the engine.", lambda load: load.waiting),
    ("vllm:kv_cache_usage_perc", "Used share of KV blocks, 1 is full.", lambda load: 1.0 - load.kv_free_fraction),
    ("suffice_acceptance_rate", "Recent share of drafts accepted.", lambda load: load.acceptance_rate or 0.0),
)


def _otel_values(tier: str, model: str) -> list[str]:
    return ["chat", "suffice", model, tier]


def _add(family: HistogramMetricFamily, labels: Sequence[str], distribution: Distribution) -> None:
    family.add_metric(labels, distribution.cumulative(), distribution.total)


def _counter(name: str, help_text: str, labels: Sequence[str], counts: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=labels)
    for key, count in counts.items():
        family.add_metric(key, count)
    return family
