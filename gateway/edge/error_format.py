"""Formats errors as the protocol of a path has them; what is told and its status are the one error table's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

ErrorBody = Callable[[Mapping[str, Any], int, str], dict[str, Any]]
"""OpenAI's members of an error, the status, the request's id -> the body."""


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How one protocol words errors. ``id_header`` is the header in which its clients look for a request's id."""

    body: ErrorBody
    id_header: bytes

    def id_headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        """Return the headers that carry a request's id."""
        value = request_id.encode()
        return [(b"x-suffice-request-id", value), (self.id_header, value)]


def _openai_body(told: Mapping[str, Any], status: int, request_id: str) -> dict[str, Any]:
    return {"error": told}


# Status -> Anthropic's type; others are the request's fault or the server's.
_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# By this Anthropic's packages know that they must send the whole conversation themselves, and do.
_NO_THREADS: Mapping[str, Any] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def _anthropic_body(told: Mapping[str, Any], status: int, request_id: str) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    # Beside Anthropic's members the code, and the field where one is to blame: clients of ours go by them.
    error = {"type": kind, "message": told["message"], "code": told["code"]}
    if told["param"] is not None:
        error["param"] = told["param"]
    if told["param"] == "thread":
        error["details"] = _NO_THREADS
    return {"type": "error", "error": error, "request_id": request_id}


OPENAI = ErrorFormat(_openai_body, b"x-request-id")
ANTHROPIC = ErrorFormat(_anthropic_body, b"request-id")
_MESSAGES = "/v1/messages"


@lru_cache(64)
def error_format(path: str) -> ErrorFormat:
    """Return the format of a path and of all below it."""
    return ANTHROPIC if path == _MESSAGES or path.startswith(_MESSAGES + "/") else OPENAI


def request_format(scope: Mapping[str, Any]) -> ErrorFormat:
    """Return the format of a request's path; its server puts the prefix back that a proxy had cut off."""
    return error_format(scope["path"].removeprefix(scope.get("root_path", "")))
