"""Findings of the decision log: a dead database, texts that stay, administrative text, leases, reports."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
import uuid
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime, timedelta

from tests.drills.kit import Server, running, statuses, within
from tests.drills.reproductions.stage import (
    CHAT,
    ECHO,
    KEYS,
    QUIET,
    Found,
    Parts,
    Proxy,
    Stage,
    add_key,
    asking,
    client_of,
    moment,
    read_sqlite,
    reproduces,
    sqlite_path,
    status_of,
    write_sqlite,
)
from tests.drills.reproductions.upstreams import _provider, remote

CANARY = "kanarienvogel-7f3a9"
_ADMIN = "/admin/v1"
_CHECKED = """
[learning]
enabled = false
[monitor]
enabled = false
[policy]
sampling_share = 1.0
[verification]
poll_s = 0.05
allowance_usd = 100.0
"""


@reproduces("M1", "the connection to PostgreSQL is cut; then ten requests")
async def dead_database(stage: Stage) -> Found:
    url = await stage.cluster.database()
    proxy = Proxy(int(url.rpartition(":")[2].partition("/")[0]))
    await proxy.open()
    with _provider() as provider:
        through = url.replace(f":{proxy.target}/", f":{proxy.port}/")
        async with stage.serving(remote(provider.url("ok")), through) as server, client_of(server) as client:
            (await client.post(CHAT, json=asking("hi"))).raise_for_status()
            await proxy.cut()
            await status_of(client.post(CHAT, json=asking("hi")))
            await asyncio.sleep(2.0)
            before = len(provider.requests)
            told = Counter([await status_of(client.post(CHAT, json=asking("hi"))) for _ in range(10)])
            paid = sum(each.path.endswith("completions") for each in provider.requests[before:])
            ready = await status_of(client.get("/readyz"))
    return Found(paid > 1 or ready == "200", f"{paid} upstream calls for {statuses(told)}; /readyz: {ready}")


@reproduces("M5", "db prune --texts-days 0 after a check and a report, with log.prompts = full")
async def pruned_texts(stage: Stage) -> Found:
    async with stage.serving(ECHO + _CHECKED + '[log]\nprompts = "full"\n') as server:
        async with client_of(server) as client:
            answer = await client.post(CHAT, json=asking(CANARY, suffice={"max_tier": 1}))
            report = {"request_id": answer.headers["x-suffice-request-id"], "kind": "reference"}
            report |= {"reference": CANARY, "comment": CANARY}
            (await client.post("/v1/feedback", json=report)).raise_for_status()
        done = await within(60.0, lambda: read_sqlite(server, "SELECT status FROM verifications") == [("done",)])
        state = read_sqlite(server, "SELECT status, error FROM verifications")
        kept = _tables_with(server, CANARY)
        # What is younger than the moment of pruning stays, whichever clock it is.
        await asyncio.sleep(1.0)
        url = f"sqlite:///{sqlite_path(server)}"
        pruned = await stage.command("db", "prune", "--texts-days", "0", SUFFICE_DATABASE__URL=url)
        left = _tables_with(server, CANARY)
    assert done, state
    assert pruned.status == 0, pruned.output
    assert kept, "the texts were there to be pruned"
    return Found(bool(left), f"before in {', '.join(kept)}; after in {', '.join(left) or 'no table'}")


def _tables_with(server: Server, text: str) -> list[str]:
    """Return the tables in which a text stands."""
    with closing(sqlite3.connect(sqlite_path(server), timeout=30)) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return [name for name in names if text in repr(connection.execute(f'SELECT * FROM "{name}"').fetchall())]


@reproduces("M6", 'a question of law with log.prompts = "none" and the built-in router')
async def nothing_kept(stage: Stage) -> Found:
    four = "".join(
        f'[[tiers]]\nname = "t{tier}"\nmodel = "m{tier}"\nprice_per_request_usd = 0.000{tier}\n'
        f'[models.m{tier}]\nkind = "echo"\n'
        for tier in (1, 2, 3, 4)
    )
    toml = four + QUIET + '[router]\nartifact = "builtin"\n[log]\nprompts = "none"\n'
    async with stage.serving(toml) as server:
        async with client_of(server) as client:
            question = "Under which law of contract may a court of appeal set aside the verdict of a jury?"
            (await client.post(CHAT, json=asking(question))).raise_for_status()
        ((features, domain, digest),) = read_sqlite(server, "SELECT features, domain, prompt_digest FROM requests")
    num = len(json.loads(features or "{}"))
    sketch = sum(name.startswith("sketch") for name in json.loads(features or "{}"))
    seen = f"{num} features, {sketch} of them of the sketch, domain {domain!r}, digest {digest or 'none'}"
    return Found(num > 0 or domain != "", seen)


@reproduces("M15", "400,000 rows of three weeks; then two reports")
async def long_log(stage: Stage) -> Found:
    server = stage.server(ECHO + QUIET + KEYS)
    async with running(server):
        user, admin = await add_key(server), await add_key(server, scope="admin")
        async with client_of(server, user) as client:
            (await client.post(CHAT, json=asking("hi"))).raise_for_status()
    _copy_rows(server, 400_000)
    parts = Parts()
    async with running(server), client_of(server, admin) as client:
        # A log that is summed up by the day is so by the leader, in the background.
        await within(120.0, lambda: _is_folded(server))
        for report in ("usage", "reports/floor"):
            begun_s = time.monotonic()
            told = await status_of(client.get(f"{_ADMIN}/{report}"))
            took_s = time.monotonic() - begun_s
            parts.note(told != "200" or took_s > 2.0, f"{report}: {told} after {1000 * took_s:,.0f} ms")
    return parts.found()


def _is_folded(server: Server) -> bool:
    try:
        return len(read_sqlite(server, "SELECT day FROM usage_days WHERE is_complete")) >= 20
    except sqlite3.OperationalError:
        return True  # this checkout knows no such table


def _copy_rows(server: Server, num: int) -> None:
    """Repeat the one row, spread over the last three weeks but today."""
    names = [str(row[1]) for row in read_sqlite(server, "PRAGMA table_info(requests)")]
    (row,) = read_sqlite(server, f"SELECT {', '.join(names)} FROM requests")
    values, last = dict(zip(names, row, strict=True)), datetime.now(UTC) - timedelta(days=1)

    def copy(place: int) -> tuple[object, ...]:
        changed = {"request_id": str(uuid.UUID(int=place)), "verify_probability": 0.1}
        changed["created_at"] = moment(last - timedelta(seconds=place * 21 * 86_400 / num))
        return tuple((values | changed).values())

    marks = ", ".join("?" for _ in names)
    write_sqlite(server, f"INSERT INTO requests ({', '.join(names)}) VALUES ({marks})", [copy(i) for i in range(num)])


@reproduces("L2", "NUL in names and texts of the administration, with PostgreSQL")
async def nul_in_text(stage: Stage) -> Found:
    url = await stage.cluster.database()
    async with stage.serving(ECHO + QUIET + KEYS, url) as server:
        admin = await add_key(server, scope="admin", url=url)
        async with client_of(server, admin) as client:
            told = [
                await status_of(client.post(f"{_ADMIN}/keys", json={"name": "a\0b"})),
                await status_of(client.put(f"{_ADMIN}/kill-switch", json={"on": False, "reason": "a\0b"})),
                await status_of(client.post(f"{_ADMIN}/router/retrain", json={"reason": "a\0b"})),
                *[
                    await status_of(client.get(f"{_ADMIN}/{room}/a%00b"))
                    for room in ("keys", "policies", "routers", "rollouts", "evaluations")
                ],
                await status_of(client.post(f"{_ADMIN}/alerts/a%00b/resolve")),
            ]
    return Found(any(each.startswith("500") for each in told), statuses(Counter(told)))


@reproduces("L3", "the first and the last moment of the calendar as since, with PostgreSQL")
async def extreme_dates(stage: Stage) -> Found:
    url = await stage.cluster.database()
    async with stage.serving(ECHO + QUIET + KEYS, url) as server:
        admin = await add_key(server, scope="admin", url=url)
        async with client_of(server, admin) as client:
            told = [
                await status_of(client.get(f"{_ADMIN}/requests", params={"since": since}))
                for since in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00")
            ]
    return Found(any(each.startswith("5") for each in told), ", ".join(told))


@reproduces("L6", "a leader's lease of the year 2099, left by a server that was killed; control.lease_s = 2")
async def lease_ahead(stage: Stage) -> Found:
    server = stage.server(ECHO + QUIET + "[control]\nlease_s = 2.0\n")
    async with running(server):
        await within(30.0, lambda: _has_lease(server))
        await server.kill()
        write_sqlite(server, "UPDATE leases SET expires_at = ?", [(moment(datetime(2099, 1, 1)),)])
        await server.start()
        async with client_of(server) as client:
            begun_s, leads = time.monotonic(), False
            while not leads and time.monotonic() - begun_s < 20.0:
                leads = "suffice_leader 1.0" in (await client.get("/metrics")).text
                await asyncio.sleep(0.2)
            waited_s = time.monotonic() - begun_s
    return Found(not leads, f"{'it leads' if leads else 'nobody leads'} after {waited_s:.1f} s")


def _has_lease(server: Server) -> bool:
    return bool(read_sqlite(server, "SELECT name FROM leases"))


@reproduces("L12", "a second server is started on the same SQLite file")
async def second_server(stage: Stage) -> Found:
    async with stage.serving(ECHO + QUIET) as server:
        other = stage.server(ECHO + QUIET, f"sqlite:///{sqlite_path(server)}")
        try:
            async with running(other):
                return Found(is_open=True, seen="it serves")
        except RuntimeError:
            assert other.process is not None, "it was started"
            return Found(is_open=False, seen=f"status {other.process.returncode}: {_last(other.log)}")


def _last(output: str) -> str:
    return (output.strip().splitlines() or [""])[-1][:90]
