"""Measures memory and time of reading the training table. ``python -m gateway.bench.learning_table --rows 1000000``.

The log is made in the database itself, from a few hundred requests that the shipped router really estimated, repeated
under new ids; one in twenty is checked. The table is read in a process of its own, so that its peak memory is known.
Without ``--url`` the log is a SQLite file in a temporary folder; a PostgreSQL database named there must be empty.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import text

from backends.protocol import FinishReason
from classifier.router import ArtifactRouter
from classifier.types import RouterRequest
from gateway.bench.machine_card import card, print_card
from gateway.config.store_section import StoreConfig
from gateway.ids import uuid7
from gateway.learn.table_reader import TableSpec, read_table
from gateway.outcomes.task_split import FITTING_SPLIT, draw_split
from gateway.store.records import RequestRecord
from gateway.store.store import Store
from gateway.store.tables import requests, verifications

NUM_TEMPLATES = 400
CHECKED_SHARE = 0.05
_WINDOW = timedelta(days=28)


async def fill(url: str, num_rows: int) -> None:
    """Write a log of ``num_rows`` requests, a twentieth of them checked."""
    config = replace(StoreConfig(url=url), write_timeout_s=3600.0)
    async with Store(config) as store:
        for record in _templates():
            await store.record(record)
        async with store.transaction() as connection:
            await connection.execute(text(_copies(store.dialect, num_rows)))
        async with store.transaction() as connection:
            await connection.execute(text(_checks(store.dialect)))


def _templates() -> list[RequestRecord]:
    """Requests as a server logs them: real prompts, the shipped router's estimates, exploration of two per cent."""
    router, rng = ArtifactRouter.load(), random.Random(0)
    prompts = [task.prompt for task in draw_split(FITTING_SPLIT, 1, NUM_TEMPLATES)]
    said = router.predict([RouterRequest((("user", prompt),)) for prompt in prompts])
    found = []
    for estimate in said:
        tier = rng.choice((1, 1, 1, 2, 3, 4))
        chances = {each: 0.985 if each == tier else 0.005 for each in range(1, 5)}
        found.append(
            RequestRecord(
                request_id=uuid7(),
                created_at=datetime.now(UTC) - timedelta(days=1),
                endpoint="/v1/chat/completions",
                model_requested="auto",
                finish_reason=FinishReason.STOP,
                status_code=200,
                policy_name="default",
                policy_version="1",
                router_version=router.version,
                features=estimate.features,
                sufficiency=estimate.tiers,
                novelty=estimate.novelty,
                decided_tier=tier,
                final_tier=tier,
                propensity=0.985,
                propensities=chances,
                reason="sufficient",
                prompt_tokens=40,
                completion_tokens=30,
                prompt_digest=f"{rng.getrandbits(256):064x}",
            )
        )
    return found


def _copies(dialect: str, num_rows: int) -> str:
    """Return the templates again and again, under random ids."""
    times = max(num_rows // NUM_TEMPLATES - 1, 0)
    columns = [column.name for column in requests.c]
    new = "'01900000-0000-7' || substr(h, 1, 3) || '-8' || substr(h, 4, 3) || '-' || substr(h, 7, 12)"
    if dialect == "sqlite":
        series = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {times}) "
        source = "(SELECT lower(hex(randomblob(9))) AS h, requests.* FROM requests, n)"
    else:
        series, made = "", f"generate_series(1, {times}) AS n(i)"
        digest = "md5(random()::text || n.i || requests.request_id)"
        source = f"(SELECT {digest} AS h, requests.* FROM requests, {made}) AS t"
    picked = ", ".join(new if name == "request_id" else name for name in columns)
    return f"INSERT INTO requests ({', '.join(columns)}) {series}SELECT {picked} FROM {source}"


def _checks(dialect: str) -> str:
    limit = "abs(random()) % 1000 < 50" if dialect == "sqlite" else "random() < 0.05"
    values = {
        "verification_id": "request_id",
        "request_id": "request_id",
        "created_at": "created_at",
        "direction": "'up'",
        "tier": "final_tier",
        "against_tier": "4",
        "inclusion_probability": str(CHECKED_SHARE),
        "stratum": "''",
        "tenant": "tenant",
        "domain": "''",
        "policy_name": "policy_name",
        "policy_version": "policy_version",
        "router_version": "router_version",
        "status": "'done'",
        "num_attempts": "1",
        "p_good": "0.9",
        "scores": "'{}'",
        "cost_nano_usd": "0",
    }
    assert set(values) <= {column.name for column in verifications.c}
    chosen = f"SELECT {', '.join(values.values())} FROM requests WHERE {limit} AND final_tier < 4"
    return f"INSERT INTO verifications ({', '.join(values)}) {chosen}"


async def read(url: str) -> dict[str, Any]:
    """Read the table with the default limits; time, rows and peak memory of this process."""
    router = ArtifactRouter.load()
    config = replace(StoreConfig(url=url), write_timeout_s=3600.0)
    before_mib = _peak_mib()
    async with Store(config) as store:
        now = datetime.now(UTC)
        spec = TableSpec(router.num_tiers, router.num_components, (router.version,), now - _WINDOW, now)
        begun_s = time.perf_counter()
        table = await read_table(store, spec)
    return {
        "num_requests": table.num_requests,
        "num_rows": len(table),
        "num_checked": int(table.is_checked.sum()),
        "duration_s": round(time.perf_counter() - begun_s, 1),
        "rss_before_mib": before_mib,
        "peak_rss_mib": _peak_mib(),
    }


def _peak_mib() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill, read apart, print the card and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m gateway.bench.learning_table", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--url", help="an empty database; by default a SQLite file")
    parser.add_argument("--read", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.read is not None:
        print(json.dumps(asyncio.run(read(given.read))))
        return 0
    facts = card()
    print_card("Reading the training table", facts)
    with tempfile.TemporaryDirectory() as folder:
        url = given.url or f"sqlite:///{Path(folder) / 'log.db'}"
        asyncio.run(fill(url, given.rows))
        command = [sys.executable, "-P", "-m", "gateway.bench.learning_table", "--read", url]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(json.dumps({"bench": "learning_table", "database": url.partition(":")[0], "card": facts, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
