"""Log lines: one JSON object a line, or something to read; never a prompt, an answer or a key."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

import orjson

from gateway.config.sections import LogConfig


class JsonFormatter(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


class ConsoleFormatter(logging.Formatter):
    """A short line for people."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        text = f"{moment} {record.levelname.lower()} {record.name} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def configure_logging(config: LogConfig, stream: TextIO | None = None) -> None:
    """Send everything logged, uvicorn's lines included, to ``stream`` (standard error) in the chosen form."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if config.format == "json" else ConsoleFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    # Who connected and which statement ran is not what an operator reads at level info.
    for name in ("httpx", "httpcore", "asyncio", "aiosqlite", "sqlalchemy", "alembic", "uvicorn.access"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
