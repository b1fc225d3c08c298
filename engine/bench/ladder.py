"""Four tiers on one device under a Poisson mix, beside everything on the top tier's model, at the same limits.

Tiers: three shapes, and the third once more with drafts of the first. Each request has 512 tokens in and 128 out; the
mix is 60 / 20 / 15 / 5 %. The drafter is right for a set share of tokens (see :mod:`engine.bench.chains`): stated, not
measured. Loads rise until a limit breaks; the last load that held is the figure.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.bench.chains import RESIDUAL_SCALE, successors, walk
from engine.bench.measures import OUTPUT_TOKENS, PROMPT_TOKENS, Prompts
from engine.bench.shapes import SHAPES
from engine.config import EngineConfig
from engine.draft import Drafter
from engine.drafters import model_drafter
from engine.engine import Engine
from engine.kv_cache import KVCache
from engine.load.model import dummy_model
from engine.models.decoder import DecoderModel
from engine.request import Chunk, Ending, Event, Request, SamplingParams
from engine.speculator import Speculator

MIX = (0.60, 0.20, 0.15, 0.05)
ACCEPTANCE = 0.7
# What a caller bears: nine of ten requests begin within the one and go on within the other.
TTFT_LIMIT_S, ITL_LIMIT_S = 2.0, 0.1
_GROWTH = 1.4
_MAX_LOADS = 8
_SHARES_OF_KV = (0.2, 0.2, 0.45, 0.15)
# Thirty-two requests of the load at once.
_DRAFTER_BLOCKS = 32 * 41


@dataclass(slots=True)
class Served:
    """One request's times, seconds; ``loop`` is None because events come on the engine's own thread."""

    tier: int
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    ending: Ending | None = None
    loop: None = None
    done: threading.Event = field(default_factory=threading.Event)

    def put(self, event: Event) -> None:
        if isinstance(event, Chunk):
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


class FourTiers:
    """The engines of a ladder; tiers 3 and 4 share weights, and the drafter is tier 1's."""

    def __init__(self, shapes: Sequence[str], device: torch.device, *, kv_bytes: int, seed: int) -> None:
        self.models: list[DecoderModel] = []
        for index, shape in enumerate(shapes):
            model = dummy_model(SHAPES[shape], device=device, seed=seed + index, residual_scale=RESIDUAL_SCALE)
            agreement = ACCEPTANCE if index == 0 else 1.0
            walk(model, successors(model.config.vocab_size, agreement=agreement, seed=seed))
            self.models.append(model)
        self.vocab_size = self.models[0].config.vocab_size
        by_tier = [*self.models, self.models[-1]]
        self.engines = [self._engine(i, by_tier[i], int(kv_bytes * share)) for i, share in enumerate(_SHARES_OF_KV)]

    def _engine(self, index: int, model: DecoderModel, kv_bytes: int) -> Engine:
        config = EngineConfig(
            kv_cache_bytes=kv_bytes,
            context_length=1024,
            max_num_seqs=256,
            max_batch_tokens=2048,
            itl_target_s=0.05,
            max_waiting=1 << 20,
        )
        speculator = Speculator(self._drafter(config)) if index == 3 else None
        return Engine(model, config, speculator=speculator, name=f"tier-{index + 1}")

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

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def bench_ladder(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the mix and everything on tier 3; one row with both and their ratio."""
    device = torch.device(args.device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 28
    weights = 50e9 if "70b-int4" in args.ladder_shapes else 0
    tiers = FourTiers(args.ladder_shapes, device, kv_bytes=int(0.8 * (free - weights)), seed=args.seed)
    try:
        for tier in range(4):
            _run_load(tiers, [float(t == tier) for t in range(4)], rate=4.0, seconds=3.0, seed=args.seed)
        mixed = _highest(tiers, MIX, args, start=args.ladder_start_rate)
        top_only = _highest(tiers, (0.0, 0.0, 1.0, 0.0), args, start=args.ladder_start_rate / 6)
    finally:
        tiers.close()
    row = {
        "bench": "engine-ladder",
        "shapes": list(args.ladder_shapes),
        "mix": MIX,
        "set_acceptance": ACCEPTANCE,
        "limits": {"ttft_p90_s": TTFT_LIMIT_S, "itl_p90_s": ITL_LIMIT_S},
        "ladder": mixed,
        "all_on_tier_3": top_only,
        "ratio": _ratio(mixed, top_only),
    }
    print(json.dumps(row), flush=True)
    return [row]


def _ratio(mixed: dict[str, Any], top_only: dict[str, Any]) -> float | None:
    if not mixed["best"] or not top_only["best"]:
        return None
    return round(float(mixed["best"]["rate"]) / float(top_only["best"]["rate"]), 2)


def _highest(tiers: FourTiers, mix: Sequence[float], args: argparse.Namespace, *, start: float) -> dict[str, Any]:
    """Raise the load by two fifths until a limit breaks, or halve it until they hold."""
    loads: list[dict[str, Any]] = []
    best: dict[str, Any] | None = None
    rate = start
    for _ in range(_MAX_LOADS):
        found = _run_load(tiers, mix, rate=rate, seconds=args.ladder_seconds, seed=args.seed)
        loads.append(found)
        print(f"  {rate:.1f}/s: {json.dumps(found)}", flush=True)
        if found["holds"]:
            best = found
            rate *= _GROWTH
        elif best is None:
            rate /= 2
        else:
            break
    return {"best": best, "loads": loads}


def _run_load(tiers: FourTiers, mix: Sequence[float], *, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    """Send Poisson arrivals for a while, wait for all of them, and say how they fared."""
    rng, prompts = random.Random(seed), Prompts(tiers.vocab_size, seed + round(rate * 1000))
    arrivals, at = [], rng.expovariate(rate)
    while at < seconds:
        arrivals.append((at, rng.choices(range(4), mix)[0]))
        at += rng.expovariate(rate)
    texts = prompts.draw(len(arrivals), PROMPT_TOKENS)
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    served: list[Served] = []
    began_s = time.perf_counter()
    for index, ((at, tier), text) in enumerate(zip(arrivals, texts, strict=True)):
        time.sleep(max(0.0, began_s + at - time.perf_counter()))
        sink = Served(tier, began_s + at)
        served.append(sink)
        tiers.engines[tier].submit(Request(f"load-{rate}-{index}", tuple(text), sampling), sink)
    for sink in served:
        sink.done.wait()
    return _report(served, time.perf_counter() - began_s, rate)


def _report(served: list[Served], elapsed_s: float, rate: float) -> dict[str, Any]:
    errors = [s.ending.error for s in served if s.ending is not None and s.ending.error is not None]
    if errors or not served:
        return {"rate": rate, "holds": not errors, "errors": [str(e)[:200] for e in errors[:3]]}
    ttft, itl = _p90([s.ttft_s for s in served]), _p90([s.itl_s for s in served])
    per_tier = {}
    for tier in sorted({s.tier for s in served}):
        mine = [s for s in served if s.tier == tier]
        per_tier[f"tier_{tier + 1}"] = {
            "requests": len(mine),
            "ttft_p90_ms": round(_p90([s.ttft_s for s in mine]) * 1e3, 1),
            "itl_p90_ms": round(_p90([s.itl_s for s in mine]) * 1e3, 2),
            "device_s": round(sum(s.ending.compute_s for s in mine if s.ending) / len(mine), 5),
            **_acceptance(mine),
        }
    return {
        "rate": round(rate, 2),
        "requests_per_s": round(len(served) / elapsed_s, 2),
        "holds": ttft <= TTFT_LIMIT_S and itl <= ITL_LIMIT_S,
        "ttft_p90_ms": round(ttft * 1e3, 1),
        "itl_p90_ms": round(itl * 1e3, 2),
        "device_s": round(sum(s.ending.compute_s for s in served if s.ending) / len(served), 5),
        "tiers": per_tier,
    }


def _acceptance(served: list[Served]) -> dict[str, float]:
    endings = [s.ending for s in served if s.ending is not None]
    drafted = sum(ending.num_draft_tokens for ending in endings)
    return {"acceptance": round(sum(e.num_accepted_tokens for e in endings) / drafted, 3)} if drafted else {}


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[int(0.9 * (len(values) - 1))]
