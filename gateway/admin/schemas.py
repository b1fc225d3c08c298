"""The shapes of what the administration answers, as JSON Schema: what is always there, and of which type."""

from __future__ import annotations

from typing import Any

from gateway.api.fields import Schema

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
MOMENT: Schema = {"type": "string", "format": "date-time"}
USD: Schema = {"type": "string", "description": "Dollars, as a decimal number."}
ANY_OBJECT: Schema = {"type": "object"}


def shape(**members: Schema) -> dict[str, Any]:
    """An object that always has these members, and may have more in later versions."""
    return {"type": "object", "properties": members, "required": list(members)}


def optional(inner: Schema) -> dict[str, Any]:
    return {"anyOf": [inner, {"type": "null"}]}


def array(inner: Schema) -> dict[str, Any]:
    return {"type": "array", "items": inner}


def page(inner: Schema) -> dict[str, Any]:
    """One page of a listing; ``next`` is the cursor of the next page, null on the last."""
    return shape(object={"type": "string", "const": "list"}, data=array(inner), next=optional(TEXT))


def listing(inner: Schema) -> dict[str, Any]:
    """A listing that is always whole."""
    return shape(object={"type": "string", "const": "list"}, data=array(inner))
