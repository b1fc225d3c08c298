"""Sends a corpus to servers of a tree, and writes down what they answer."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.backends.provider.server import ProviderServer
from tests.replay.normaliser import Normaliser
from tests.replay.server_process import ServerProcess
from tests.replay.wire_client import Headers, Response, exchange, merge_headers, parse_responses, request_bytes

_SHOWN_CHARS = 300


class Recorder:
    """Plays requests to one server and keeps each exchange under a name of its own."""

    def __init__(self, scenario: Scenario, server: ServerProcess) -> None:
        self.server = server
        self.records: list[dict[str, Any]] = []
        self._scenario = scenario
        self._num_named: Counter[str] = Counter()

    def call(
        self,
        method: str,
        path: str,
        json_body: Any = None,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] | Headers = (),
        name: str = "",
        is_kept: bool = True,
    ) -> Response:
        """Send one request; return its final response as it came. ``is_kept`` False leaves no record of it."""
        sent = request_bytes(method, path, json_body=json_body, content=content, headers=merge_headers(headers))
        responses = parse_responses(exchange(self.server.port, [sent]), [method])
        if is_kept:
            is_key_version = "/keys/" in path
            told = [
                (key, "<etag>" if is_key_version and key == "if-match" else each)
                for key, each in merge_headers(headers)
            ]
            shown = {"method": method, "path": path, "headers": told, "body": json_body}
            if content is not None:
                shown["body"] = content.decode("utf-8", "backslashreplace")
            self._keep(name or f"{method} {path}", shown, responses)
        return responses[-1] if responses else Response(0, "no answer")

    def raw(self, name: str, parts: Sequence[bytes], methods: Sequence[str] = ("GET",), *, pause_s: float = 0) -> None:
        """Send bytes as they are."""
        shown = {"raw": [part.decode("latin-1") for part in parts]}
        answer = exchange(self.server.port, parts, pause_s=pause_s)
        self._keep(name, shown, parse_responses(answer, methods))

    def until(self, method: str, path: str, holds: Callable[[Any], bool]) -> None:
        """Ask again and again until the answer satisfies ``holds``, without keeping a record."""
        deadline = time.monotonic() + 60
        while not holds(self.call(method, path, is_kept=False).json()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{method} {path} never became what the corpus waits for")
            time.sleep(0.1)

    def _keep(self, name: str, request: dict[str, Any], responses: Sequence[Response]) -> None:
        self._num_named[name] += 1
        if self._num_named[name] > 1:
            name = f"{name} #{self._num_named[name]}"
        normaliser = Normaliser(joins_deltas=self._scenario.joins_deltas)
        answers = [normaliser.response(each) for each in responses]
        shown = normaliser.value(_shorten(request))
        self.records.append({"scenario": self._scenario.name, "name": name, "request": shown, "responses": answers})


def _shorten(value: Any) -> Any:
    """Return a request without the length of its long texts: only its beginning is for people."""
    if isinstance(value, dict):
        return {name[:_SHOWN_CHARS]: _shorten(each) for name, each in list(value.items())[:50]}
    if isinstance(value, list | tuple):
        return [_shorten(each) for each in value[:20]]
    if isinstance(value, str) and len(value) > _SHOWN_CHARS:
        return f"{value[:_SHOWN_CHARS]}… ({len(value)} characters)"
    return value


@dataclass(frozen=True)
class Scenario:
    """A server's configuration and what is asked of it. ``UPSTREAM`` in it is the provider's base URL.

    ``commands`` run before the server starts; what each prints is given to ``play``.
    ``joins_deltas`` is said where models answer over a network, see :class:`tests.replay.normaliser.Normaliser`.
    """

    name: str
    config: str
    play: Callable[..., None]
    commands: tuple[tuple[str, ...], ...] = ()
    joins_deltas: bool = False


def record(tree: Path, scenarios: Sequence[Scenario]) -> list[dict[str, Any]]:
    """Return the exchanges of all scenarios with servers of ``tree``, in order."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="suffice-replay-")))
        provider = stack.enter_context(ProviderServer())
        servers = []
        printed = []
        for each in scenarios:
            config = each.config.replace("UPSTREAM", f"http://127.0.0.1:{provider.port}")
            server = ServerProcess(tree, folder / each.name, config)
            stack.callback(server.close)
            printed.append([server.run(*command) for command in each.commands])
            server.start()
            servers.append(server)
        records: list[dict[str, Any]] = []
        for each, server, outputs in zip(scenarios, servers, printed, strict=True):
            server.wait()
            recorder = Recorder(each, server)
            each.play(recorder, *outputs)
            records += recorder.records
    return records


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write one exchange a line."""
    path.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records))
