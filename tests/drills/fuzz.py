"""Send many thousand generated requests to every endpoint; see that each gets a fit answer and the server stays well.

::

    python -m tests.drills.fuzz --seed 1 --requests 100000

Bodies, queries and paths are drawn from the server's own OpenAPI document, then broken; heads are written raw.
Promises: no 5xx, since nothing here gives cause for those of docs/errors.md; every error in the one shape; no refusal
later than five seconds; memory grows by 100 MB at most; ``/healthz`` answers throughout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson

from tests.drills.fuzz_source import FuzzRequest, FuzzSource
from tests.drills.kit import HealthWatch, Report, Server, error_problem, running, statuses
from tests.gateway.harness import LADDER_TOML

_WORKERS = 8
_LATE_S = 5.0
_PATIENCE_S = 60.0
_MAX_GROWTH_BYTES = 100 * 2**20
# Nothing here takes the log, the models or the control plane away; the server's part that is left out may say so.
_FIT_5XX = frozenset({(501, "not_enabled"), (503, "rate_limit_exceeded")})
_MOST_TOLD = 20

_TOML = (
    LADDER_TOML
    + """
[learning]
enabled = false
[auth]
required = "always"
[log]
level = "warning"
[policy]
sampling_share = 0.0
"""
)


@dataclass
class Answer:
    """What came back. ``status`` 0: the connection was closed without one."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    wait_s: float = 0.0


class Connection:
    """Speaks HTTP/1.1 as bytes, so that nothing it is given to send is mended on the way."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, request: FuzzRequest) -> Answer:
        """Send, and read one answer; an unframed request may get none."""
        begun_s = time.perf_counter()
        try:
            if self._writer is None or self._writer.is_closing() or not request.is_framed:
                await self._open()
            assert self._writer is not None, "opened just now"
            self._writer.write(request.data)
            patience_s = _PATIENCE_S if request.is_framed else 0.3
            async with asyncio.timeout(patience_s):
                await self._writer.drain()
                answer = await self._read(request.data.startswith(b"HEAD "))
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError, ValueError) as problem:
            self.close()
            is_late = isinstance(problem, TimeoutError) and request.is_framed
            return Answer(-1 if is_late else 0, wait_s=time.perf_counter() - begun_s)
        answer.wait_s = time.perf_counter() - begun_s
        if not request.is_framed or answer.headers.get("connection") == "close":
            self.close()
        return answer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _open(self) -> None:
        self.close()
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**20)

    async def _read(self, is_head: bool) -> Answer:
        reader = self._reader
        assert reader is not None, "opened before"
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        members = (line.partition(":") for line in lines[1:] if line)
        headers = {name.lower(): value.strip() for name, _, value in members}
        answer = Answer(int(lines[0].split()[1]), headers)
        if is_head or answer.status in (204, 304):
            return answer
        if headers.get("transfer-encoding") == "chunked":
            while size := int((await reader.readline()).split(b";")[0], 16):
                answer.body += await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readline()
        else:
            answer.body = await reader.readexactly(int(headers.get("content-length", 0)))
        return answer


@dataclass
class Findings:
    """Counts answers; keeps the first requests behind each thing that is wrong."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    problems: Counter[str] = field(default_factory=Counter)
    examples: dict[str, bytes] = field(default_factory=dict)
    longest_s: float = 0.0
    longest: bytes = b""

    def judge(self, request: FuzzRequest, answer: Answer) -> None:
        """Hold one answer against what is promised of it."""
        self.statuses.setdefault(request.kind, Counter())[answer.status] += 1
        if problem := _problem(request, answer):
            self._note(f"{request.endpoint}: {problem}", request)
        if answer.status >= 400 and answer.wait_s > self.longest_s:
            self.longest_s, self.longest = answer.wait_s, request.data[:200]

    def _note(self, problem: str, request: FuzzRequest) -> None:
        self.problems[problem] += 1
        self.examples.setdefault(problem, request.data)


def _problem(request: FuzzRequest, answer: Answer) -> str | None:
    if answer.status == -1:
        return f"no answer within {_PATIENCE_S:.0f} s"
    if answer.status == 0:
        return "closed without an answer" if request.is_framed else None
    if answer.status < 400:
        return None
    body = _json(answer.body)
    is_head = request.data.startswith(b"HEAD ")
    if not is_head and request.endpoint != "GET /readyz":
        headers = answer.headers
        wrong = error_problem(answer.status, headers.get("content-type", ""), headers.get("retry-after"), body)
        if wrong is not None:
            return f"{answer.status}: {wrong}"
    code = body["error"]["code"] if isinstance(body, dict) and "error" in body else ""
    if answer.status >= 500 and (answer.status, code) not in _FIT_5XX:
        return f"{answer.status} {code}"
    if answer.wait_s > _LATE_S:
        return f"{answer.status} {code} came late"
    return None


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except ValueError:
        return None


async def fuzz(folder: Path, seed: int, num_requests: int, toml: str = _TOML) -> Report:
    """Run the drill."""
    report, findings = Report("fuzz", seed), Findings()
    server = Server(folder, f'{toml}\n[database]\nurl = "sqlite:///{folder}/suffice.db"\n')
    async with running(server):
        key = await make_key(folder, "admin")
        async with httpx.AsyncClient(base_url=server.url, headers={"authorization": f"Bearer {key}"}) as client:
            document = (await client.get("/openapi.json")).json()
        use_key = await make_key(folder, "use")
        source = FuzzSource(document, key, seed)
        apps = FuzzSource(_for_applications(document), use_key, seed + 1)
        watch = HealthWatch(server.url)
        await _run(server, findings, source, apps, min(2000, num_requests // 4))
        warm_bytes, begun_s = server.rss_bytes(), time.perf_counter()
        async with watch.watching():
            await _run(server, findings, source, apps, num_requests - min(2000, num_requests // 4))
        growth_bytes, elapsed_s = server.rss_bytes() - warm_bytes, time.perf_counter() - begun_s
        is_alive = server.process is not None and server.process.returncode is None
        report.check("it ends in order", await server.stop() == 0)
    for kind, counts in findings.statuses.items():
        report.rows.append((kind, str(sum(counts.values())), statuses(counts)))
    report.rows.append(("latest refusal", f"{findings.longest_s:.2f} s", repr(findings.longest[:60])))
    health = f"longest {watch.longest_ms:.0f} ms, p99 {watch.p99_ms:.0f} ms"
    report.rows.append(("/healthz", str(len(watch.waits_s)), health))
    report.rows.append(("memory", f"{growth_bytes / 2**20:+.0f} MB", f"after {warm_bytes / 2**20:.0f} MB warm"))
    report.check("the server lives", is_alive)
    report.check("/healthz answers", watch.num_failed == 0, watch.num_failed)
    report.check("memory grows by 100 MB at most", growth_bytes <= _MAX_GROWTH_BYTES, growth_bytes)
    report.check("no traceback in the log", "Traceback" not in server.log, server.log.count("Traceback"))
    for problem, count in findings.problems.most_common(_MOST_TOLD):
        report.check(f"{count} x {problem}", is_kept=False, found=repr(findings.examples[problem][:400]))
    report.figures = {
        "requests": num_requests,
        "per_minute": round(60 * num_requests / max(elapsed_s, 1e-9)),
        "healthz_longest_ms": round(watch.longest_ms),
        "refusal_longest_s": round(findings.longest_s, 3),
        "rss_growth_mb": round(growth_bytes / 2**20, 1),
        "problems": sum(findings.problems.values()),
    }
    return report


async def _run(server: Server, findings: Findings, source: FuzzSource, apps: FuzzSource, num_requests: int) -> None:
    left = num_requests

    async def work() -> None:
        nonlocal left
        connection = Connection(server.port)
        while left > 0:
            left -= 1
            # A key of the administration is refused by the models' endpoints, and the other way round.
            request = (apps if left % 3 else source).draw()
            findings.judge(request, await connection.ask(request))
        connection.close()

    await asyncio.gather(*(work() for _ in range(_WORKERS)))


def _for_applications(document: dict[str, Any]) -> dict[str, Any]:
    return document | {
        "paths": {path: each for path, each in document["paths"].items() if not path.startswith("/admin")}
    }


async def make_key(folder: Path, scope: str) -> str:
    """Make a key by the command line, as an operator does."""
    command = ["keys", "create", "--scope", scope, "--json", "--config", str(folder / "suffice.toml")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.cli", *command), stdout=asyncio.subprocess.PIPE
    )
    told, _ = await process.communicate()
    return str(json.loads(told)["key"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--builtin", action="store_true", help="the built-in ladder instead of echoes")
    given = parser.parse_args()
    toml = _TOML if not given.builtin else "[learning]\nenabled = false\n[auth]\nrequired = 'always'\n"
    with tempfile.TemporaryDirectory(prefix="suffice-drill-") as folder:
        report = asyncio.run(fuzz(Path(folder), given.seed, given.requests, toml))
    return report.end(("what", "count", "found"))


if __name__ == "__main__":
    sys.exit(main())
