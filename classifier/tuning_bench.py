"""Measures what a fine-tuned encoder costs: a step of its fit, its place in a router, its time on the CPU.

``python -m classifier.tuning_bench [--encoder FOLDER] [--device cuda] [--threads N] [--json]``. Without a folder the
encoder is drawn at random in the shape of MiniLM-L6 (6 layers of 384, 30,522 word pieces): what is timed does not hang
on the weights. Prompts are of one length each, in tokens.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from classifier.encoder_tuner import TuningOptions, TuningResult, TuningRows, tune_encoder
from classifier.tuned_encoder import SETUP, WEIGHTS, TunedEncoder
from classifier.types import RouterRequest

LENGTHS = (16, 64, 256)
_STEPS, _ESTIMATES = 6, 60
_VOCABULARY = 30_522


def draw_encoder(folder: Path) -> Path:
    """Draw a model of MiniLM-L6's shape whose words are ``w0``, ``w1`` and so on; gives its folder."""
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel, BertTokenizer

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary += [f"w{number}" for number in range(_VOCABULARY - len(vocabulary))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    shape = BertConfig(
        vocab_size=_VOCABULARY, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    BertModel(shape).save_pretrained(folder)
    path = folder / "model"
    SentenceTransformer(str(folder), device="cpu").save(str(path))
    return path


def prompts(count: int, num_tokens: int, rng: np.random.Generator) -> list[RouterRequest]:
    """Draw random words, as many as make a text of so many tokens with the two that BERT adds."""
    drawn = rng.integers(0, 20_000, (count, num_tokens - 2))
    return [RouterRequest((("user", " ".join(f"w{number}" for number in row)),)) for row in drawn]


def time_steps(path: Path, num_tokens: int, device: str) -> tuple[TuningResult, float]:
    """Return an encoder after a few steps, and the median seconds of one: CPU time, on a device by the clock."""
    rng = np.random.default_rng(0)
    options = TuningOptions(max_seconds=600, max_steps=_STEPS, device=device)
    fit, newer = (
        TuningRows(
            requests=tuple(prompts(count, num_tokens, rng)),
            labels=rng.random((count, 3)),
            weights=np.ones((count, 3)),
        )
        for count in (_STEPS * options.batch_size, options.batch_size)
    )
    ends: list[float] = []
    now = time.process_time if device == "cpu" else time.perf_counter
    tuned = tune_encoder(str(path), fit, newer, options, seed=0, progress=lambda done: ends.append(now()))
    return tuned, float(np.median(np.diff(ends)))


def time_estimates(encoder: TunedEncoder, num_tokens: int) -> dict[str, float]:
    """Time one prompt's log-odds alone: by the clock, and in CPU time, which others do not lengthen."""
    asked = prompts(_ESTIMATES, num_tokens, np.random.default_rng(1))
    encoder.embed(asked[:5])
    wall, cpu = [], []
    for request in asked:
        started = time.perf_counter(), time.process_time()
        encoder.embed([request])
        wall.append(time.perf_counter() - started[0])
        cpu.append(time.process_time() - started[1])
    quantiles = {"p50_ms": (wall, 0.5), "p99_ms": (wall, 0.99), "cpu_ms": (cpu, 0.5)}
    return {name: round(float(np.quantile(seconds, q)) * 1e3, 2) for name, (seconds, q) in quantiles.items()}


def run(encoder: Path | None, device: str) -> dict[str, Any]:
    """Run the whole bench; one object for JSON."""
    with tempfile.TemporaryDirectory(prefix="suffice-bench-") as folder:
        path = encoder or draw_encoder(Path(folder))
        found = {length: time_steps(path, length, device) for length in LENGTHS}
    tuned = found[LENGTHS[0]][0]
    started_s = time.perf_counter()
    loaded = TunedEncoder(tuned.encoder.arrays, tuned.encoder.model)
    load_s = time.perf_counter() - started_s
    card = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": device if device == "cpu" else torch.cuda.get_device_name(device),
    }
    return {
        "bench": "tuning",
        "card": card,
        "encoder": str(encoder or "random, MiniLM-L6's shape"),
        "num_parameters": tuned.card["num_parameters"],
        "artifact_mb": round(sum(loaded.arrays[name].nbytes for name in (WEIGHTS, SETUP)) / 1e6, 1),
        "load_s": round(load_s, 2),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "step_s": {str(length): round(step_s, 4) for length, (_, step_s) in found.items()},
        "estimate": {str(length): time_estimates(loaded, length) for length in LENGTHS},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m classifier.tuning_bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--encoder", type=Path, help="a sentence-transformers folder; by default drawn at random")
    parser.add_argument("--device", default="cpu", help="where it is fine-tuned; estimates are timed on the CPU")
    parser.add_argument("--threads", type=int, help="of torch on the CPU")
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    given = parser.parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    found = run(given.encoder, given.device)
    if not given.json:
        size, load_s = found["artifact_mb"], found["load_s"]
        print(f"{found['num_parameters'] / 1e6:.1f} million parameters, {size} MB in a router, {load_s} s to load")
        print(f"peak memory of this process {found['peak_rss_mb']} MB")
        for length in map(str, LENGTHS):
            one = found["estimate"][length]
            times = f"estimate {one['p50_ms']:.1f} ms (p99 {one['p99_ms']:.1f}, processor {one['cpu_ms']:.1f})"
            print(f"  {length:>4} tokens: step {found['step_s'][length]:.3f} s, {times}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
