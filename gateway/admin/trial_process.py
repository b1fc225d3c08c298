"""Tries a policy in an isolated process: thousands of decisions made again, and not one request waits for them.

What is tried travels on standard input and the report on standard output. A caller who leaves takes the process along.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from gateway.admin.policy_replay import PolicyReplay
from gateway.child_process import run_apart
from gateway.config.store_section import StoreConfig
from gateway.models.catalog import Catalog
from gateway.store.admin_queries import AdminQueries, RequestFilter
from gateway.store.errors import StoreError, StoreUnavailable
from gateway.store.store import Store
from policies.ladder import Ladder
from policies.policy import Policy

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
        """Return JSON for the isolated process; amounts and times are text, which keeps them exact."""
        told: dict[str, Any] = msgspec.to_builtins(self, str_keys=True, enc_hook=datetime.isoformat)
        return told

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Trial:
        """Read what :meth:`as_dict` wrote."""
        return msgspec.convert(told, cls, str_keys=True)


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
