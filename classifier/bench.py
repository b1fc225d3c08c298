"""How well routing by estimated benefit works on public outcomes of real models, and what a prediction costs.

``python -m classifier.bench --data DIR [--embedding MODEL | --fine-tune MODEL] [--json]`` reads ``prompts.parquet`` and
``pairs.parquet`` (see docs/router.md for their columns) and prints, per benchmark: APGR with its interval, CPT50, CPT80
and the share of strong calls that holds 95 % of the strong model's quality, for router, prompt length, chance and an
oracle. The folds are the data's own, whole groups of near-duplicate prompts apart. Needs pyarrow.

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
from classifier.evaluation import Judged, evaluate
from classifier.options import FitOptions
from classifier.router import ArtifactRouter
from classifier.rows import Floats
from classifier.table import TrainingTable
from classifier.training import Fitted, fit_router, group_folds
from classifier.tuning import TuningOptions, TuningRows, tune_encoder
from classifier.types import RouterRequest

BENCHMARKS = ("routellm_mmlu", "routellm_gsm8k")
_TIMED_PROMPTS = 500
# Of rows outside a fold, twentieths: to fine-tune on, and to stop by.
_PARTS, _FIT_PARTS, _NEWER_PARTS = 20, 10, 3


def read_pairs(data: Path, benchmark: str) -> tuple[TrainingTable, np.ndarray]:
    """Weak and strong scores of one benchmark as a two-tier table, and the data's fold numbers."""
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]

    prompts = {row["prompt_id"]: row for row in parquet.read_table(data / "prompts.parquet").to_pylist()}
    pairs = [row for row in parquet.read_table(data / "pairs.parquet").to_pylist() if row["benchmark"] == benchmark]
    known = [prompts[row["prompt_id"]] for row in pairs]
    scores = np.array([[row["weak_score"], row["strong_score"]] for row in pairs], dtype=np.float64)
    groups = np.unique([row["group_id"] for row in known], return_inverse=True)[1].astype(np.int64)
    requests = [RouterRequest(turns=(("user", row["prompt"]),)) for row in known]
    table = TrainingTable.build(requests, scores, groups=groups, window=f"{benchmark}, {len(pairs)} prompts")
    return table, np.array([row["fold"] for row in known], dtype=np.int64)


Prepare = Callable[[TrainingTable], tuple[TrainingTable, Embedder | None]]
"""Given the rows outside a fold: those to fit a router on, and what else it reads."""


def as_given(embedder: Embedder | None) -> Prepare:
    """All the rows."""
    return lambda part: (part, embedder)


def fine_tuned(model: str | None, options: TuningOptions, seed: int) -> Prepare:
    """What half of the rows make of a model, and the rows it has not seen; no model gives these rows alone."""

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


def out_of_fold(
    table: TrainingTable, folds: np.ndarray, options: FitOptions, prepare: Prepare, seed: int
) -> tuple[Floats, Floats, Fitted, Embedder | None]:
    """P(right) and P(as good) of each fold by a whole router fitted on the others, exactly as it would be served."""
    right, good = np.empty(table.scores.shape), np.empty(table.scores.shape)
    for fold in np.unique(folds):
        inside, outside = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        part, embedder = prepare(table.take(inside))
        fitted = fit_router(part, seed=seed, options=options, embedder=embedder)
        router = ArtifactRouter(fitted.artifact, embedder=embedder)
        found = router.predict([table.requests[i] for i in outside])
        right[outside] = [[tier.p_right for tier in each.tiers] for each in found]
        good[outside] = [[tier.p_as_good for tier in each.tiers] for each in found]
    return right, good, fitted, embedder


def time_predictions(router: ArtifactRouter, requests: Sequence[RouterRequest]) -> dict[str, float]:
    """Wall milliseconds of one prediction alone, and words of the median prompt."""
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
    """The whole bench as one JSON-able object."""
    results: dict[str, Any] = {}
    for benchmark in benchmarks:
        table, folds = read_pairs(data, benchmark)
        right, good, fitted, embedder = out_of_fold(table, folds, options, prepare, seed)
        lengths = np.array([len(request.text) for request in table.requests], dtype=np.float64)
        costs = np.array([0.0, 1.0])
        judged = Judged(
            p_right=right,
            p_as_good=good,
            scores=table.scores,
            costs=costs,
            lengths=lengths,
            groups=table.groups,
            folds=folds,
        )
        found = evaluate(judged, seed=seed)
        router = ArtifactRouter(fitted.artifact, embedder=embedder)
        results[benchmark] = {**found, "predict": time_predictions(router, table.requests)}
    card = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine(), "seed": seed}
    return {"bench": "classifier", "card": card, "results": results}


def _print_table(results: Mapping[str, Any]) -> None:
    for benchmark, found in results.items():
        print(f"\n{benchmark}: {found['num_rows']} prompts")
        print(f"  {'':14} {'APGR':>6} {'95 % interval':>16} {'CPT50':>6} {'CPT80':>6} {'c95':>6}")
        print(f"  {'random':14} {0.5:6.3f}")
        for name in ("length", "length_fitted", "router", "oracle"):
            row = found["pair"][name]
            apgr = row["apgr"]
            interval = f"[{apgr['low']:.3f}, {apgr['high']:.3f}]"
            print(
                f"  {name:14} {apgr['value']:6.3f} {interval:>16} {row['cpt50']:6.0%} {row['cpt80']:6.0%} "
                f"{row['strong_share_95']:6.0%}"
            )
        timing = found["predict"]
        p50_ms, p99_ms, median_words = (timing[name] for name in ("p50_ms", "p99_ms", "median_words"))
        print(f"  one prediction {p50_ms:.2f} ms (p99 {p99_ms:.2f}) at {median_words:.0f} words")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m classifier.bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with prompts.parquet and pairs.parquet")
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
