"""The one line of each request: what happened, in figures; nothing that the caller or the model wrote."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from gateway.config.sections import LogConfig
from gateway.observe.log_writer import LogWriter, standard_error
from gateway.store.records import RequestRecord

_ON_CONSOLE = (
    *("tier", "model", "reason", "ending", "error", "prompt_tokens", "completion_tokens", "cost_usd", "ttft_s"),
    "request_id",
)


class RequestLog:
    """Writes to standard error, as the other log lines do; lines of one turn of the event loop are handed on together.

    Not by way of ``logging``: a record, its locks and a flush per line cost several times the line itself.

    Parameters
    ----------
    config : ``format`` as everywhere; nothing is written above level ``info``
    writer : None for standard error's
    """

    def __init__(self, config: LogConfig, writer: LogWriter | None = None) -> None:
        self._format = _json_line if config.format == "json" else _console_line
        self._is_on = config.level in ("debug", "info")
        self._writer = writer or standard_error()
        self._lines: list[str] = []

    def write(self, record: RequestRecord) -> None:
        """Queue a request's line."""
        if not self._is_on:
            return
        if not self._lines:
            asyncio.get_running_loop().call_soon(self.flush)
        self._lines.append(self._format(record))

    def flush(self) -> None:
        """Hand on what is queued."""
        lines, self._lines = self._lines, []
        self._writer.put(lines)


def _json_line(record: RequestRecord) -> str:
    line = {"time": record.created_at, "level": "info", "logger": "suffice.request", "message": "request"}
    return orjson.dumps(line | log_fields(record), option=orjson.OPT_UTC_Z).decode()


def _console_line(record: RequestRecord) -> str:
    fields = log_fields(record)
    shown = [f"{name}={fields[name]}" for name in _ON_CONSOLE if fields[name] is not None]
    return " ".join([record.created_at.astimezone().strftime("%H:%M:%S"), record.endpoint, *shown])


def log_fields(record: RequestRecord) -> dict[str, Any]:
    """Return what the one log line of a request says; nothing the caller wrote is in it."""
    return {
        "request_id": record.request_id,
        "endpoint": record.endpoint,
        "tenant": record.tenant,
        "key_id": record.key_id,
        "status": record.status_code,
        "ending": str(record.finish_reason),
        "error": record.error_code,
        "tier": record.final_tier,
        "decided_tier": record.decided_tier,
        "model": record.model_served,
        "reason": record.reason,
        "propensity": record.propensity,
        "confidence": record.confidence,
        "policy": record.policy_name,
        "policy_version": record.policy_version,
        "router_version": record.router_version,
        "attempts": len(record.attempts),
        "stream": record.stream,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cost_usd": str(record.cost_usd),
        "compute_s": record.compute_s,
        "ttft_s": record.ttft_s,
        "itl_s": record.itl_s,
        "total_s": record.total_s,
        "overhead_s": record.overhead_s,
        "traceparent": record.traceparent,
    }
