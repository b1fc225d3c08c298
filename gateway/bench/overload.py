"""Several times the load a server can take, from tenants of unequal greed. ``suffice bench overload``.

It finds the server's capacity in a closed loop, lets each modest tenant send alone at the rate it will have, then lets
all of them send at once, ``--times`` the capacity together. Goodput is what was answered within ten seconds.

The greediest tenant alone asks for more than there is. The others want less than an even share, so that a fair server
gives them all they ask for, about as quickly as when they are alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from gateway.bench.child_server import ready_server
from gateway.bench.machine_card import card, print_card
from gateway.bench.request_load import post_bytes
from gateway.bench.tenant_load import Reply, Tenant, offer, saturate
from gateway.config.sections import ServerConfig
from gateway.outcomes.task_split import HOLDOUT_SPLIT, draw_split

# Answers that come later are of no use to most clients.
_IN_TIME_S = 10.0
_NUM_CONNECTIONS = 24
_NUM_PROMPTS = 200

# A model that takes 0.4 s for each request, 8 at once: 20 requests a second, whatever the machine.
_ECHO = """
[[tiers]]
name = "only"
model = "echo"

[models.echo]
kind = "echo"
text = "done"
first_delay_s = 0.4

[server]
max_concurrency = 8

[verification]
enabled = false
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. 0 when the run ended, whatever it showed; with ``--check`` 1 when a goal was missed."""
    given = _parser().parse_args(arguments)
    found = asyncio.run(_run(given))
    if not given.json:
        print_card("Overload bench", found["card"])
        print_table(found)
    print(json.dumps(found))
    return int(given.check and not all(found["goals"].values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="suffice bench overload", description=__doc__.partition("\n")[0])
    parser.add_argument("--models", choices=("echo", "builtin"), default="echo", help="what answers")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the overload")
    parser.add_argument("--times", type=float, default=3.0, help="offered load as a multiple of the capacity")
    parser.add_argument("--greed", default="1:1:2:20", help="parts of the offered load, tenant by tenant")
    parser.add_argument("--max-tokens", type=int, default=32, help="longest answer of the built-in ladder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal was missed")
    return parser


async def _run(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="suffice-bench-") as name:
        folder = Path(name)
        command = [sys.executable, "-P", "-m", "gateway.bench.ladder_server", "--data-dir", name]
        if given.models == "echo":
            (folder / "suffice.toml").write_text(_ECHO)
            command += ["--config", str(folder / "suffice.toml")]
        # Of all settings the one that other benches turn off.
        environ = {"SUFFICE_SERVER__MAX_QUEUE_S": str(ServerConfig().max_queue_s)}
        async with ready_server(*command, environ=environ) as url:
            tenants = await _make_tenants(url, given)
            try:
                measured = await _measure(urlsplit(url).port or 80, tenants, given)
            finally:
                _hang_up(tenants)
    asked = {name: getattr(given, name) for name in ("models", "seconds", "times", "greed", "seed")}
    return {"bench": "overload", "card": {**card(), **asked}, **measured}


def _hang_up(tenants: Sequence[Tenant]) -> None:
    """Close what is idle: the server would, in the middle of the next measurement."""
    for tenant in tenants:
        tenant.close()


async def _make_tenants(url: str, given: argparse.Namespace) -> list[Tenant]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        tenants = []
        for place, part in enumerate(map(float, given.greed.split(":"))):
            name = f"tenant {place + 1}"
            made = await client.post("/admin/v1/keys", json={"name": name, "tenant": name})
            made.raise_for_status()
            tenants.append(Tenant(name, part, _requests(made.json()["key"], place, given)))
    return tenants


def _requests(key: str, place: int, given: argparse.Namespace) -> Iterator[bytes]:
    model = "only" if given.models == "echo" else "auto"
    requests = []
    # All made now: drawing tasks takes longer than a request.
    for task in draw_split(HOLDOUT_SPLIT, given.seed + place, _NUM_PROMPTS):
        messages = [{"role": "user", "content": task.prompt}]
        body = json.dumps({"model": model, "messages": messages, "max_tokens": given.max_tokens}).encode()
        requests.append(post_bytes("/v1/chat/completions", body, {"authorization": f"Bearer {key}"}))
    return itertools.cycle(requests)


async def _measure(port: int, tenants: list[Tenant], given: argparse.Namespace) -> dict[str, Any]:
    rng, seconds = random.Random(given.seed), given.seconds
    capacity = await saturate(tenants, port, _NUM_CONNECTIONS, max(seconds / 2, 10.0))
    _hang_up(tenants)
    whole = sum(tenant.greed for tenant in tenants)
    rates = [given.times * capacity * tenant.greed / whole for tenant in tenants]
    greediest = max(tenants, key=lambda tenant: tenant.greed)
    alone: dict[str, list[Reply]] = {}
    for tenant, rate in zip(tenants, rates, strict=True):
        if tenant is not greediest:
            alone[tenant.name] = await offer(tenant, port, rate, seconds / 2, rng)
    _hang_up(tenants)
    together = await asyncio.gather(
        *(offer(tenant, port, rate, seconds, rng) for tenant, rate in zip(tenants, rates, strict=True))
    )
    return summarise(capacity, tenants, alone, dict(zip([t.name for t in tenants], together, strict=True)))


def summarise(
    capacity: float, tenants: Sequence[Tenant], alone: dict[str, list[Reply]], together: dict[str, list[Reply]]
) -> dict[str, Any]:
    """Return the figures of a run, and which goals it met.

    Parameters
    ----------
    capacity : requests a second in a closed loop
    alone, together : tenant's name -> its replies, by itself and in the overload
    """
    every = [reply for replies in together.values() for reply in replies]
    began_s = min(reply.sent_s for reply in every)
    wall_s = max(reply.sent_s for reply in every) - began_s
    served = [reply for reply in every if reply.status == 200]
    in_time = [each for each in served if each.took_s <= _IN_TIME_S and each.sent_s + each.took_s <= began_s + wall_s]
    shed = [reply for reply in every if reply.status == 429]
    rows = [_tenant_row(tenant, alone.get(tenant.name), together[tenant.name]) for tenant in tenants]
    slower = [row["p99_s"] / row["p99_alone_s"] for row in rows if row["p99_alone_s"] and row["p99_s"]]
    goodput_share = len(in_time) / wall_s / capacity
    longest_shed_s = max((reply.took_s for reply in shed), default=0.0)
    found: dict[str, Any] = {
        "capacity_per_s": round(capacity, 2),
        "offered_per_s": round(len(every) / wall_s, 2),
        "goodput_per_s": round(len(in_time) / wall_s, 2),
        "goodput_share": round(goodput_share, 3),
        "num_shed": len(shed),
        "num_failed": len(every) - len(served) - len(shed),
        "longest_shed_s": round(longest_shed_s, 3),
        "p99_shed_s": _p99(shed),
        "all_say_retry_after": all(reply.has_retry_after for reply in shed),
        "tenants": rows,
    }
    goals = {
        "goodput at least 90 % of capacity": goodput_share >= 0.9,
        "modest tenants' p99 at most twice that alone": bool(slower) and max(slower) <= 2.0,
        "sheds within 1 s": longest_shed_s < 1.0,
        "sheds say Retry-After": found["all_say_retry_after"],
    }
    return {**found, "goals": goals}


def _tenant_row(tenant: Tenant, alone: list[Reply] | None, together: list[Reply]) -> dict[str, Any]:
    served = [reply for reply in together if reply.status == 200]
    return {
        "tenant": tenant.name,
        "greed": tenant.greed,
        "num_offered": len(together),
        "num_served": len(served),
        "p99_alone_s": None if alone is None else _p99([reply for reply in alone if reply.status == 200]),
        "p99_s": _p99(served),
    }


def _p99(replies: list[Reply]) -> float | None:
    times = sorted(reply.took_s for reply in replies)
    return round(times[min(int(0.99 * len(times)), len(times) - 1)], 3) if times else None


def print_table(found: dict[str, Any]) -> None:
    """The run for reading."""
    print(f"\ncapacity {found['capacity_per_s']} requests/s, offered {found['offered_per_s']}")
    print(f"goodput  {found['goodput_per_s']} requests/s, {found['goodput_share']:.1%} of capacity")
    print(
        f"shed     {found['num_shed']}, at the latest after {found['longest_shed_s']} s (p99 {found['p99_shed_s']} s), "
        f"{'all' if found['all_say_retry_after'] else 'not all'} with Retry-After; {found['num_failed']} failed\n"
    )
    print(f"{'tenant':10} {'greed':>6} {'offered':>8} {'served':>7} {'p99 alone':>10} {'p99':>8}")
    for row in found["tenants"]:
        alone = "" if row["p99_alone_s"] is None else f"{row['p99_alone_s']:.2f} s"
        p99 = "" if row["p99_s"] is None else f"{row['p99_s']:.2f} s"
        print(f"{row['tenant']:10} {row['greed']:6g} {row['num_offered']:8} {row['num_served']:7} {alone:>10} {p99:>8}")
    print()
    for goal, is_met in found["goals"].items():
        print(f"{'met   ' if is_met else 'missed'} {goal}")
    print()


if __name__ == "__main__":
    sys.exit(main())
