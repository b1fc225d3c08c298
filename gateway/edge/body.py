"""From the wire to a JSON object, without ever holding more than the limit or recursing without bound."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson

from gateway.api.declaration import kind_of
from gateway.edge.watchdog import Receive, Watchdog
from gateway.errors import BodyTooLarge, ClientGone, InvalidRequest, MalformedBody

# What a refused upload may still send before its connection is closed: closing at once would reset the connection
# before most clients read the answer.
_LINGER_S = 1.0
_LINGER_BYTES = 64 * 1024 * 1024


async def read_body(receive: Receive, content_length: int | None, max_bytes: int, watchdog: Watchdog) -> bytes:
    """Return the whole body.

    Raises
    ------
    BodyTooLarge
        Before anything is read where the length is announced, else as soon as ``max_bytes`` is passed.
    BodyTooSlow
        No further piece came in time.
    ClientGone
        The connection closed first.
    """
    if content_length is not None and content_length > max_bytes:
        raise BodyTooLarge(max_bytes, content_length)
    pieces: list[bytes] = []
    num_bytes = 0
    with watchdog.reading():
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("The client closed the connection before its request was complete.")
            piece: bytes = message.get("body", b"")
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise BodyTooLarge(max_bytes)
            if not message.get("more_body", False):
                return b"".join([*pieces, piece]) if pieces else piece
            pieces.append(piece)
            watchdog.waiting()


async def discard_rest(receive: Receive) -> None:
    """Take what a refused client is still sending, for a moment, so that it comes to read the refusal."""
    deadline, num_bytes = time.monotonic() + _LINGER_S, 0
    while num_bytes < _LINGER_BYTES and (left_s := deadline - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(left_s):
                message = await receive()
        except TimeoutError:
            return
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        num_bytes += len(message.get("body", b""))


def parse_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """Read a JSON object; NaN, infinities, lone surrogates and bad UTF-8 are no JSON.

    Raises
    ------
    MalformedBody
        Not JSON, or nested deeper than ``max_depth``.
    InvalidRequest
        JSON, but not an object.
    """
    if not body:
        raise MalformedBody("The request body is empty; expected a JSON object.")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedBody(f"The request body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"The request body is {kind_of(value)}; expected a JSON object.")
    # Fewer brackets than levels cannot be too deep: two memchr-fast counts spare nearly every body the walk.
    if body.count(b"{") + body.count(b"[") > max_depth and _depth(value, max_depth) > max_depth:
        raise MalformedBody(f"The request body is nested deeper than {max_depth} levels.")
    return value


def _depth(value: Any, stop_at: int) -> int:
    level, depth = [value], 0
    while level and depth <= stop_at:
        depth += 1
        children = [child for each in level for child in (each.values() if isinstance(each, dict) else each)]
        level = [child for child in children if isinstance(child, dict | list)]
    return depth
