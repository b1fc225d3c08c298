"""Measures four tiers on one device under a Poisson mix, beside everything on the top tier's model, at the same limits.

Tiers: three shapes, and the third once more, thinking first and with drafts of the first, by the same engine. Each
request has 512 tokens in and 128 out, of tier 4 also 143 of thought, which is what the built-in top tier writes on
average; the mix is 60 / 20 / 15 / 5 %. It stands beside everything on tier 3, and beside everything on tier 4, the tier
whose quality the ladder holds. The drafter is right for a set share of tokens (see
:mod:`engine.bench.permutation_model`): stated, not measured. For each pair of limits the engines aim at its time
between tokens. The highest load counts of which nine of ten requests kept both limits, over all tiers; beside it stands
the highest that every tier kept by itself. Arrivals are a Poisson process of a given number in a given time, the mix is
met exactly, and every request of a load has ended before it is judged.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from engine.bench.gpu import write_line
from engine.bench.measures import OUTPUT_TOKENS, PROMPT_TOKENS, PromptSource
from engine.bench.permutation_model import RESIDUAL_SCALE, successors, walk
from engine.bench.shapes import SHAPES
from engine.config import EngineConfig
from engine.device.device_share import DeviceShare
from engine.device.graph_cache import LADDER
from engine.device.runner import DeviceRunner
from engine.device.step_shapes import QUERY_LENGTHS
from engine.device.warm_up import padded_decodes, warm_up
from engine.drafter import Drafter
from engine.drafter_factory import model_drafter
from engine.engine import Engine
from engine.errors import EngineError
from engine.kv_cache import KVCache
from engine.load.dummy import Codes
from engine.load.linear import Activations
from engine.load.model import dummy_model
from engine.models.decoder import DecoderModel
from engine.request import Event, Request, RequestEnding, SamplingParams, TokenChunk
from engine.speculator import Speculator

MIX = (0.60, 0.20, 0.15, 0.05)
RUNS: Mapping[str, tuple[float, ...]] = {
    "ladder": MIX,
    "all_on_tier_3": (0.0, 0.0, 1.0, 0.0),
    "all_on_tier_4": (0.0, 0.0, 0.0, 1.0),
}
THINKING_TOKENS = 143
ACCEPTANCE = 0.7
# What a caller bears: seconds to the first token, and from one to the next. "interactive" is MLPerf Inference 5.0's for
# Llama 2 70B (mlcommons.org/2025/04/llm-inference-v5), which asks it of 99 in 100.
LIMITS: Mapping[str, tuple[float, float]] = {
    "interactive": (0.45, 0.04),
    "tight": (0.5, 0.05),
    "wide": (2.0, 0.1),
}
# vLLM 0.23 on an H200, everything on the 70B, 256 requests of this size at once: 1,025 output tokens a second.
_PEER_RATE = 1025 / OUTPUT_TOKENS
_GROWTH = 1.15
# Starting load of each run, relative to the ladder's: about the inverse ratio of their work.
_STARTS: Mapping[str, float] = {"ladder": 1.0, "all_on_tier_3": 0.2, "all_on_tier_4": 0.2}
# A capture in the midst of a load would count against it, so every engine is warm for as many sequences as it serves at
# once; of these sizes for drafts too, which do not pay beside more.
_MAX_NUM_SEQS = 256
_DRAFTED_SIZES = tuple(size for size in LADDER if size <= 32)
# Of the memory for KV, by engine; tiers 3 and 4 are one.
_SHARES_OF_KV = (0.2, 0.2, 0.6)
_ENGINE_OF_TIER = (0, 1, 2, 2)
_DRAFTING_TIER = 3
_POLL_S = 0.05
# Thirty-two requests of the load at once.
_DRAFTER_BLOCKS = 32 * 41


@dataclass(slots=True)
class RequestTimes:
    """Notes one request's times, seconds; ``loop`` is None because events come on the engine's own thread."""

    tier: int
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    ending: RequestEnding | None = None
    loop: None = None
    done: threading.Event = field(default_factory=threading.Event)

    def put(self, event: Event) -> None:
        if isinstance(event, TokenChunk):
            self.last_s = time.perf_counter()
            self.first_s = self.first_s or self.last_s
            self.num_tokens += len(event.token_ids)
        else:
            self.ending = event
            self.done.set()

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def itl_s(self) -> float:
        return (self.last_s - self.first_s) / max(self.num_tokens - 1, 1)


class TierEngines:
    """Holds a ladder's engines; tiers 3 and 4 are requests to one of them, and the drafter has tier 1's weights."""

    def __init__(
        self,
        shapes: Sequence[str],
        device: torch.device,
        *,
        kv_bytes: int,
        seed: int,
        activations: Activations,
        codes: Codes,
    ) -> None:
        self.models: list[DecoderModel] = []
        for index, shape in enumerate(shapes):
            model = dummy_model(
                SHAPES[shape],
                device=device,
                seed=seed + index,
                residual_scale=RESIDUAL_SCALE,
                activations="auto" if SHAPES[shape].quant is None else activations,
                codes=codes,
            )
            agreement = ACCEPTANCE if index == 0 else 1.0
            walk(model, successors(model.config.vocab_size, agreement=agreement, seed=seed))
            self.models.append(model)
        self.vocab_size = self.models[0].config.vocab_size
        share = DeviceShare()
        self.engines = [self._engine(i, share, int(kv_bytes * part)) for i, part in enumerate(_SHARES_OF_KV)]

    def _engine(self, index: int, share: DeviceShare, kv_bytes: int) -> Engine:
        config = EngineConfig(
            kv_cache_bytes=kv_bytes,
            context_length=1024,
            max_num_seqs=_MAX_NUM_SEQS,
            max_batch_tokens=2048,
            max_waiting=1 << 20,
        )
        speculator = Speculator(self._drafter(config)) if index == 2 else None
        return Engine(self.models[index], config, speculator=speculator, share=share, name=f"engine-{index + 1}")

    def _drafter(self, config: EngineConfig) -> Drafter:
        draft = self.models[0]
        kv = KVCache(draft.config, _DRAFTER_BLOCKS, 16, dtype=draft.dtype, device=draft.device)
        return model_drafter(
            draft,
            kv,
            vocab_size=self.vocab_size,
            max_draft_tokens=config.max_draft_tokens,
            max_sequences=config.max_num_seqs,
        )

    def submit(self, request: Request, sink: RequestTimes) -> None:
        """Send a request to the engine of its sink's tier."""
        self.engines[_ENGINE_OF_TIER[sink.tier]].submit(request, sink)

    def set_itl_target(self, itl_target_s: float) -> None:
        for engine in self.engines:
            engine.set_itl_target(itl_target_s)

    def warm_up(self) -> None:
        """Compile and capture what loads of this kind need."""
        for engine in self.engines:
            if isinstance(engine.core.runner, DeviceRunner):
                warm_up(engine, temperatures=(0.0,), most_sequences=_MAX_NUM_SEQS)
                if engine.core.speculator is not None:
                    _warm_checks(engine)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def _warm_checks(engine: Engine, timeout_s: float = 600.0) -> None:
    """Compile and capture the checks of drafts; blocks until it is done.

    Raises
    ------
    EngineError
        One of them failed, the engine was closed before the last, or they took longer than ``timeout_s``.
    """
    most = engine.config.max_draft_tokens
    lengths = sorted({next(length for length in QUERY_LENGTHS if length > count) for count in range(1, most + 1)})
    done = threading.Event()

    def checks() -> Iterator[None]:
        yield from padded_decodes(engine, _DRAFTED_SIZES, temperatures=(0.0,), query_lengths=lengths)
        done.set()

    engine.when_quiet(checks())
    end_s = time.monotonic() + timeout_s
    # Nobody sets the event where one failed, which drops the rest, or where the engine is closed, which drops all.
    while not done.wait(_POLL_S) and engine.has_chores and time.monotonic() < end_s:
        pass
    if not done.is_set():
        why = f"were not done after {timeout_s:g} s" if engine.has_chores else "were left undone; the log says why"
        raise EngineError(f"{engine.name}: the checks of drafts {why}.")


def bench_ladder(args: argparse.Namespace) -> None:
    """Do the runs asked for under each pair of limits; write one row with what they bore and its ratios."""
    device = torch.device(args.device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 28
    weights = 50e9 if "70b-int4" in args.ladder_shapes else 0
    kv_bytes = int(0.8 * (free - weights))
    tiers = TierEngines(
        args.ladder_shapes,
        device,
        kv_bytes=kv_bytes,
        seed=args.seed,
        activations=args.activations,
        codes=args.dummy_codes,
    )
    search = _LoadSearch(tiers, args)
    found = []
    try:
        began_s = time.perf_counter()
        tiers.warm_up()
        search.warm_up()
        print(f"  warm after {time.perf_counter() - began_s:.1f} s", flush=True)
        rates: dict[str, float] = {}
        for limits, start in zip(args.ladder_limits, starts(args.ladder_start_rate, args.ladder_limits), strict=True):
            if start is not None:
                rates = {name: start * _STARTS[name] for name in args.ladder_runs}
            runs = {name: search.highest(name, limits, start=rate) for name, rate in rates.items()}
            rates = {name: run["best"] or rates[name] for name, run in runs.items()}
            found.append(_compare(limits, runs))
    finally:
        tiers.close()
    row = {
        "bench": "engine-ladder",
        "shapes": list(args.ladder_shapes),
        "mix": MIX,
        "set_acceptance": ACCEPTANCE,
        "seconds": args.ladder_seconds,
        "limits": found,
    }
    print(json.dumps(row), flush=True)
    write_line(row, args.out)


def starts(rates: Sequence[float], limits: Sequence[str]) -> list[float | None]:
    """Return the ladder's first load under each pair of limits; None goes on from the highest that held before.

    Raises
    ------
    ValueError
        There is neither one rate nor one for each of ``limits``, or one is not above 0.
    """
    if len(rates) not in (1, len(limits)):
        raise ValueError(f"got {len(rates)} rates for {len(limits)} pairs of limits; give one, or one for each of them")
    if min(rates) <= 0.0:
        raise ValueError(f"got a rate of {min(rates):g} requests a second; it must be above 0")
    return [*rates, *[None] * (len(limits) - len(rates))]


def _compare(limits: str, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    ttft_s, itl_s = LIMITS[limits]
    ladder = runs["ladder"]["best"] if "ladder" in runs else None
    rates = {name: run["best"] for name, run in runs.items() if name != "ladder"} | {"peers_70b": _PEER_RATE}
    ratios = {name: round(ladder / rate, 2) for name, rate in rates.items() if ladder and rate}
    return {"name": limits, "ttft_p90_s": ttft_s, "itl_p90_s": itl_s, "runs": runs, "ladder_to": ratios}


class _LoadSearch:
    """Runs loads one after another, none with a prompt of another's: what is in the prefix cache is of no use."""

    def __init__(self, tiers: TierEngines, args: argparse.Namespace) -> None:
        self._tiers = tiers
        self._args = args
        self._num_loads = 0

    def warm_up(self) -> None:
        """Let the drafter compile and capture, by short loads of the runs that have drafts."""
        for run in self._args.ladder_runs:
            if RUNS[run][_DRAFTING_TIER]:
                rate = max(self._args.ladder_start_rate) * _STARTS[run]
                self._run(run, "tight", rate, self._args.ladder_seconds / 5)

    def highest(self, run: str, limits: str, *, start: float) -> dict[str, Any]:
        """Raise the load from ``start`` until the limits break, or lower it until they hold; the highest that held."""
        self._tiers.set_itl_target(LIMITS[limits][1])
        loads: list[dict[str, Any]] = []
        rate, growth = start, _GROWTH
        while len(loads) < self._args.ladder_loads:
            load = self._run(run, limits, rate, self._args.ladder_seconds)
            print(f"  {limits} {run} {rate:.1f}/s: {json.dumps(load)}", flush=True)
            write_line({"bench": "engine-ladder-load", "limits": limits, "run": run} | load, self._args.out)
            loads.append(load)
            if len(loads) == 1 and not load["holds"]:
                growth = 1 / _GROWTH
            elif load["holds"] != (growth > 1):
                break
            rate *= growth
        return {
            "best": _best(loads, "holds"),
            "best_in_every_tier": _best(loads, "holds_in_every_tier"),
            "loads": loads,
        }

    def _run(self, run: str, limits: str, rate: float, seconds: float) -> dict[str, Any]:
        self._num_loads += 1
        prompts = PromptSource(self._tiers.vocab_size, 1000 * self._args.seed + self._num_loads)
        load = _run_load(self._tiers, RUNS[run], prompts, rate=rate, seconds=seconds, seed=self._args.seed)
        return judge(load, *LIMITS[limits])


def judge(load: dict[str, Any], ttft_s: float, itl_s: float) -> dict[str, Any]:
    """Say of a load whether nine of ten of its requests, and of each tier's, kept both limits."""

    def keeps(served: dict[str, Any]) -> bool:
        return bool(served["ttft_p90_ms"] <= ttft_s * 1e3 and served["itl_p90_ms"] <= itl_s * 1e3)

    if "errors" in load:
        return load | {"holds": False, "holds_in_every_tier": False}
    return load | {"holds": keeps(load), "holds_in_every_tier": all(map(keeps, load["tiers"].values()))}


def _best(loads: Sequence[dict[str, Any]], holds: str) -> float | None:
    return max((float(load["rate"]) for load in loads if load[holds]), default=None)


def _arrivals(rate: float, seconds: float, mix: Sequence[float], rng: random.Random) -> list[tuple[float, int]]:
    """Draw (time, tier) of each request: as many as the rate says, at independent uniform times."""
    count = max(round(rate * seconds), 1)
    bounds = [sum(mix[: tier + 1]) * count for tier in range(len(mix))]
    tiers = [next(t for t, bound in enumerate(bounds) if i + 0.5 < bound + 1e-9) for i in range(count)]
    rng.shuffle(tiers)
    return list(zip(sorted(rng.uniform(0.0, seconds) for _ in range(count)), tiers, strict=True))


def _run_load(
    tiers: TierEngines, mix: Sequence[float], prompts: PromptSource, *, rate: float, seconds: float, seed: int
) -> dict[str, Any]:
    """Send requests for a while, wait for all of them, and say how they fared."""
    arrivals = _arrivals(rate, seconds, mix, random.Random(seed))
    texts = prompts.draw(len(arrivals), PROMPT_TOKENS)
    samplings = [
        SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS + thought, ignore_eos=True)
        for thought in (0, 0, 0, THINKING_TOKENS)
    ]
    served: list[RequestTimes] = []
    late_s: list[float] = []
    meter = HostMeter(tiers.engines)
    began_s = time.perf_counter()
    for index, ((at, tier), text) in enumerate(zip(arrivals, texts, strict=True)):
        wait_s = began_s + at - time.perf_counter()
        if wait_s > 0.0:
            time.sleep(wait_s)
            late_s.append(time.perf_counter() - began_s - at)
        sink = RequestTimes(tier, began_s + at)
        served.append(sink)
        request = Request(f"load-{rate}-{index}", tuple(text), samplings[tier], speculate=tier == _DRAFTING_TIER)
        tiers.submit(request, sink)
    for sink in served:
        sink.done.wait()
    elapsed_s = time.perf_counter() - began_s
    return _report(served, elapsed_s, len(arrivals) / seconds) | {"host": meter.read(elapsed_s, late_s)}


class HostMeter:
    """Measures what the threads that step engines cost the host, from when this is made."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._before = [self._now(engine) for engine in engines]
        self._process_s = time.process_time()

    def read(self, elapsed_s: float, late_s: Sequence[float]) -> dict[str, Any]:
        """Return the cores used, and by engine the steps and milliseconds of host time a step.

        ``late_s`` is by how much a thread that slept came late: beside the timer's own error, its wait for the
        interpreter.
        """
        after = [self._now(engine) for engine in self._engines]
        each = []
        for (steps, cpu_s), (steps_before, cpu_before_s) in zip(after, self._before, strict=True):
            count = max(steps - steps_before, 1)
            each.append({"steps": count, "host_cpu_ms": round((cpu_s - cpu_before_s) / count * 1e3, 3)})
        return {
            "cores": round((time.process_time() - self._process_s) / elapsed_s, 3),
            "late_p90_ms": round(_p90(late_s) * 1e3, 3) if late_s else None,
            "engines": each,
        }

    @staticmethod
    def _now(engine: Engine) -> tuple[int, float]:
        assert engine.thread_id is not None
        return engine.stats().num_steps, time.clock_gettime(time.pthread_getcpuclockid(engine.thread_id))


def _report(served: list[RequestTimes], elapsed_s: float, rate: float) -> dict[str, Any]:
    errors = [s.ending.error for s in served if s.ending is not None and s.ending.error is not None]
    if errors:
        return {"rate": round(rate, 2), "errors": [str(e)[:200] for e in errors[:3]]}
    tiers = {tier: [s for s in served if s.tier == tier] for tier in sorted({s.tier for s in served})}
    return {
        "rate": round(rate, 2),
        "ended_per_s": round(len(served) / elapsed_s, 2),
        **_latencies(served),
        "tiers": {f"tier_{tier + 1}": _latencies(mine) | _acceptance(mine) for tier, mine in tiers.items()},
    }


def _latencies(served: Sequence[RequestTimes]) -> dict[str, float]:
    ttft, itl = [s.ttft_s * 1e3 for s in served], [s.itl_s * 1e3 for s in served]
    return {
        "requests": len(served),
        "ttft_p50_ms": round(median(ttft), 1),
        "ttft_p90_ms": round(_p90(ttft), 1),
        "itl_p50_ms": round(median(itl), 2),
        "itl_p90_ms": round(_p90(itl), 2),
        "device_s": round(sum(s.ending.compute_s for s in served if s.ending) / len(served), 5),
    }


def _acceptance(served: list[RequestTimes]) -> dict[str, float]:
    endings = [s.ending for s in served if s.ending is not None]
    drafted = sum(ending.num_draft_tokens for ending in endings)
    return {"acceptance": round(sum(e.num_accepted_tokens for e in endings) / drafted, 3)} if drafted else {}


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[int(0.9 * (len(values) - 1))]
