"""Tries a policy in an isolated process: thousands of decisions made again, and not one request waits for them.

What is tried travels on standard input and the report on standard output. A caller who leaves takes the process along.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from gateway.admin.policy_replay import PolicyReplay
from gateway.child_process import run_apart
from gateway.config.policy_body import from_body, to_body
from gateway.config.store_section import StoreConfig
from gateway.models.catalog import Catalog
from gateway.store.admin_queries import AdminQueries, RequestFilter
from gateway.store.errors import StoreError, StoreUnavailable
from gateway.store.store import Store
from policies.ladder import Ladder
from policies.policy import Policy
from policies.types import Tier

_PAGE = 200
# Beside live requests, whose processor it shares.
_NICE = 10
# For the start of the process and the sums at its end; the time limit is for the rows.
_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class Trial:
    """Describes a trial: of a completed policy, on the newest ``last`` rows that the filter lets through."""

    policy: Policy
    ladder: Ladder
    which: RequestFilter
    last: int
    timeout_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return JSON for the isolated process."""
        return {
            "name": self.policy.name,
            "version": self.policy.version,
            "body": to_body(self.policy),
            "ladder": [_plain(tier) for tier in self.ladder],
            "which": _plain(self.which),
            "last": self.last,
            "timeout_s": self.timeout_s,
        }

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Trial:
        """Read what :meth:`as_dict` wrote."""
        ladder = tuple(_tier(each) for each in told["ladder"])
        which = dict(told["which"])
        which |= {name: datetime.fromisoformat(which[name]) for name in ("since", "until") if which[name] is not None}
        policy = from_body(told["name"], told["body"], ladder, version=told["version"])
        return cls(policy, ladder, RequestFilter(**which), told["last"], told["timeout_s"])


async def run_trial(trial: Trial, store: StoreConfig) -> dict[str, Any]:
    """Run a trial in a child process and return its report; cancelled, or out of time, it kills the child.

    Raises
    ------
    StoreUnavailable
        The child found no database.
    """
    told = {"database_url": store.url, "trial": trial.as_dict()}
    ended = await run_apart("gateway.admin.trial_process", told, timeout_s=trial.timeout_s + _GRACE_S)
    if ended.status:
        raise RuntimeError(f"the trial ended with {ended.status}: {ended.said}")
    report: dict[str, Any] = json.loads(ended.output)
    if "unavailable" in report:
        raise StoreUnavailable(report["unavailable"])
    return report


async def replay_log(trial: Trial, database_url: str) -> dict[str, Any]:
    """Replay the rows, page by page, newest first, until they or the time are at an end.

    Raises
    ------
    StoreUnavailable and its kinds
    """
    catalog = Catalog(trial.ladder, trial.policy, {trial.policy.name: trial.policy}, {})
    replay = PolicyReplay(trial.policy, catalog, time.monotonic() + trial.timeout_s)
    async with Store(StoreConfig(url=database_url, migrate=False)) as store:
        is_complete = await _replay(trial, replay, AdminQueries(store))
    return {"complete": is_complete} | replay.report()


async def _replay(trial: Trial, replay: PolicyReplay, queries: AdminQueries) -> bool:
    """Replay rows; return whether all of them were."""
    left, before_id = trial.last, None
    while left > 0 and not replay.is_over():
        records = await queries.requests(trial.which, limit=min(_PAGE, left), before_id=before_id)
        if not records:
            return True
        rows = await queries.verdicts([record.request_id for record in records])
        verdicts = {row["request_id"]: (row["p_good"], row["inclusion_probability"]) for row in rows}
        if not replay.add(records, verdicts):
            return False
        left -= len(records)
        before_id = records[-1].request_id
    return left == 0


def _plain(value: Any) -> dict[str, Any]:
    """Return a dataclass as JSON: amounts and times as text, which keeps them exact."""
    return {
        each.name: str(found) if isinstance(found := getattr(value, each.name), Decimal | datetime) else found
        for each in dataclasses.fields(value)
    }


def _tier(told: Mapping[str, Any]) -> Tier:
    fields: dict[str, Any] = {name: Decimal(each) if name.endswith("_usd") else each for name, each in told.items()}
    return Tier(**fields)


def main() -> int:
    """Read what is to be tried on standard input; print the report, or that there is no database."""
    told: Mapping[str, Any] = json.load(sys.stdin)
    os.nice(_NICE)
    try:
        report = asyncio.run(replay_log(Trial.from_dict(told["trial"]), told["database_url"]))
    except StoreError as error:
        report = {"unavailable": str(error)}
    json.dump(report, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
