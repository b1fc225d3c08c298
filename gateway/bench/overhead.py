"""Measures what the gateway adds: CPU time a request and a streamed chunk, beside bare Starlette in the same run.

``python -m gateway.bench.overhead`` or ``suffice bench overhead``. Three servers in processes of their own, asked in
turn, round by round: Starlette alone answering the same; the gateway with echoing models, an API key checked and every
row committed to SQLite; the same with the built-in router. CPU time is the servers' own, by the kernel's count; the
client is another process. Ratios hold between machines, milliseconds do not. ``--beside TREE`` asks the gateways of
another checkout in the same rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gateway.bench.child_server import cpu_s, program
from gateway.bench.machine_card import card, print_card
from gateway.bench.request_load import LoadResult, post_bytes, run_load

# Unlike what the built-in router was fitted on: it goes to the top tier, and most of its answers are drawn for checks.
_FOREIGN = "What is the capital of France, and how many letters has its name? Answer in one short sentence, please."
# Of the router's own tasks: it is estimated, priced and sent to a tier below the top.
_FAMILIAR = "A farmer has 12 apples and gives 5 to each of 2 friends. How many apples are left?"
_FEW_CHUNKS, _MANY_CHUNKS = 1, 101
_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class BenchServer:
    """A running server under test."""

    name: str
    process_id: int
    port: int
    headers: Mapping[str, str]

    def measure(self, body: Mapping[str, Any], num_requests: int, num_connections: int) -> tuple[float, LoadResult]:
        """CPU seconds per request, and what the client saw."""
        request = post_bytes(_PATH, orjson.dumps(body), self.headers)
        before_s = cpu_s(self.process_id)
        result = asyncio.run(run_load(self.port, request, num_requests, num_connections))
        return (cpu_s(self.process_id) - before_s) / num_requests, result


@contextmanager
def servers(directory: Path, *, with_router: bool, beside: Path | None = None) -> Iterator[list[BenchServer]]:
    """Start all servers, those of another tree too; they stop when the block ends."""
    with ExitStack() as stack:
        found = []
        pid, port = stack.enter_context(program("gateway.bench.bare_server", log=directory / "starlette.log"))
        found.append(BenchServer("starlette", pid, port, {}))
        for name, router in (("gateway", "none"), ("gateway+router", "builtin"))[: 1 + with_router]:
            found.append(stack.enter_context(_gateway(name, directory, "--router", router)))
            if beside is not None:
                other = _gateway(f"{name} beside", directory, "--router", router, tree=beside)
                found.append(stack.enter_context(other))
        yield found


@contextmanager
def _gateway(name: str, directory: Path, *arguments: str, tree: Path | None = None) -> Iterator[BenchServer]:
    url, key, log = f"sqlite:///{directory / name}.db", directory / f"{name}.key", directory / f"{name}.log"
    needed = ("--database-url", url, "--key-file", str(key))
    with program("gateway.bench.overhead_server", *needed, *arguments, log=log, tree=tree) as (pid, port):
        yield BenchServer(name, pid, port, {"authorization": f"Bearer {key.read_text()}"})


def run(
    num_requests: int, num_connections: int, num_rounds: int, *, with_router: bool, beside: Path | None = None
) -> dict[str, Any]:
    """Return all figures, medians over the rounds."""
    few, many = (_body("word " * count, stream=True) for count in (_FEW_CHUNKS, _MANY_CHUNKS))
    bodies = {"foreign": _body(_FOREIGN), "familiar": _body(_FAMILIAR), "few": few, "many": many}
    figures: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        servers(Path(directory), with_router=with_router, beside=beside) as under_test,
    ):
        samples: dict[str, list[dict[str, float]]] = {server.name: [] for server in under_test}
        for server in under_test:
            server.measure(bodies["foreign"], num_requests // 4, num_connections)
        for _ in range(num_rounds):
            for server in under_test:
                samples[server.name].append(_round(server, bodies, num_requests, num_connections))
        for server in under_test:
            figures[server.name] = _medians(samples[server.name])
    bare = dict(figures["starlette"])
    for each in figures.values():
        for ratio, cpu_ms in (("cpu_vs_starlette", "cpu_ms"), ("familiar_vs_starlette", "familiar_cpu_ms")):
            each[ratio] = round(each[cpu_ms] / bare[cpu_ms], 2)
    return figures


def parts_us(num_requests: int, num_connections: int, *, with_router: bool) -> dict[str, float]:
    """CPU microseconds a request by part of the gateway, of a server of its own that is metered from within."""
    whole = _body(_FOREIGN)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        found = directory / "parts.json"
        arguments = ("--meter-file", str(found), "--router", "builtin" if with_router else "none")
        with _gateway("metered", directory, *arguments) as server:
            server.measure(whole, num_requests // 4, num_connections)
            os.kill(server.process_id, signal.SIGUSR1)
            server.measure(whole, num_requests, num_connections)
        parts: dict[str, float] = json.loads(found.read_text())
    return {name: round(value, 1) for name, value in parts.items()}


def _round(server: BenchServer, bodies: Mapping[str, Mapping[str, Any]], n: int, connections: int) -> dict[str, float]:
    foreign_s, seen = server.measure(bodies["foreign"], n, connections)
    familiar_s, _ = server.measure(bodies["familiar"], n, connections)
    few_s, _ = server.measure(bodies["few"], n // 4, connections)
    many_s, _ = server.measure(bodies["many"], n // 4, connections)
    return {
        "cpu_ms": foreign_s * 1e3,
        "familiar_cpu_ms": familiar_s * 1e3,
        "requests_per_s": seen.num_requests / seen.wall_s,
        "p50_ms": seen.p50_s * 1e3,
        "p99_ms": seen.p99_s * 1e3,
        "stream_cpu_ms": few_s * 1e3,
        "chunk_cpu_us": (many_s - few_s) / (_MANY_CHUNKS - _FEW_CHUNKS) * 1e6,
    }


def _body(prompt: str, *, stream: bool = False) -> dict[str, Any]:
    return {"model": "auto", "messages": [{"role": "user", "content": prompt.strip()}], "stream": stream}


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]}


def routing_ms(num_requests: int) -> dict[str, float]:
    """Return the routing decision alone, in this process: estimating with the built-in router, then deciding."""
    import random

    from classifier.router import ArtifactRouter
    from classifier.types import RouterRequest
    from gateway.config.settings import load_settings
    from gateway.models.loader import complete_policies
    from policies.routing_decision import decide
    from policies.types import RequestFacts, TierEstimate

    settings, router, rng = load_settings(environ={}), ArtifactRouter.load(), random.Random(0)
    policy = complete_policies(settings.policies, router)[settings.policy.name]
    request = RouterRequest((("user", _FAMILIAR),))
    estimate_s, decide_s = [], []
    for _ in range(num_requests):
        begun_s = time.process_time()
        found = router.predict([request])[0]
        estimated_s = time.process_time()
        estimates = tuple(TierEstimate(each.tier, each.p_right, each.p_as_good) for each in found.tiers)
        decide(RequestFacts(20, None, estimates, novelty=found.novelty), policy, settings.ladder, rng)
        estimate_s.append(estimated_s - begun_s)
        decide_s.append(time.process_time() - estimated_s)
    return {
        "estimate_ms": round(statistics.median(estimate_s) * 1e3, 4),
        "decide_ms": round(statistics.median(decide_s) * 1e3, 4),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="suffice bench overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000, help="per server and round")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-router", action="store_true", help="leave the built-in router out")
    parser.add_argument("--beside", type=Path, metavar="TREE", help="another checkout to measure in the same rounds")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    options = parser.parse_args(argv)
    facts = card() | {
        "load": f"{options.rounds} rounds of {options.requests} requests, {options.connections} connections"
    }
    figures: dict[str, Any] = run(
        options.requests,
        options.connections,
        options.rounds,
        with_router=not options.no_router,
        beside=options.beside,
    )
    if not options.no_router:
        figures["routing"] = routing_ms(options.requests)
    parts = parts_us(options.requests, options.connections, with_router=not options.no_router)
    whole_us = figures["gateway" if options.no_router else "gateway+router"]["cpu_ms"] * 1e3
    # The event loop, the kernel's share, the thread that writes the log; what else the machine did meanwhile, too.
    figures["parts_us"] = parts | {"the rest": round(whole_us - sum(parts.values()), 1)}
    if not options.json:
        print_card("Gateway overhead", facts)
        _print_table(figures)
    print(json.dumps({"bench": "overhead", "card": facts, "figures": figures}))
    return 0


def _print_table(figures: Mapping[str, Mapping[str, float]]) -> None:
    for name, values in figures.items():
        print(f"  {name:<15} " + "  ".join(f"{key} {value:g}" for key, value in values.items()))
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
