"""Checks the shape of a conversation, whichever protocol it came in."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.api.request import ToolResultPart, Turn
from gateway.errors import InvalidRequest


def check_results(turns: Sequence[Turn], param: str) -> None:
    """Hold results of tools against the calls before them: each answers a call, once, and none is missing.

    Calls that the conversation ends with are not answered yet; no model could go on from there either.

    Raises
    ------
    InvalidRequest
        A result without its call, a second one, two calls with one id, or a call without its result.
    """
    open_calls: dict[str, None] = {}
    for place, turn in enumerate(turns):
        where = f"{param}[{place}]"
        results = [part for part in turn.parts if isinstance(part, ToolResultPart)]
        for result in results:
            if result.call_id not in open_calls:
                raise InvalidRequest(
                    f"'{where}' is the result of {result.call_id!r}, which no call before it waits for.", param=where
                )
            del open_calls[result.call_id]
        if open_calls and not results:
            raise _missing(open_calls, where)
        calls = turn.tool_calls
        if calls and open_calls:
            raise _missing(open_calls, where)
        for call in calls:
            if call.call_id in open_calls:
                raise InvalidRequest(f"'{where}' has two calls with the id {call.call_id!r}.", param=where)
            open_calls[call.call_id] = None
    if open_calls:
        raise _missing(open_calls, param)


def _missing(open_calls: dict[str, None], where: str) -> InvalidRequest:
    names = ", ".join(map(repr, open_calls))
    return InvalidRequest(f"A result is missing for each of these calls: {names}.", param=where)
