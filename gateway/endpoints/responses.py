"""``/v1/responses``: answers that may be kept, gone on from, read back and deleted, within their tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

import orjson
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from gateway.access.authenticator import Caller
from gateway.answering.phases import RoutedRequest
from gateway.answering.response_keeper import ResponseKeeper
from gateway.api.answer_encoder import AnswerEncoder
from gateway.api.declaration import checked
from gateway.api.request import InferenceRequest
from gateway.api.response_context import Item, listed_items
from gateway.api.responses_decoder import ResponsesDecoder
from gateway.api.responses_encoder import ResponsesEncoder
from gateway.edge.gate import OpenedRequest, RequestGate
from gateway.edge.json_body import parse_object
from gateway.edge.watchdog import Watchdog
from gateway.endpoints.generation import GenerationEndpoint
from gateway.endpoints.pages import json_response
from gateway.errors import InvalidRequest, ResponseNotFound, UnsupportedOption
from gateway.ids import bare_id, is_uuid, uuid7
from gateway.store.records import ResponseRecord
from gateway.store.responses import ResponseBook

_PATH = "/v1/responses"


class ResponsesEndpoint(GenerationEndpoint):
    """Generates, with what is kept of earlier answers before the input.

    Parameters
    ----------
    decoder : the protocol's
    keeper : reads and makes what is kept
    parts : of :class:`GenerationEndpoint`, from ``gate`` on
    """

    def __init__(self, decoder: ResponsesDecoder, keeper: ResponseKeeper, parts: tuple[Any, ...]) -> None:
        super().__init__(_PATH, decoder, ResponsesEncoder, *parts)
        self._decode = decoder
        self._keeper = keeper

    async def decode(self, opened: OpenedRequest, watchdog: Watchdog) -> InferenceRequest:
        """Return what a body asks for, and what it goes on from.

        Raises
        ------
        InvalidRequest and its kinds, BodiesFull
        StoreUnavailable and its kinds
        """
        body = parse_object(opened.body, self.gate.limits.max_json_depth)
        context = await self._keeper.context(body, opened.caller.tenant, watchdog.body)
        return self._decode(body, opened.head.suffice, context)

    def kept_response(self, encoder: AnswerEncoder, routed: RoutedRequest) -> ResponseRecord | None:
        """Return what is kept of an answer beside its row; None of one that is not to be kept."""
        assert isinstance(encoder, ResponsesEncoder), "this path has no other"
        return self._keeper.record(encoder, routed)


class ItemsQuery(Struct, kw_only=True):
    """Which items of an input are listed."""

    after: Annotated[str, Meta(max_length=512, description="The id of the last item of the page before.")] | None = None
    limit: Annotated[int, Meta(ge=1, le=100, description="Most items of a page.")] = 20
    order: Annotated[Literal["asc", "desc"], Meta(description="`desc`: the newest first.")] = "desc"


class ResponsePages:
    """Handlers of kept responses. What is another tenant's is not there.

    Each counts as a request of its key, also one that finds nothing.
    """

    def __init__(self, gate: RequestGate, book: ResponseBook) -> None:
        self._gate = gate
        self._book = book

    async def response(self, request: Request) -> Response:
        """Show a response as it was answered, or delete it.

        Raises
        ------
        ResponseNotFound, UnsupportedOption, RateLimited
        """
        async with self._caller(request) as caller:
            if request.method == "DELETE":
                shown, request_id = _ids(request)
                if not (is_uuid(request_id) and await self._book.delete(caller.tenant, request_id)):
                    raise ResponseNotFound(shown)
                return json_response({"id": f"resp_{request_id}", "object": "response", "deleted": True})
            if request.query_params.get("stream", "false").lower() not in ("false", "0"):
                raise UnsupportedOption("'stream': a kept response is read whole; leave it out.", param="stream")
            record = await self._record(request, caller)
            return Response(record.response, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """List what a response answers: its input, and before that what it goes on from.

        Raises
        ------
        ResponseNotFound, InvalidRequest, RateLimited, BodiesFull
        """
        async with self._caller(request) as caller:
            query = _items_query(request)
            newest = await self._record(request, caller)
            share = self._gate.bodies.share(caller.key_id)
            try:
                # As a body that holds the same; the largest fits.
                share.grow_to(min(newest.chained_bytes, self._gate.limits.max_body_bytes))
                chain = await self._book.chain(newest)
                if chain is None:
                    raise ResponseNotFound(request.path_params["response_id"])
                return json_response(_page(_items(chain), query))
            finally:
                share.close()

    async def cancel(self, request: Request) -> Response:
        """Refuse: only responses in the background can be cancelled, and none is.

        Raises
        ------
        ResponseNotFound, UnsupportedOption, RateLimited
        """
        async with self._caller(request) as caller:
            await self._record(request, caller)
            raise UnsupportedOption("Cannot cancel a synchronous response.")

    async def _record(self, request: Request, caller: Caller) -> ResponseRecord:
        shown, request_id = _ids(request)
        found = await self._book.get(caller.tenant, request_id) if is_uuid(request_id) else None
        if found is None:
            raise ResponseNotFound(shown)
        return found.record

    @asynccontextmanager
    async def _caller(self, request: Request) -> AsyncIterator[Caller]:
        caller, limiter = await self._gate.identify(request.scope), self._gate.rate_limiter
        if not caller.is_limited:
            yield caller
            return
        reservation = await limiter.admit(uuid7(), caller, 0)
        try:
            yield caller
        finally:
            limiter.settle(reservation, num_requests=1, num_tokens=0, cost_nano_usd=0)


def _ids(request: Request) -> tuple[str, str]:
    shown: str = request.path_params["response_id"]
    return shown, bare_id(shown)


def _items_query(request: Request) -> ItemsQuery:
    """Return the query; others than its parameters are tolerated, as in bodies."""
    given: dict[str, Any] = {name: text for name in ("after", "order") if (text := request.query_params.get(name))}
    if (limit := request.query_params.get("limit")) is not None:
        given["limit"] = int(limit) if limit.isascii() and limit.isdecimal() and len(limit) < 10 else limit
    return checked(given, ItemsQuery, "")


def _items(chain: list[ResponseRecord]) -> list[Item]:
    """Return what the last of a chain answers, oldest first."""
    items: list[Item] = []
    seen: set[str] = set()
    for each in chain:
        items += listed_items(orjson.loads(each.input), each.request_id, seen)
        if each is not chain[-1]:
            output = orjson.loads(each.response)["output"]
            items += output
            seen |= {item["id"] for item in output}
    return items


def _page(items: list[Item], query: ItemsQuery) -> dict[str, Any]:
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            raise InvalidRequest("'after' names none of these items.", param="after")
        items = items[ids.index(query.after) + 1 :]
    page = items[: query.limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
