"""Sends bytes as they are and keeps every byte of the answer: no library smooths over what a server does."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

READ_TIMEOUT_S = 60.0

Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Response:
    """One response. ``is_whole`` is False where the connection ended before the body did."""

    status: int
    reason: str
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    is_whole: bool = True

    def header(self, name: str) -> str:
        """Return the first header of this name, empty where there is none."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    def json(self) -> Any:
        return json.loads(self.body)


def request_bytes(
    method: str, path: str, *, json_body: Any = None, content: bytes | None = None, headers: Headers = ()
) -> bytes:
    """Return a whole HTTP/1.1 request after whose answer the server closes."""
    given = {name.lower() for name, _ in headers}
    if json_body is not None:
        content = json.dumps(json_body, ensure_ascii=False, separators=(",", ":")).encode()
    lines = [f"{method} {path} HTTP/1.1"]
    if "host" not in given:
        lines.append("host: localhost")
    if "connection" not in given:
        lines.append("connection: close")
    if json_body is not None and "content-type" not in given:
        lines.append("content-type: application/json")
    if content is not None and not given & {"content-length", "transfer-encoding"}:
        lines.append(f"content-length: {len(content)}")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (content or b"")


def exchange(port: int, parts: Sequence[bytes], *, pause_s: float = 0.0) -> bytes:
    """Send parts one by one on a fresh connection; return all that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=READ_TIMEOUT_S) as connection:
        try:
            for place, part in enumerate(parts):
                if place:
                    time.sleep(pause_s)
                connection.sendall(part)
        except ConnectionError:
            # It closed before it had read all; what it said until then can still be read.
            pass
        return _read_all(connection)


def _read_all(connection: socket.socket) -> bytes:
    pieces = []
    try:
        while piece := connection.recv(65_536):
            pieces.append(piece)
    except ConnectionError:
        pass
    return b"".join(pieces)


def parse_responses(content: bytes, methods: Sequence[str]) -> list[Response]:
    """Split what came over one connection; ``methods`` are those of the requests, in order."""
    found: list[Response] = []
    asked = list(methods)
    while content:
        head, separator, rest = content.partition(b"\r\n\r\n")
        if not separator:
            found.append(Response(0, "no whole head", body=content, is_whole=False))
            break
        first, *lines = head.decode("latin-1").split("\r\n")
        _, _, status_line = first.partition(" ")
        status, _, reason = status_line.partition(" ")
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        response = Response(int(status), reason, headers)
        is_interim = response.status < 200
        method = "GET" if is_interim or not asked else asked.pop(0)
        body, is_whole, content = _cut_body(response, method, rest)
        found.append(Response(response.status, reason, headers, body, is_whole))
    return found


def _cut_body(response: Response, method: str, content: bytes) -> tuple[bytes, bool, bytes]:
    """Return the body, whether it is whole, and what follows it."""
    if method == "HEAD" or response.status < 200 or response.status in (204, 304):
        return b"", True, content
    if response.header("transfer-encoding").lower() == "chunked":
        return _cut_chunks(content)
    length = response.header("content-length")
    if not length:
        return content, True, b""
    return content[: int(length)], len(content) >= int(length), content[int(length) :]


def _cut_chunks(content: bytes) -> tuple[bytes, bool, bytes]:
    body = b""
    while True:
        line, separator, rest = content.partition(b"\r\n")
        if not separator:
            return body, False, b""
        size = int(line.split(b";")[0], 16)
        if size == 0:
            return body, rest[:2] == b"\r\n", rest[2:]
        body += rest[:size]
        if len(rest) < size + 2:
            return body, False, b""
        content = rest[size + 2 :]


def merge_headers(*many: Mapping[str, str] | Headers) -> list[tuple[str, str]]:
    """Return headers one after another; a name may come twice, as on the wire."""
    return [pair for each in many for pair in (each.items() if isinstance(each, Mapping) else each)]
