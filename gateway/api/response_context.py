"""Holds what a request of ``/v1/responses`` rests on beside its body: who asks, what is kept, what it goes on from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from msgspec import Struct, structs

from gateway.api.reasoning_seal import BrokenSeal, ReasoningSeal
from gateway.api.request import EarlierConversation, RoutingPreferences
from gateway.errors import InvalidRequest, UnsupportedOption, shorten

_ID_PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
}

# As items are named here, of the output and of the input.
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})_(?:in)?[0-9]+")

Item = dict[str, Any]


class EarlierResponses(Struct, frozen=True, kw_only=True):
    """What a request goes on from.

    Parameters
    ----------
    request_id : of the newest response
    num_chained, num_bytes : how many responses, and how large their items are
    items : of all of these, oldest first
    conversation : the one that they are of
    """

    request_id: str
    num_chained: int
    num_bytes: int
    items: Sequence[Item]
    conversation: EarlierConversation


class ResponseContext(Struct, frozen=True, kw_only=True):
    """What is known of a request beside its body.

    Parameters
    ----------
    tenant : whose request it is
    keeping : which answers are kept: those that ask for it, all that do not decline, or none
    seal : seals reasoning; None where nobody can
    earlier : None where it goes on from nothing
    referred : items that it names by their ids, by these
    regions : those that all of these texts may be sent to; anywhere when None
    """

    tenant: str = ""
    keeping: Literal["off", "asked", "all"] = "off"
    seal: ReasoningSeal | None = None
    earlier: EarlierResponses | None = None
    referred: Mapping[str, Item] = {}
    regions: tuple[str, ...] | None = None

    def is_kept(self, store: bool | None) -> bool:
        """Return whether an answer is kept whose request says ``store``."""
        return self.keeping == "all" if store is None else store and self.keeping != "off"

    def sealed(self, text: str) -> str | None:
        """Return reasoning as its client may keep it; None where it cannot be sealed."""
        return None if self.seal is None else self.seal.close(text, self.tenant)

    def unsealed(self, token: Any, where: str) -> str | None:
        """Return reasoning that was sealed here; None of what is not ours.

        Raises
        ------
        InvalidRequest
        """
        if self.seal is None or not isinstance(token, str):
            return None
        try:
            return self.seal.open(token, self.tenant)
        except BrokenSeal:
            param = f"{where}.encrypted_content"
            raise InvalidRequest(
                f"'{param}' is not as it was sent: altered, cut, or of another tenant.", param=param
            ) from None

    def resolved(self, item: Item, where: str) -> Item:
        """Return an item, or the one that it refers to.

        Raises
        ------
        InvalidRequest
        """
        if item.get("type") != "item_reference":
            return item
        found = self.referred.get(str(item.get("id")))
        if found is None:
            said = f"Item with id {shorten(repr(item.get('id')))} not found: its response is not kept."
            kind = UnsupportedOption if self.keeping == "off" else InvalidRequest
            raise kind(f"{said} Send the item itself.", param=where)
        return found

    def narrow(self, preferences: RoutingPreferences) -> RoutingPreferences:
        """Return preferences under which no earlier text goes where its own request did not let it.

        Raises
        ------
        InvalidRequest
        """
        if self.regions is None:
            return preferences
        overrides = preferences.overrides
        regions = tuple([each for each in overrides.regions or self.regions if each in self.regions])
        if not regions:
            blamed = "input" if self.earlier is None else "previous_response_id"
            raise InvalidRequest(
                f"Earlier text of this conversation may go to no regions but {', '.join(self.regions) or '(none)'}.",
                param="suffice.regions" if overrides.regions else blamed,
                code="region_not_permitted",
            )
        given = {**preferences.given, "regions": regions}
        return structs.replace(preferences, overrides=replace(overrides, regions=regions), given=given)


ALONE = ResponseContext()


def own_items(given: str | list[Item]) -> list[Item]:
    """Return a body's ``input`` as items."""
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


def referred_ids(items: Sequence[Any]) -> list[tuple[str, str]]:
    """Return the items that some refer to, as often as they do: their ids, and the request that each came from.

    What is no id of ours is left out.
    """
    named = [each.get("id") for each in items if isinstance(each, dict) and each.get("type") == "item_reference"]
    found = [(each, _ITEM_ID.fullmatch(each)) for each in named if isinstance(each, str)]
    return [(each, match[1]) for each, match in found if match is not None]


def listed_items(items: Sequence[Item], request_id: str, seen: set[str]) -> list[Item]:
    """Return the items of one request's input as they are listed: each with an id of its own, contents as parts.

    Parameters
    ----------
    seen : ids that are taken; those of these items are added
    """
    listed = []
    for place, item in enumerate(items):
        kind = item.get("type") or "message"
        shown = {**item, "type": kind}
        if kind == "message":
            shown |= {"status": "completed", "content": _content(item)}
        item_id = item.get("id")
        if not isinstance(item_id, str) or not item_id or item_id in seen:
            # The outputs' places are plain numbers.
            item_id = f"{_ID_PREFIXES.get(str(kind), 'item')}_{request_id}_in{place}"
        seen.add(item_id)
        listed.append({**shown, "id": item_id})
    return listed


def _content(item: Item) -> Any:
    content = item.get("content")
    if not isinstance(content, str):
        return content
    if item.get("role") == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]
