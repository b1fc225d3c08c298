"""Log lines: one JSON object a line, or something to read; never a prompt, an answer or a key."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, TextIO

import orjson

from gateway.config.sections import LogConfig
from gateway.observe.log_writer import LogWriter, console_loss, json_loss, standard_error


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


class WriterHandler(logging.Handler):
    """Hands lines to a writer, which waits for nobody."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.put([self.format(record)])
        except Exception:
            self.handleError(record)


def configure_logging(config: LogConfig, stream: TextIO | None = None) -> None:
    """Send everything logged, uvicorn's lines included, to ``stream`` (standard error) in the chosen form."""
    writer = standard_error() if stream is None else LogWriter(stream)
    is_json = config.format == "json"
    writer.describe_loss = json_loss if is_json else console_loss
    handler = WriterHandler(writer)
    handler.setFormatter(JsonFormatter() if is_json else ConsoleFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    # Who connected and which statement ran is not what an operator reads at level info.
    for name in ("httpx", "httpcore", "asyncio", "aiosqlite", "sqlalchemy", "alembic", "uvicorn.access"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
