"""Refuses NUL in the text of a request: PostgreSQL takes it nowhere, and mending it would change a name in silence."""

from __future__ import annotations

from typing import Any

from gateway.errors import InvalidRequest, shorten

NUL = "\0"


def refuse_nul(value: Any, param: str) -> None:
    """Look through a text, or all names and texts of a JSON value; ``param`` names it, and is empty for a whole body.

    Raises
    ------
    InvalidRequest
        ``param`` is the path of the text, such as ``thresholds.simple`` or ``allowed_tiers[2]``.
    """
    if isinstance(value, str):
        if NUL in value:
            told = shorten(param.replace(NUL, "\N{REPLACEMENT CHARACTER}"))
            raise InvalidRequest(f"Invalid value for '{told}': it may not hold NUL characters.", param=told)
    elif isinstance(value, dict):
        for name, each in value.items():
            place = f"{param}.{name}" if param else name
            refuse_nul(name, place)
            refuse_nul(each, place)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            refuse_nul(each, f"{param}[{number}]")
