"""Take away what a gateway rests on, one thing at a time, while clients ask; see what they got and what was spent.

::

    python -m tests.drills.outages --seed 1 --seconds 5
    python -m tests.drills.outages --only database top-down kills

Promises: nothing finished is lost, nothing is spent on answers that cannot be kept, no tier answers that the policy
would not choose or let stand in, every error is of the documented shape and none is 500, and service comes back by
itself. PostgreSQL and Redis are the drill's own processes.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
from sqlalchemy import update

from backends.builtin.tasks.task_generator import generate
from gateway.config.store_section import StoreConfig
from gateway.store.records import RequestRecord
from gateway.store.store import Store
from gateway.store.tables import leases
from tests.drills.kit import Report, Server, error_problem, free_port, running, statuses, within
from tests.drills.upstream import LIES, TIERS, Upstream
from tests.faults import PrivatePostgres
from tests.gateway.control.processes import RedisProcess

_CLIENTS = 4
_CALM = 40
_BACK_S = 30.0
_WELL = 20
_FLOOR = 0.95


@dataclass
class Seen:
    """What clients saw in one phase."""

    statuses: Counter[str] = field(default_factory=Counter)
    finished: list[str] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)


@dataclass
class Scene:
    """One drill on its way. ``finished`` are all answers that came whole, in every phase."""

    report: Report
    folder: Path
    upstream: Upstream
    seconds: float
    rng: random.Random
    finished: list[str] = field(default_factory=list)

    def server(self, name: str, database_url: str | None = None, more: str = "") -> Server:
        folder = self.folder / name
        folder.mkdir()
        url = database_url or f"sqlite:///{folder}/suffice.db"
        return Server(folder, f'{self.upstream.toml()}{more}\n[database]\nurl = "{url}"\nconnect_timeout_s = 2.0\n')

    async def ask(self, url: str, *, num: int | None = None, seconds: float | None = None) -> Seen:
        """Ask from several clients, a number of requests or for a time."""
        seen, deadline = Seen(), time.monotonic() + (seconds if seconds is not None else 120.0)
        prompts = itertools.cycle(self.rng.sample(_prompts(), len(_prompts())))
        left = num if num is not None else 10**9

        async def client_work(place: int) -> None:
            nonlocal left
            async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                while left > 0 and time.monotonic() < deadline:
                    left -= 1
                    await _ask_one(client, next(prompts), seen, is_stream=(left + place) % 3 == 0)

        await asyncio.gather(*(client_work(place) for place in range(_CLIENTS)))
        self.finished += seen.finished
        return seen

    def note(self, drill: str, phase: str, seen: Seen, num_asked: int, told: str = "") -> None:
        """Add a row, and hold each answer against the shape of errors."""
        self.report.rows.append((drill, phase, statuses(seen.statuses), str(num_asked), told))
        # What comes last is the table; a drill of an hour says where it is.
        print("  ".join(self.report.rows[-1]), file=sys.stderr, flush=True)
        for problem, count in seen.problems.items():
            self.report.check(f"{drill}, {phase}: {count} x {problem}", is_kept=False)

    async def check_log(self, drill: str, database_url: str) -> None:
        """Every finished answer has its row, and every row's tier may have answered."""
        async with Store(StoreConfig(url=database_url)) as store:
            rows = [await store.get_request(request_id) for request_id in self.finished]
            lost = [each for each, row in zip(self.finished, rows, strict=True) if row is None]
        wrong = [row.request_id for row in rows if row is not None and not _may_have_answered(row)]
        self.report.check(f"{drill}: nothing finished is lost", not lost, f"{len(lost)} of {len(rows)}: {lost[:3]}")
        self.report.check(f"{drill}: only tiers that keep the floor answer", not wrong, f"{len(wrong)}: {wrong[:3]}")
        self.finished.clear()

    async def until_back(self, drill: str, url: str, seconds: float = _BACK_S) -> None:
        """Service returns by itself: of prompts for every tier, a row of answers without a failure."""
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            begun_s, num_well = time.monotonic(), 0
            while time.monotonic() - begun_s < seconds:
                seen = Seen()
                await _ask_one(client, self.rng.choice(_prompts()), seen, is_stream=False)
                self.finished += seen.finished
                num_well = num_well + 1 if seen.finished else 0
                if num_well == _WELL:
                    return
        self.report.check(f"{drill}: service returns within {seconds:.0f} s", is_kept=False)


@functools.cache
def _prompts() -> list[str]:
    return [task.prompt for task in generate(seed=7, count=200, split="test")]


def _may_have_answered(row: RequestRecord) -> bool:
    if row.final_tier in (None, row.decided_tier, TIERS[-1]):
        return True
    p_as_good = {each.tier: each.p_as_good for each in row.sufficiency}
    wanted = 1.0 if row.decided_tier == TIERS[-1] else p_as_good.get(row.decided_tier or 0, 1.0)
    return p_as_good.get(row.final_tier or 0, -1.0) >= min(_FLOOR, wanted)


async def _ask_one(client: httpx.AsyncClient, prompt: str, seen: Seen, *, is_stream: bool) -> None:
    body = {"model": "auto", "stream": is_stream, "messages": [{"role": "user", "content": prompt}]}
    try:
        answer = await client.post("/v1/chat/completions", json=body)
    except httpx.HTTPError as error:
        seen.statuses[type(error).__name__] += 1
        await asyncio.sleep(0.05)
        return
    request_id = answer.headers.get("x-suffice-request-id", "")
    if answer.status_code == 200:
        is_whole = not is_stream or answer.text.rstrip().endswith("data: [DONE]")
        seen.statuses["200" if is_whole else "200, cut by an error event"] += 1
        if is_whole:
            seen.finished.append(request_id)
        elif '"error"' not in answer.text:
            seen.problems["a stream that was cut without an error event"] += 1
        return
    with suppress(ValueError):
        told = answer.json()
        headers = answer.headers
        wrong = error_problem(answer.status_code, headers.get("content-type", ""), headers.get("retry-after"), told)
        code = told.get("error", {}).get("code") if isinstance(told, dict) else None
        seen.statuses[f"{answer.status_code} {code}"] += 1
        if wrong is not None:
            seen.problems[f"{answer.status_code}: {wrong}"] += 1
        if answer.status_code == 500:
            seen.problems[f"500 {code}"] += 1
    # As a client that was told to wait, only shorter: the drill is to see many.
    await asyncio.sleep(0.02)


async def _outage(
    scene: Scene, drill: str, server: Server, database_url: str, take: Callable[[], object], give: Callable[[], object]
) -> tuple[Seen, int]:
    """Calm, outage, calm again; what was seen in the outage, and what was spent in it after its first second."""
    upstream = scene.upstream
    before = upstream.num_asked()
    scene.note(drill, "before", await scene.ask(server.url, num=_CALM), upstream.num_asked() - before)
    await asyncio.to_thread(take)
    # The first second's requests were on their way, or found it out.
    before = upstream.num_asked()
    first = await scene.ask(server.url, seconds=1.0)
    spent_first = upstream.num_asked() - before
    before = upstream.num_asked()
    seen = await scene.ask(server.url, seconds=scene.seconds)
    spent = upstream.num_asked() - before
    scene.note(drill, "first second", first, spent_first)
    scene.note(drill, f"{scene.seconds:g} s more", seen, spent)
    await asyncio.to_thread(give)
    await scene.until_back(drill, server.url)
    before = upstream.num_asked()
    after = await scene.ask(server.url, num=_CALM)
    scene.note(drill, "after", after, upstream.num_asked() - before)
    scene.report.check(f"{drill}: all is well after it", set(after.statuses) == {"200"}, dict(after.statuses))
    await scene.check_log(drill, database_url)
    return seen, spent


async def database_gone(scene: Scene) -> None:
    cluster = await asyncio.to_thread(PrivatePostgres, free_port())
    try:
        await asyncio.to_thread(cluster.start)
        server = scene.server("database", cluster.url)
        async with running(server):
            seen, spent = await _outage(scene, "database", server, cluster.url, cluster.stop, cluster.start)
            num = sum(seen.statuses.values())
            scene.report.check("database: nobody is answered", not seen.finished, len(seen.finished))
            scene.report.check("database: next to nothing is spent", spent <= max(3, num // 10), f"{spent} of {num}")
            held: list[int] = []
            frozen, spent = await _outage(
                scene,
                "database frozen",
                server,
                cluster.url,
                lambda: held.extend(cluster.freeze()),
                lambda: cluster.thaw(held),
            )
            scene.report.check("database frozen: nobody is answered", not frozen.finished, len(frozen.finished))
    finally:
        await asyncio.to_thread(cluster.remove)


async def redis_gone(scene: Scene) -> None:
    redis = RedisProcess(free_port(), scene.folder)
    await redis.start()
    server = scene.server("redis", more=f'\n[redis]\nurl = "{redis.url}"\n')
    loop = asyncio.get_running_loop()

    def on_loop(act: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        async def run() -> None:
            await act()

        return lambda: asyncio.run_coroutine_threadsafe(run(), loop).result(60)

    try:
        async with running(server):
            url = server.database_url()
            seen, _ = await _outage(scene, "redis", server, url, on_loop(redis.stop), on_loop(redis.start))
            scene.report.check("redis: all are answered", set(seen.statuses) == {"200"}, dict(seen.statuses))
    finally:
        await redis.stop()


def _upstream_drill(drill: str, behaviour: str, *tiers: int, answers: bool) -> Callable[[Scene], Awaitable[None]]:
    async def run(scene: Scene) -> None:
        server = scene.server(drill)
        async with running(server):
            take, give = (lambda: scene.upstream.behave(behaviour, *tiers)), (lambda: scene.upstream.behave("ok"))
            seen, _ = await _outage(scene, drill, server, server.database_url(), take, give)
            if not answers:
                scene.report.check(f"{drill}: nobody is answered", not seen.finished, len(seen.finished))
            scene.report.check(f"{drill}: no 500", not any(each.startswith("500") for each in seen.statuses))

    return run


async def lying(scene: Scene) -> None:
    server = scene.server("lying")
    async with running(server):
        for lie in LIES:
            scene.upstream.behave(lie)
            seen = await scene.ask(server.url, seconds=max(0.5, scene.seconds / 4))
            scene.note("lying", lie, seen, 0)
        scene.upstream.behave("ok")
        await scene.until_back("lying", server.url, 90.0)
        await scene.check_log("lying", server.database_url())
        scene.report.check("lying: no traceback in the log", "Traceback" not in server.log)


async def flapping(scene: Scene) -> None:
    server = scene.server("flapping")
    async with running(server):
        asking = asyncio.create_task(scene.ask(server.url, seconds=scene.seconds))
        while not asking.done():
            scene.upstream.behave(
                scene.rng.choice(("ok", "ok", "500", "reset_before_head", "503")), scene.rng.choice(TIERS)
            )
            await asyncio.sleep(0.2)
        scene.upstream.behave("ok")
        scene.note("flapping", f"{scene.seconds:g} s", await asking, 0)
        await scene.until_back("flapping", server.url)
        await scene.check_log("flapping", server.database_url())


async def disk_full(scene: Scene) -> None:
    server = scene.server("disk")
    async with running(server):
        database = server.folder / "suffice.db-wal"

        def take() -> None:
            server.limit_files(database.stat().st_size if database.exists() else 4096)

        url = server.database_url()
        seen, spent = await _outage(scene, "disk full", server, url, take, lambda: server.limit_files(-1))
        num = sum(seen.statuses.values())
        scene.report.check("disk full: nobody is answered", not seen.finished, len(seen.finished))
        scene.report.check("disk full: next to nothing is spent", spent <= max(3, num // 10), f"{spent} of {num}")


async def clock_ahead(scene: Scene) -> None:
    server = scene.server("clock")
    async with running(server):
        await within(_BACK_S, lambda: "this server leads" in server.log)
        await server.kill()
        async with Store(StoreConfig(url=server.database_url())) as store, store.transaction() as connection:
            await connection.execute(update(leases).values(expires_at=datetime(2099, 1, 1, tzinfo=UTC)))
        await server.start()
        leads = await within(_BACK_S, lambda: "was taken over" in server.log)
        scene.report.rows.append(("clock", "a lease of 2099", "", "", "taken over" if leads else "nobody leads"))
        scene.report.check("clock: a lease of 2099 is taken over, and a log line says so", leads)
        await scene.until_back("clock", server.url)
        await scene.check_log("clock", server.database_url())


def _clock_library(folder: Path) -> Path:
    """Compile what moves the wall clock of the process that loads it."""
    library = folder / "moved_clock.so"
    source = Path(__file__).with_name("moved_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source)], check=True)
    return library


def _clock_drill(drill: str, shift_s: int) -> Callable[[Scene], Awaitable[None]]:
    """The wall clock of the running process jumps, and later jumps back."""

    async def run(scene: Scene) -> None:
        server, clock = scene.server(drill), scene.folder / "clock"
        library = await asyncio.to_thread(_clock_library, scene.folder)
        server.environ = {"LD_PRELOAD": str(library), "MOVED_CLOCK": str(clock)}
        clock.write_text("0")
        async with running(server):
            shifted: list[str] = []

            def take() -> None:
                shifted.append(f"{datetime.now(UTC) + timedelta(seconds=shift_s):%Y-%m-%dT%H}")
                clock.write_text(str(shift_s))

            def give() -> None:
                clock.write_text("0")

            seen, _ = await _outage(scene, drill, server, server.database_url(), take, give)
            scene.report.check(f"{drill}: all are answered", set(seen.statuses) == {"200"}, dict(seen.statuses))
            scene.report.check(f"{drill}: the server saw another time", shifted[0] in server.log)
            told = server.log.partition("Traceback")
            scene.report.check(f"{drill}: no traceback in the log", not told[1], told[2][-2000:])

    return run


async def leader_frozen(scene: Scene) -> None:
    cluster = await asyncio.to_thread(PrivatePostgres, free_port())
    more = "\n[control]\nlease_s = 2.0\n"
    try:
        await asyncio.to_thread(cluster.start)
        first = scene.server("leader-1", cluster.url, more)
        second = scene.server("leader-2", cluster.url, more)
        async with running(first):
            await within(_BACK_S, lambda: "this server leads" in first.log)
            async with running(second):
                await _freeze(scene, first, second)
                await scene.check_log("leader frozen", cluster.url)
    finally:
        await asyncio.to_thread(cluster.remove)


async def _freeze(scene: Scene, first: Server, second: Server) -> None:
    first.signal(signal.SIGSTOP)
    follows = await within(_BACK_S, lambda: "this server leads" in second.log)
    seen = await scene.ask(second.url, num=_CALM)
    first.signal(signal.SIGCONT)
    yields = await within(_BACK_S, lambda: "this server leads no more" in first.log)
    await scene.ask(first.url, num=_CALM)
    leading = [await _leads(each.url) for each in (first, second)]
    scene.note("leader frozen", "SIGSTOP", seen, 0, f"followed {follows}, yielded {yields}, leading {leading}")
    scene.report.check("leader frozen: another follows", follows)
    scene.report.check("leader frozen: the first yields", yields)
    scene.report.check("leader frozen: one leads", sum(leading) == 1, leading)


async def _leads(url: str) -> bool:
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return "suffice_leader 1.0" in lines


async def kills(scene: Scene) -> None:
    server = scene.server("kills")
    total: Counter[str] = Counter()
    before = scene.upstream.num_asked()
    for _ in range(5):
        await server.start()
        asking = asyncio.create_task(scene.ask(server.url, seconds=2.0))
        await asyncio.sleep(scene.rng.uniform(0.3, 1.8))
        await server.kill()
        total += (await asking).statuses
    async with running(server):
        await scene.until_back("kills", server.url)
        await scene.check_log("kills", server.database_url())
    scene.note("kill -9", "5 times", Seen(total), scene.upstream.num_asked() - before)


DRILLS: Mapping[str, Callable[[Scene], Awaitable[None]]] = {
    "database": database_gone,
    "redis": redis_gone,
    "all-down": _upstream_drill("all-down", "500", answers=False),
    "top-down": _upstream_drill("top-down", "503", 4, answers=True),
    "low-down": _upstream_drill("low-down", "reset_before_head", 1, 2, answers=True),
    "lying": lying,
    "flapping": flapping,
    "disk": disk_full,
    "clock": clock_ahead,
    "clock-back": _clock_drill("clock-back", -3_600),
    "clock-on": _clock_drill("clock-on", 2 * 86_400),
    "leader": leader_frozen,
    "kills": kills,
}


async def drill(folder: Path, seed: int, seconds: float, names: list[str]) -> Report:
    """Run the chosen drills one after another."""
    report = Report("outages", seed)
    with Upstream() as upstream:
        for name in names:
            upstream.behave("ok")
            scene = Scene(report, folder / name, upstream, seconds, random.Random(seed))
            scene.folder.mkdir()
            try:
                await DRILLS[name](scene)
            except Exception as error:
                report.check(f"{name}: the drill itself comes to its end", is_kept=False, found=repr(error)[:300])
        report.check("the upstream itself made no mistake", not upstream.errors, upstream.errors[:3])
    report.figures = {"drills": names, "seconds": seconds}
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each outage lasts")
    parser.add_argument("--only", nargs="+", choices=list(DRILLS), default=list(DRILLS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="suffice-drill-") as folder:
        report = asyncio.run(drill(Path(folder), given.seed, given.seconds, given.only))
    return report.end(("drill", "phase", "clients saw", "asked upstream", "also"))


if __name__ == "__main__":
    sys.exit(main())
