"""Measures routing by estimated benefit on public outcomes of real models, and what a prediction costs.

``python -m classifier.bench --data DIR [--embedding MODEL | --fine-tune MODEL] [--json]`` reads a folder as ``suffice
evaluate`` does (see docs/evaluation.md) and prints, per benchmark, the same figures: APGR with its interval, CPT50,
CPT80 and the share of strong calls that holds 95 % of the strong model's quality, for router, prompt length, chance and
an oracle. It adds what the command has not: text encoders as further features, and the time of a prediction. The folds
are the data's own, whole groups of near-duplicate prompts apart.

With ``--fine-tune`` half of the rows outside a fold teach the model, 15 % say when to stop, and the router is fitted on
the rest with what the model then says, as a retrain does it; ``--as-split`` fits the router without the model on that
same rest, to compare with.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from classifier.embedding import Embedder, SentenceTransformerEmbedder
from classifier.encoder_tuner import TuningOptions, TuningRows, tune_encoder
from classifier.folds import group_folds
from classifier.graded_report import report_pair
from classifier.graded_table import read_graded
from classifier.metrics import without_nan
from classifier.options import FitOptions
from classifier.router import ArtifactRouter
from classifier.router_estimates import ask_across_folds
from classifier.table import TrainingTable
from classifier.training import fit_router
from classifier.types import RouterRequest

BENCHMARKS = ("routellm_mmlu", "routellm_gsm8k")
MODELS = ("Mixtral-8x7B-Instruct-v0.1", "gpt-4-1106-preview")
_TIMED_PROMPTS = 500
# Of rows outside a fold, twentieths: to fine-tune on, and to stop by.
_PARTS, _FIT_PARTS, _NEWER_PARTS = 20, 10, 3


Prepare = Callable[[TrainingTable], tuple[TrainingTable, Embedder | None]]
"""Given the rows outside a fold: those to fit a router on, and what else it reads."""


def as_given(embedder: Embedder | None) -> Prepare:
    """Give all the rows."""
    return lambda part: (part, embedder)


def fine_tuned(model: str | None, options: TuningOptions, seed: int) -> Prepare:
    """Fine-tune a model on half of the rows and give those it has not seen; no model gives these rows alone."""

    def prepare(part: TrainingTable) -> tuple[TrainingTable, Embedder | None]:
        dealt = group_folds(part.groups, _PARTS, seed)
        rest = part.take(dealt >= _FIT_PARTS + _NEWER_PARTS)
        if model is None:
            return rest, None
        taught, newer = (
            _tuning_rows(part.take(is_in))
            for is_in in (dealt < _FIT_PARTS, (dealt >= _FIT_PARTS) & (dealt < _FIT_PARTS + _NEWER_PARTS))
        )
        tuned = tune_encoder(model, taught, newer, options, seed=seed)
        print(json.dumps({"tuning": tuned.card}), file=sys.stderr, flush=True)
        return rest, tuned.encoder

    return prepare


def _tuning_rows(table: TrainingTable) -> TuningRows:
    labels = table.targets()[:, table.num_tiers :]
    return TuningRows(requests=table.requests, labels=labels, weights=np.ones(labels.shape))


def time_predictions(router: ArtifactRouter, requests: Sequence[RouterRequest]) -> dict[str, float]:
    """Time predictions one by one: wall milliseconds, and words of the median prompt."""
    sample = requests[:_TIMED_PROMPTS]
    router.predict(sample[:20])
    seconds = []
    for request in sample:
        started = time.perf_counter()
        router.predict([request])
        seconds.append(time.perf_counter() - started)
    words = [len(request.text.split()) for request in sample]
    return {
        "p50_ms": float(np.median(seconds)) * 1e3,
        "p99_ms": float(np.quantile(seconds, 0.99)) * 1e3,
        "median_words": float(np.median(words)),
    }


def run(data: Path, benchmarks: Sequence[str], prepare: Prepare, *, seed: int, options: FitOptions) -> dict[str, Any]:
    """Run the whole bench; one object for JSON."""

    def fit(part: TrainingTable) -> ArtifactRouter:
        kept, embedder = prepare(part)
        fitted = fit_router(kept, seed=seed, options=options, embedder=embedder)
        return ArtifactRouter(fitted.artifact, embedder=embedder)

    results: dict[str, Any] = {}
    for benchmark in benchmarks:
        table = read_graded(data, MODELS, [benchmark])
        found, router = ask_across_folds(table.training_table(), table.folds, fit)
        report = report_pair(table, found, seed=seed)
        results[benchmark] = {**report, "predict": time_predictions(router, table.requests)}
    card = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine(), "seed": seed}
    return {"bench": "classifier", "card": card, "results": without_nan(results)}


def _print_table(results: Mapping[str, Any]) -> None:
    for benchmark, found in results.items():
        print(f"\n{benchmark}: {found['num_prompts']} prompts")
        print(f"  {'':14} {'APGR':>6} {'CPT50':>6} {'CPT80':>6} {'c95':>6}")
        for name, row in found["rankings"].items():
            shares = " ".join(f"{row[key]:6.0%}" for key in ("cpt50", "cpt80", "strong_share_95"))
            print(f"  {name:14} {row['apgr']:6.3f} {shares}")
        low, high = found["rankings"]["router"]["apgr_interval"]
        p50_ms, p99_ms, median_words = (found["predict"][name] for name in ("p50_ms", "p99_ms", "median_words"))
        print(f"  the router's APGR lies in [{low:.3f}, {high:.3f}] with 95 % confidence")
        print(f"  one prediction {p50_ms:.2f} ms (p99 {p99_ms:.2f}) at {median_words:.0f} words")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m classifier.bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with prompts.parquet and scores.parquet")
    parser.add_argument("--benchmark", choices=BENCHMARKS, action="append", help="one of them; by default all")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--embedding", help="a sentence-transformers model (id or folder) as further features")
    source.add_argument("--fine-tune", metavar="MODEL", help="the same, fine-tuned on half of the rows")
    source.add_argument("--as-split", action="store_true", help="no model, and only the rows that one would leave")
    parser.add_argument("--steps", type=int, default=1000, help="of fine-tuning, at most")
    parser.add_argument("--device", default="cpu", help="where it is fine-tuned")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    given = parser.parse_args(arguments)
    if given.fine_tune or given.as_split:
        tuning = TuningOptions(float("inf"), given.steps, device=given.device)
        prepare = fine_tuned(given.fine_tune, tuning, given.seed)
    else:
        prepare = as_given(SentenceTransformerEmbedder(given.embedding) if given.embedding else None)
    options = FitOptions(linear_c=(1.0,))
    found = run(given.data, given.benchmark or BENCHMARKS, prepare, seed=given.seed, options=options)
    found["embedding"] = given.embedding or given.fine_tune or "none"
    found["fine_tuned"] = bool(given.fine_tune)
    if not given.json:
        _print_table(found["results"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
