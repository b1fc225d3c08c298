"""Runs ``python -m engine.bench``: this engine beside its peers and floors, in one run.

Where there is a GPU (or with ``--shapes``) the shapes of :mod:`engine.bench.shapes` are measured with random weights
beside their physical floors, see :mod:`engine.bench.gpu`; ``--ladder`` drives four tiers together, on any device. On a
CPU: beside ``transformers`` on the same checkpoints. That peer computes the dequantised weights in float32; how often
our greedy tokens equal its own is reported beside the speed.

Prints the card, a table, and JSON lines (also written to ``--out``).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from engine.bench.gpu import BATCHES, FIGURES, PROMPT_LENGTHS, bench_shapes, write_card
from engine.bench.ladder import LIMITS, RUNS, bench_ladder, starts
from engine.bench.load_pass import LoadPass, run_our_engine
from engine.bench.machine_card import machine_card
from engine.bench.peer_server import ServerPeer
from engine.bench.peer_transformers import load_peer, run_one_after_another, run_padded_batch
from engine.bench.shapes import SHAPES
from engine.bench.workload import Job, describe, mixed_jobs
from engine.load.model import load_model
from engine.models.decoder import DecoderModel

BUILTIN = Path(__file__).parents[2] / "backends" / "builtin" / "models"


def main(argv: list[str] | None = None) -> None:
    args = _arguments(argv)
    if args.device != "cpu" or args.shapes or args.ladder:
        _on_gpu(args)
        return
    torch.set_num_threads(args.threads)
    card = machine_card()
    print(json.dumps(card, indent=2))
    sources = args.model or sorted(str(path) for path in BUILTIN.glob("tier*"))
    results = [_bench_model(source, args, float(str(card["read_gb_per_s"]))) for source in sources]
    line = json.dumps({"bench": "engine-cpu", "card": card, "seed": args.seed, "results": results})
    if args.out:
        args.out.write_text(line + "\n")
    print(line)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", help="folder or hub id; repeatable (default: the built-in tiers)")
    parser.add_argument("--cpu-compute", default="auto", choices=("auto", "int8", "int4", "exact"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument(
        "--repeats", type=int, default=3, help="the best of this many passes counts, for each contender"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--server", help="URL of an OpenAI-compatible server of the one --model, to compare with too")
    parser.add_argument("--out", type=Path, help="also write the JSON line here")
    gpu = parser.add_argument_group("random weights", "used on a GPU, or where --shapes or --ladder is given")
    gpu.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    gpu.add_argument("--load-format", choices=("dummy",), default="dummy", help="shapes have no files to read")
    gpu.add_argument(
        "--dummy-codes",
        choices=("random", "zero"),
        default="random",
        help="of 4-bit weights; zero is what vLLM's dummy loader measures with, and draws less power",
    )
    gpu.add_argument(
        "--activations",
        choices=("auto", "fp8"),
        default="auto",
        help="fp8 rounds those of 4-bit products to 8 bits where a step has 49 rows or more",
    )
    gpu.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), help="default on a GPU: the four of the ladder")
    gpu.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    gpu.add_argument("--prompt-lengths", type=int, nargs="+", default=list(PROMPT_LENGTHS))
    gpu.add_argument("--figures", nargs="+", choices=FIGURES, default=list(FIGURES), help="what to measure")
    gpu.add_argument("--at-once", type=int, default=512, help="most requests at once for the rate of output")
    gpu.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of this host that each shape is cut over")
    gpu.add_argument("--profile", action="store_true", help="say where the time of steps goes, by kind of kernel")
    gpu.add_argument("--peer", choices=("vllm",), help="the same through vLLM, where it can be imported")
    gpu.add_argument("--peer-folders", type=Path, help="folders of config.json files named as the shapes, for vLLM")
    _add_ladder(gpu)
    args = parser.parse_args(argv)
    if args.peer == "vllm" and args.peer_folders is None:
        parser.error("--peer vllm needs --peer-folders: vLLM reads a shape's config.json from a folder")
    if args.server and len(args.model or ()) != 1:
        parser.error("--server needs exactly one --model, the checkpoint that it serves")
    try:
        starts(args.ladder_start_rate, args.ladder_limits)
    except ValueError as error:
        parser.error(f"--ladder-start-rate: {error}")
    return args


def _add_ladder(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ladder", action="store_true", help="drive four tiers together with a Poisson mix")
    group.add_argument("--ladder-shapes", nargs=3, default=["3b-int4", "8b-int4", "70b-int4"], choices=sorted(SHAPES))
    group.add_argument(
        "--ladder-runs", nargs="+", choices=RUNS, default=list(RUNS), help="which of its comparisons to make"
    )
    group.add_argument(
        "--ladder-start-rate",
        nargs="+",
        type=float,
        default=[15.0],
        help="requests a second of the ladder's first load, once or for each of the limits; of the other runs a fifth",
    )
    group.add_argument("--ladder-seconds", type=float, default=10.0, help="length of each load in the ladder run")
    group.add_argument("--ladder-loads", type=int, default=8, help="most loads of each mix and pair of limits")
    group.add_argument(
        "--ladder-limits", nargs="+", choices=sorted(LIMITS), default=list(LIMITS), help="from close to wide"
    )


def _on_gpu(args: argparse.Namespace) -> None:
    args.shapes = args.shapes or ([] if args.ladder else ["3b-int4", "8b-int4", "8b-bf16", "70b-int4"])
    if args.out is not None:
        args.out.unlink(missing_ok=True)
    ceilings = write_card(args)
    if args.shapes:
        bench_shapes(args, ceilings)
    if args.ladder:
        bench_ladder(args)


def _bench_model(source: str, args: argparse.Namespace, read_gb_per_s: float) -> dict[str, object]:
    model = load_model(source, cpu_compute=args.cpu_compute)
    vocab_size = model.config.vocab_size
    single = mixed_jobs(1, seed=args.seed, vocab_size=vocab_size, prompt_range=(64, 64), output_range=(128, 128))
    many = mixed_jobs(args.concurrency, seed=args.seed + 1, vocab_size=vocab_size)
    peer = None if args.no_peer else load_peer(source)
    report: dict[str, object] = {
        # A folder's own name: where it lies is nobody else's business.
        "model": Path(source).name if Path(source).is_dir() else source,
        "parameters": _describe_weights(model),
        "cpu_compute": args.cpu_compute,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    for name, jobs in (("one", single), ("many", many)):
        contenders: dict[str, Callable[[list[Job]], LoadPass]] = {
            "ours": lambda jobs: run_our_engine(model, jobs, threads=args.threads)
        }
        if peer is not None:
            contenders["transformers"] = lambda jobs: run_one_after_another(peer, jobs)
            if len(jobs) > 1:
                contenders["transformers_padded"] = lambda jobs: run_padded_batch(peer, jobs)
        if args.server:
            contenders["server"] = ServerPeer(args.server, source).run
        runs = _measure(contenders, jobs, args.repeats)
        report[name] = {**describe(jobs), **_compare(runs)}
    decode = report["one"]
    assert isinstance(decode, dict)
    report["mbu"] = round(decode["ours"]["tokens_per_s"] * model.weight_bytes / (read_gb_per_s * 1e9), 3)
    _print_table(report)
    return report


def _describe_weights(model: DecoderModel) -> dict[str, int]:
    config = model.config
    return {
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "weight_bytes": model.weight_bytes,
    }


def _measure(
    contenders: dict[str, Callable[[list[Job]], LoadPass]], jobs: list[Job], repeats: int
) -> dict[str, LoadPass]:
    """Return each contender's best pass; passes alternate, so that a busy moment of the machine hits all of them."""
    best: dict[str, LoadPass] = {}
    for contender in contenders.values():
        contender(jobs[:2])
    for _ in range(repeats):
        for name, contender in contenders.items():
            run = contender(jobs)
            if name not in best or run.total_s < best[name].total_s:
                best[name] = run
    return best


def _compare(runs: dict[str, LoadPass]) -> dict[str, object]:
    ours = runs["ours"]
    out: dict[str, object] = {}
    for name, run in runs.items():
        row: dict[str, object] = {"tokens_per_s": round(run.tokens_per_s, 1), "total_s": round(run.total_s, 4)}
        if run.ttft_s:
            row["ttft_ms"] = _percentiles(run.ttft_s)
            row["itl_ms"] = _percentiles(run.itl_s)
        if name != "ours":
            row["ratio"] = round(ours.tokens_per_s / run.tokens_per_s, 2)
        if name != "ours" and run.answers:
            row["same_tokens"] = round(_share_of_equal_prefix(ours.answers, run.answers), 3)
        out[name] = row
    return out


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if len(seconds) == 1:
        return {"p50": round(seconds[0] * 1e3, 2)}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {name: round(cuts[at] * 1e3, 2) for name, at in (("p50", 49), ("p95", 94), ("p99", 98))}


def _share_of_equal_prefix(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Return the share of tokens before the first difference; after one, greedy answers go their own ways."""
    equal = 0
    for a, b in zip(ours, theirs, strict=True):
        equal += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return equal / sum(map(len, ours))


def _print_table(report: dict[str, object]) -> None:
    print(f"\n{report['model']}  ({report['cpu_compute']}, MBU at one request {report['mbu']})")
    for name in ("one", "many"):
        section = report[name]
        assert isinstance(section, dict)
        print(f"  {section['requests']} request(s), {section['prompt_tokens']} in, {section['output_tokens']} out")
        for contender in ("ours", "transformers", "transformers_padded", "server"):
            row = section.get(contender)
            if row is not None:
                beside = f"   ours / this = {row['ratio']:.2f}" if "ratio" in row else ""
                print(f"    {contender:20s} {row['tokens_per_s']:>9.1f} tok/s{beside}")
        print(f"    TTFT ms {section['ours']['ttft_ms']}   ITL ms {section['ours']['itl_ms']}")


if __name__ == "__main__":
    main()
