"""Sees what is refused on the way out, whichever page, layer or framework refused it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import orjson

from gateway.edge.responder import Send
from gateway.observe.refusal_log import OTHER, Refusal, RefusalLog

# Beyond it no error of ours goes.
_MAX_BODY_BYTES = 65_536


class RefusalWatch:
    """Stands for one request's ``send``; a response that holds our error object is noted.

    Parameters
    ----------
    send : the server's
    scope : of the request; who matched it wrote ``endpoint`` into it
    paths : endpoint -> path as routes have it, so that callers' own words become no label
    refusals : where refusals are noted
    """

    __slots__ = ("_paths", "_refusals", "_scope", "_send", "_start")

    def __init__(
        self, send: Send, scope: MutableMapping[str, Any], paths: Mapping[Any, str], refusals: RefusalLog
    ) -> None:
        self._send = send
        self._scope = scope
        self._paths = paths
        self._refusals = refusals
        self._start: MutableMapping[str, Any] | None = None

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._start = message if message["status"] >= 400 else None
        elif self._start is not None:
            start, self._start = self._start, None
            self._note(start, message.get("body", b""))
        await self._send(message)

    def _note(self, start: MutableMapping[str, Any], body: bytes) -> None:
        code = _code_of(body)
        endpoint = self._scope.get("endpoint")
        # A wrong method is refused before the endpoint sees it.
        if code is None or (getattr(endpoint, "notes_refusals", False) and start["status"] != 405):
            return
        self._refusals.note(
            Refusal(
                self._scope["method"],
                self._scope["path"],
                self._paths.get(endpoint, OTHER),
                start["status"],
                code,
                _request_id(start),
                self._scope.get("suffice.key_id"),
            )
        )


def _code_of(body: bytes) -> str | None:
    """Return the code of an error object; None of anything else, as of a probe's plain answer."""
    if len(body) > _MAX_BODY_BYTES:
        return None
    try:
        return str(orjson.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return None


def _request_id(start: MutableMapping[str, Any]) -> str | None:
    found = [value for name, value in start.get("headers", ()) if name == b"x-suffice-request-id"]
    return found[0].decode() if found else None
