"""Measures the engine on a GPU, shape by shape: latencies and rates beside the physical floors, with random weights.

Definitions are those of :mod:`engine.bench.measures`; each figure is the median of ``--repeats`` passes (fewer where
one takes long), with the least, the most and their number beside it. Compiling and capturing come before, uncounted.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.bench.machine_card import machine_card
from engine.bench.measured_engines import OurEngine, VllmEngine
from engine.bench.measures import (
    LONG,
    OUTPUT_TOKENS,
    PREFILL_TOKENS,
    PROMPT_TOKENS,
    SLACK,
    MeasuredEngine,
    PromptSource,
    itl_s,
    output_rate,
    prefill_rate,
    repeated,
    ttft_s,
    warm_output,
    warm_prefill,
)
from engine.bench.profile import profile_decode, profile_prefill
from engine.bench.roofline import (
    DeviceCeilings,
    ModelCosts,
    decode_floor_s,
    measure_ceilings,
    prefill_floor_s,
    sustained_matmul_flops,
)
from engine.bench.shapes import SHAPES
from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.load.linear import Activations
from engine.load.model import dummy_model
from engine.models.decoder import DecoderModel
from engine.parallel.model import ParallelModel
from engine.parallel.rank_launcher import load_parallel

BATCHES = (1, 8, 32, 128)
PROMPT_LENGTHS = (512, 1024, 3968)
FIGURES = ("itl", "ttft", "prefill", "output")
# Requests at once for the rate of output: as many as the KV of the largest models leaves room for.
AT_ONCE = {"70b-int4": 256}
_MANY = 512


def write_card(args: argparse.Namespace) -> DeviceCeilings:
    """Say what is measured on, and with what; the ceilings of the device, measured now."""
    device = torch.device(args.device)
    ceilings = measure_ceilings(device)
    limits = ceilings.as_dict()
    if device.type == "cuda":
        limits["sustained_matmul_flops"] = float(f"{sustained_matmul_flops(device):.4g}")
    card = machine_card() | {
        "ceilings": limits,
        "seed": args.seed,
        "repeats": args.repeats,
        "dummy_codes": args.dummy_codes,
        "activations": args.activations,
    }
    print(json.dumps(card), flush=True)
    write_line({"bench": "engine-gpu", "card": card}, args.out)
    return ceilings


def bench_shapes(args: argparse.Namespace, ceilings: DeviceCeilings) -> None:
    """Measure every shape asked for; a failure is a row of its own and the rest goes on."""
    device = torch.device(args.device)
    rows: list[dict[str, Any]] = []
    for name in args.shapes:
        rows.append(_bench_shape(name, args, device, ceilings))
        print(json.dumps(rows[-1]), flush=True)
        write_line(rows[-1], args.out)
        _free(device)
    print_table(rows)


def _bench_shape(name: str, args: argparse.Namespace, device: torch.device, ceilings: DeviceCeilings) -> dict[str, Any]:
    config, num_gpus = SHAPES[name], args.tensor_parallel
    together = DeviceCeilings(num_gpus * ceilings.read_bytes_per_s, num_gpus * ceilings.matmul_flops)
    row: dict[str, Any] = {"shape": name, "tensor_parallel": num_gpus, "floors": _floors(config, together, args)}
    began_s = time.perf_counter()
    model = _load(config, args)
    row["load_s"] = round(time.perf_counter() - began_s, 2)
    row["weight_gb"] = round(model.weight_bytes / 1e9, 3)
    many = min(AT_ONCE.get(name, _MANY), args.at_once)
    kv_tokens = _kv_tokens(args, many)
    with OurEngine(model, max_num_seqs=many, kv_tokens=kv_tokens) as ours:
        row["ours"] = _measure_all(ours, args, many)
    if args.profile:
        row["profile"] = _profiles(model, args, ceilings)
    if device.type == "cuda":
        row["peak_gb"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 2)
    row["mbu"] = _mbu(config, row, together)
    if isinstance(model, ParallelModel):
        model.close()
    del model
    if args.peer == "vllm" and args.peer_folders:
        _free(device)
        with VllmEngine(config, str(args.peer_folders / name), max_num_seqs=many) as peer:
            row["vllm"] = _measure_all(peer, args, many)
    return row


def _load(config: ModelConfig, args: argparse.Namespace) -> DecoderModel | ParallelModel:
    if args.tensor_parallel == 1:
        activations: Activations = "auto" if config.quant is None else args.activations
        return dummy_model(config, device=args.device, seed=args.seed, codes=args.dummy_codes, activations=activations)
    devices = [f"{args.device}:{i}" if args.device == "cuda" else args.device for i in range(args.tensor_parallel)]
    return load_parallel(config, devices, load_format="dummy", seed=args.seed)


def _kv_tokens(args: argparse.Namespace, many: int) -> int:
    longest: int = max(*args.prompt_lengths, PROMPT_TOKENS + OUTPUT_TOKENS)
    decoding: int = max(args.batches) * (PROMPT_TOKENS + LONG + SLACK + 16)
    return max(many * (PROMPT_TOKENS + OUTPUT_TOKENS + 32), decoding, 16 * 2048 + 1024, 2 * longest)


def _measure_all(engine: MeasuredEngine, args: argparse.Namespace, many: int) -> dict[str, Any]:
    prompts = PromptSource(engine.vocab_size, args.seed)
    found: dict[str, Any] = {}

    def note(name: str, measure: Callable[[], float], scale: float, warm: int = 0) -> None:
        try:
            found[name] = repeated(measure, args.repeats, warm=warm).scaled(scale)
        except Exception as error:  # one figure that cannot be had must not cost the others
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(f"  {name}: {found[name]}", flush=True)

    for batch in args.batches if "itl" in args.figures else ():
        texts = prompts.draw(batch, PROMPT_TOKENS)
        note(f"itl_ms_b{batch}", lambda texts=texts: itl_s(engine, texts), 1e3)  # type: ignore[misc]
    for length in args.prompt_lengths if "ttft" in args.figures else ():
        # A step with prompts is compiled when it first comes, and captured when it comes again.
        note(f"ttft_ms_{length}", lambda length=length: ttft_s(engine, prompts, length), 1e3, warm=2)  # type: ignore[misc]
    if "prefill" in args.figures:
        warm_prefill(engine, prompts)
        note("prefill_tok_s", lambda: prefill_rate(engine, prompts), 1.0)
    if "output" in args.figures:
        warm_output(engine, prompts, many)
        note(f"output_tok_s_n{many}", lambda: output_rate(engine, prompts, many), 1.0)
    return found


def _floors(config: ModelConfig, ceilings: DeviceCeilings, args: argparse.Namespace) -> dict[str, float]:
    costs = ModelCosts.of(config)
    context = PROMPT_TOKENS + OUTPUT_TOKENS // 2
    decode = {f"itl_ms_b{b}": decode_floor_s(costs, ceilings, b, context) * 1e3 for b in args.batches}
    prefill = {f"ttft_ms_{n}": prefill_floor_s(costs, ceilings, n) * 1e3 for n in args.prompt_lengths}
    rate = 2048 / prefill_floor_s(costs, ceilings, 2048)
    return {name: round(value, 4) for name, value in (decode | prefill | {"prefill_tok_s": rate}).items()}


def _mbu(config: ModelConfig, row: dict[str, Any], ceilings: DeviceCeilings) -> float | None:
    """Return the share of the measured read bandwidth that one sequence's decode uses."""
    found: float | None = row["ours"].get("itl_ms_b1", {}).get("median")
    if not found:
        return None
    return round(ModelCosts.of(config).weight_bytes / (found * 1e-3) / ceilings.read_bytes_per_s, 3)


def _profiles(
    model: DecoderModel | ParallelModel, args: argparse.Namespace, ceilings: DeviceCeilings
) -> list[dict[str, object]]:
    config = EngineConfig(
        num_blocks=4096,
        max_num_seqs=64,
        max_batch_tokens=8192,
    )
    engine = Engine(model, config, start=False)
    prompts = PromptSource(model.config.vocab_size, args.seed)
    wanted: list[Callable[[], dict[str, object]]] = [
        partial(profile_decode, engine, prompts, batch, ceilings) for batch in args.batches if batch <= 32
    ]
    # A whole step of the rate of prefill, and the longest prompt alone.
    wanted += [
        partial(profile_prefill, engine, prompts, count, num_tokens, ceilings)
        for count, num_tokens in ((8192 // PREFILL_TOKENS, PREFILL_TOKENS), (1, max(args.prompt_lengths)))
    ]
    found: list[dict[str, object]] = []
    try:
        for measure in wanted:
            try:
                found.append(measure())
            except Exception as error:
                traceback.print_exc()
                found.append({"error": f"{type(error).__name__}: {error}"[:300]})
    finally:
        engine.close()
    return found


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        import gc

        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line a figure: measured, floor, their ratio, and the peer where there is one."""
    for row in rows:
        print(f"\n{row['shape']}: {row['weight_gb']} GB, loaded in {row['load_s']} s, MBU {row['mbu']}")
        for name, found in row["ours"].items():
            if "error" in found:
                print(f"  {name:18s} {found['error']}")
                continue
            floor = row["floors"].get(name)
            beside = "" if floor is None else f"   floor {floor:10.3f}   x{_over(name, found['median'], floor):.2f}"
            peer = row.get("vllm", {}).get(name, {}).get("median")
            versus = "" if peer is None else f"   vllm {peer:10.3f}"
            print(f"  {name:18s} {found['median']:12.3f} [{found['min']:.3f}, {found['max']:.3f}]{beside}{versus}")


def _over(name: str, value: float, floor: float) -> float:
    return floor / value if name.endswith("tok_s") else value / floor


def write_line(row: dict[str, Any], out: Path | None) -> None:
    """Add one JSON object to a file of them, as soon as it is known."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
