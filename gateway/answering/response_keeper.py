"""Keeps answers of ``/v1/responses`` for those who go on from them, and reads back what a request goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from gateway.answering.phases import RoutedRequest
from gateway.api.reasoning_seal import ReasoningSeal
from gateway.api.request import EarlierConversation
from gateway.api.response_context import EarlierResponses, Item, ResponseContext
from gateway.api.responses_encoder import ResponsesEncoder
from gateway.config.sections import LogConfig
from gateway.edge.body_budget import BodyShare
from gateway.errors import InvalidRequest, PreviousResponseNotFound
from gateway.ids import bare_id, is_uuid
from gateway.store.records import ResponseRecord
from gateway.store.responses import MAX_CHAINED, ResponseBook
from gateway.verify.check_sampler import permitted_regions


class ResponseKeeper:
    """Makes the context of requests, and the records of their answers.

    Parameters
    ----------
    config : which answers may be kept
    book : where they are
    seal : seals reasoning for clients that keep it themselves
    max_bytes : most that a request may have with what it goes on from: as if it had sent all of it
    """

    def __init__(self, config: LogConfig, book: ResponseBook, seal: ReasoningSeal, max_bytes: int) -> None:
        self._keeping = config.responses if config.keeps_responses else "off"
        self._book = book
        self._seal = seal
        self._max_bytes = max_bytes

    async def context(self, body: Mapping[str, Any], tenant: str, share: BodyShare | None) -> ResponseContext:
        """Return what a request rests on.

        Parameters
        ----------
        body : as it came, unchecked
        share : counts what is read for it as it counts its body

        Raises
        ------
        PreviousResponseNotFound, InvalidRequest, BodiesFull
        StoreUnavailable and its kinds
        """
        previous = body.get("previous_response_id")
        earlier = None
        if isinstance(previous, str) and self._keeping != "off":
            earlier = await self._earlier(previous, tenant, share)
        return ResponseContext(tenant=tenant, keeping=self._keeping, seal=self._seal, earlier=earlier)

    def record(self, encoder: ResponsesEncoder, routed: RoutedRequest) -> ResponseRecord | None:
        """Return what is kept of an answer that is encoded to its end; None of one that is not kept."""
        request, admitted = encoder.request, routed.admitted
        if not request.is_kept or encoder.final is None:
            return None
        earlier = request.context.earlier
        given, final = orjson.dumps(request.items), orjson.dumps(encoder.final)
        return ResponseRecord(
            request_id=admitted.request_id,
            created_at=admitted.created_at,
            tenant=admitted.caller.tenant,
            previous_id=None if earlier is None else earlier.request_id,
            num_chained=1 if earlier is None else earlier.num_chained + 1,
            chained_bytes=len(given) + len(final) + (0 if earlier is None else earlier.num_bytes),
            conversation=admitted.conversation.digest,
            regions=permitted_regions(routed.basis.policy, admitted.request),
            input=given.decode(),
            response=final.decode(),
        )

    async def _earlier(self, previous: str, tenant: str, share: BodyShare | None) -> EarlierResponses:
        request_id = bare_id(previous)
        found = await self._book.get(tenant, request_id) if is_uuid(request_id) else None
        if found is None:
            raise PreviousResponseNotFound(previous)
        newest = found.record
        num_bytes = newest.chained_bytes + (0 if share is None else share.num_bytes)
        for num, most, what in (
            (newest.num_chained + 1, MAX_CHAINED, "responses"),
            (num_bytes, self._max_bytes, "bytes"),
        ):
            if num > most:
                raise InvalidRequest(
                    f"With what it goes on from this would be {num} {what}; expected at most {most}. Begin anew, with "
                    "a summary as 'input'.",
                    param="previous_response_id",
                )
        if share is not None:
            share.grow_to(num_bytes)
        chain = await self._book.chain(newest)
        if chain is None:
            raise PreviousResponseNotFound(previous, is_part_gone=True)
        items: list[Item] = []
        for each in chain:
            items += orjson.loads(each.input)
            items += orjson.loads(each.response)["output"]
        return EarlierResponses(
            request_id=request_id,
            num_chained=newest.num_chained,
            num_bytes=newest.chained_bytes,
            items=items,
            conversation=EarlierConversation(newest.conversation, found.session_id),
            regions=newest.regions,
        )
