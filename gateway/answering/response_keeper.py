"""Keeps answers of ``/v1/responses`` for those who go on from them, and reads back what a request goes on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from msgspec import structs

from gateway.answering.phases import RoutedRequest
from gateway.api.reasoning_seal import ReasoningSeal
from gateway.api.request import EarlierConversation
from gateway.api.response_context import (
    EarlierResponses,
    Item,
    ResponseContext,
    listed_items,
    referred_ids,
)
from gateway.api.responses_encoder import ResponsesEncoder
from gateway.config.sections import LogConfig
from gateway.edge.body_budget import BodyShare
from gateway.errors import InvalidRequest, PreviousResponseNotFound
from gateway.ids import bare_id, is_uuid
from gateway.store.records import ResponseRecord
from gateway.store.responses import MAX_CHAINED, ResponseBook
from gateway.verify.check_sampler import permitted_regions

# Responses whose items one request may name.
_MOST_OWNERS = 64


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
        alone = ResponseContext(tenant=tenant, keeping=self._keeping, seal=self._seal)
        if self._keeping == "off":
            return alone
        previous, given = body.get("previous_response_id"), body.get("input")
        context = await self._chained(previous, alone, share) if isinstance(previous, str) else alone
        items = [*(context.earlier.items if context.earlier else ()), *(given if isinstance(given, list) else ())]
        if named := referred_ids(items):
            context = await self._referred(named, context, share)
        return context

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

    async def _chained(self, previous: str, alone: ResponseContext, share: BodyShare | None) -> ResponseContext:
        """Return a context with the responses that a request goes on from."""
        request_id = bare_id(previous)
        found = await self._book.get(alone.tenant, request_id) if is_uuid(request_id) else None
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
        earlier = EarlierResponses(
            request_id=request_id,
            num_chained=newest.num_chained,
            num_bytes=newest.chained_bytes,
            items=items,
            conversation=EarlierConversation(newest.conversation, found.session_id),
        )
        return structs.replace(alone, earlier=earlier, regions=newest.regions)

    async def _referred(
        self, named: Sequence[tuple[str, str]], context: ResponseContext, share: BodyShare | None
    ) -> ResponseContext:
        """Return a context with the items that are named. They are kept as references: the text stays in one place."""
        owners, owner_of = sorted({owner for _, owner in named}), dict(named)
        if len(owners) > _MOST_OWNERS:
            raise InvalidRequest(
                f"'input' refers to {len(owners)} responses; expected at most {_MOST_OWNERS}.", param="input"
            )
        referred: dict[str, Item] = {}
        regions = context.regions
        for owner in owners:
            found = await self._book.get(context.tenant, owner)
            if found is None:
                continue
            record = found.record
            if share is not None:
                share.grow_to(share.num_bytes + len(record.input) + len(record.response))
            items = listed_items(orjson.loads(record.input), owner, set())
            items += orjson.loads(record.response)["output"]
            # Others may hold references to the same, or items that bear its id.
            referred |= {item["id"]: item for item in items if owner_of.get(item["id"]) == owner}
            if record.regions is not None:
                regions = (
                    record.regions if regions is None else tuple([each for each in regions if each in record.regions])
                )
        self._check_size(named, referred)
        return structs.replace(context, referred=referred, regions=regions)

    def _check_size(self, named: Sequence[tuple[str, str]], referred: Mapping[str, Item]) -> None:
        """Refuse references that stand for more than a body can hold: a short one may name a long item often."""
        sizes = {item_id: len(orjson.dumps(item)) for item_id, item in referred.items()}
        num_bytes = sum([sizes.get(item_id, 0) for item_id, _ in named])
        if num_bytes > self._max_bytes:
            raise InvalidRequest(
                f"What 'input' refers to has {num_bytes} bytes; expected at most {self._max_bytes}.", param="input"
            )
