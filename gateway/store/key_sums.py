"""Sums from the log what a key or a policy has used since a moment: where its accounts begin after a start."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, func, select

from gateway.store.store import Store
from gateway.store.tables import feedback, requests


@dataclass(frozen=True, slots=True)
class KeySum:
    """Requests that left a row, reports included, tokens of prompts and answers, nano-dollars by the price table."""

    num_requests: int
    num_tokens: int
    cost_nano_usd: int


class KeySums:
    """Reads sums over the rows of one key, by the index on key and time, or of one policy, over all since a moment."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def since(self, key_id: str, moment: datetime) -> KeySum:
        """The sum over a key's rows from ``moment`` on.

        Raises
        ------
        StoreUnavailable
        """
        reports = select(func.count()).where(feedback.c.key_id == key_id, feedback.c.created_at >= moment)
        return await self._sum(requests.c.key_id == key_id, moment, reports.scalar_subquery())

    async def since_by_policy(self, policy_name: str, moment: datetime) -> KeySum:
        """The same over the rows that a policy decided.

        Raises
        ------
        StoreUnavailable
        """
        return await self._sum(requests.c.policy_name == policy_name, moment)

    async def _sum(self, is_theirs: ColumnElement[bool], moment: datetime, num_others: Any = 0) -> KeySum:
        statement = select(
            func.count() + num_others,
            # Two sums: of two numbers of 32 bits PostgreSQL makes one of 32 bits, which may not hold it.
            func.coalesce(func.sum(requests.c.prompt_tokens), 0)
            + func.coalesce(func.sum(requests.c.completion_tokens), 0),
            func.coalesce(func.sum(requests.c.cost_nano_usd), 0),
        ).where(is_theirs & (requests.c.created_at >= moment))
        async with self._store.transaction() as connection:
            num_requests, num_tokens, cost = (await connection.execute(statement)).one()
        return KeySum(int(num_requests), int(num_tokens), int(cost))
