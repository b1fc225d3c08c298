"""Tier 1's reading of a conversation before anybody answers it: states that a router may rest on beside the text.

The reading fills tier 1's prefix cache, so what is answered there is not read again; what goes up was read for
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from backends.protocol import Backend, GenerateRequest, Message, Priority
from classifier.embedding import PREFILL
from classifier.types import Router, RouterRequest
from gateway.ids import uuid7
from policies.ladder import Ladder

_AT_ONCE = 32


@runtime_checkable
class ReadsPrompts(Protocol):
    """A backend whose model's states can be had; a local one."""

    async def prefill_state(self, request: GenerateRequest) -> tuple[float, ...]: ...


def needs_state(router: Router | None) -> bool:
    """Whether a router rests on tier 1's states."""
    artifact = getattr(router, "artifact", None)
    return artifact is not None and artifact.metadata["embedding"]["source"] == PREFILL


class PrefillReader:
    """Asks tier 1.

    Parameters
    ----------
    backend : of tier 1, started
    priority : of its readings
    """

    def __init__(self, backend: ReadsPrompts, priority: Priority = Priority.LIVE) -> None:
        self._backend = backend
        self._priority = priority

    @classmethod
    def of(cls, ladder: Ladder, backends: Mapping[str, Backend]) -> PrefillReader | None:
        """The reader of a ladder, None where tier 1's states cannot be had."""
        backend = backends[ladder[0].model]
        return cls(backend) if isinstance(backend, ReadsPrompts) else None

    async def read(self, request: RouterRequest) -> RouterRequest:
        """The request with tier 1's state: the mean of its last hidden states over the prompt.

        Raises
        ------
        BackendError
            Tier 1 cannot read it.
        """
        messages = tuple(Message(role, content) for role, content in request.turns)
        asked = GenerateRequest(uuid7(), messages=messages, priority=self._priority)
        return replace(request, prefill_state=await self._backend.prefill_state(asked))

    async def read_all(self, requests: Sequence[RouterRequest | None]) -> tuple[RouterRequest | None, ...]:
        """The same of many, some at once, so that the model reads them in batches."""
        found: list[RouterRequest | None] = []
        for start in range(0, len(requests), _AT_ONCE):
            some = requests[start : start + _AT_ONCE]
            read = iter(await asyncio.gather(*(self.read(each) for each in some if each is not None)))
            found += [None if each is None else next(read) for each in some]
        return tuple(found)
