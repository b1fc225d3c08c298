"""Runs ``python -m engine.bench.grammars``: structured output, as ``engine.grammar`` compiles it and engines draw it.

``--schemas FILE`` reads a Parquet table of JSON Schemas with valid and invalid instances (columns ``id``, ``schema``,
``tests``: a JSON list of ``instance`` and ``valid``) and counts how many schemas are right: compiled, every valid
instance accepted to its end, no invalid one. It times compiling with the first mask, and every mask along the valid
instances. The other part serves 32 requests at once with a schema each and without any, in turns, and compares the
seconds a step takes: on a CPU a built-in model, on a GPU random weights of ``--shapes``. Answers have one length, so
that both passes are of as many steps.

The tokenizer of random weights is trained on the Python library's own sources: 128,256 tokens need no download.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine.bench.machine_card import machine_card
from engine.bench.measured_engines import EndingCounter
from engine.bench.shapes import SHAPES
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import GrammarError, UnsupportedGrammar
from engine.grammar import GrammarCompiler, GrammarSpec
from engine.grammar_cursor import GrammarCursor
from engine.load.model import dummy_model, load_model
from engine.models.decoder import DecoderModel
from engine.request import Constraint, Event, Request, RequestEnding, SamplingParams
from engine.tokenizer import Tokenizer

BUILTIN = Path(__file__).parents[2] / "backends" / "builtin" / "models"
_SOURCE_BYTES = 12 << 20
_MOST_TOKENS = 1_500  # of an instance
_EOS = "<|end|>"
# Never complete before the answer's length, and rich in parts: strings, numbers, choices and nesting.
_SCHEMA = {
    "type": "array",
    "minItems": 1_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["invoice", "order", "return"]},
            "amount": {"type": "number"},
            "lines": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 9},
            "paid": {"type": "boolean"},
        },
        "required": ["name", "kind", "amount", "lines", "paid"],
        "additionalProperties": False,
    },
}


def main(argv: list[str] | None = None) -> None:
    args = _arguments(argv)
    torch.set_num_threads(1)
    card = machine_card() | {"seed": args.seed, "repeats": args.repeats}
    print(json.dumps(card), flush=True)
    report: dict[str, Any] = {"bench": "engine-grammars", "card": card}
    if args.schemas is not None:
        report["schemas"] = measure_schemas(args.schemas, trained_tokenizer(args.vocab_size))
        print(json.dumps(report["schemas"]), flush=True)
    if args.requests:
        report["steps"] = [measure_steps(name, *_load(name, args), args) for name in args.shapes]
    line = json.dumps(report)
    if args.out:
        args.out.write_text(line + "\n")
    print(line)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine.bench.grammars", description=__doc__.splitlines()[0])
    parser.add_argument("--schemas", type=Path, help="Parquet file of schemas with instances")
    parser.add_argument(
        "--vocab-size", type=int, default=128_256, help="of the tokenizer that schemas are measured with"
    )
    parser.add_argument("--requests", type=int, default=32, help="at once; 0 leaves the engine out")
    parser.add_argument("--tokens", type=int, default=192, help="of each answer")
    parser.add_argument("--repeats", type=int, default=5, help="passes of each kind, in turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", help="of random weights, or a built-in tier; by device if not given")
    parser.add_argument("--out", type=Path, help="also write the JSON line here")
    args = parser.parse_args(argv)
    args.shapes = args.shapes or (["tier3"] if args.device == "cpu" else ["3b-int4", "8b-int4"])
    return args


# Schemas


def measure_schemas(path: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Compile every schema and follow its instances."""
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    rows = pq.read_table(path, columns=["id", "schema", "tests"]).to_pylist()
    compile_s: list[float] = []
    mask_s: list[tuple[float, float]] = []  # by the clock, and of this thread's processor time
    refused: dict[str, int] = {}
    num_right = num_refused_valid = num_accepted_invalid = num_tests = num_left_out = 0
    for row in rows:
        began_s = time.perf_counter()
        try:
            grammar = compiler.compile(GrammarSpec("json_schema", row["schema"]))
        except GrammarError as error:
            name = error.keyword.split(":")[0] if isinstance(error, UnsupportedGrammar) else type(error).__name__
            refused[name] = refused.get(name, 0) + 1
            continue
        compile_s.append(time.perf_counter() - began_s)
        is_right = True
        for test in json.loads(row["tests"]):
            text = json.dumps(test["instance"], ensure_ascii=False)
            ids = tokenizer.encode_plain(text)
            if len(ids) > _MOST_TOKENS:
                num_left_out += 1
                continue
            num_tests += 1
            is_accepted = accepts(GrammarCursor(Constraint(grammar)), ids, mask_s if test["valid"] else None)
            num_refused_valid += test["valid"] and not is_accepted
            num_accepted_invalid += is_accepted and not test["valid"]
            is_right &= is_accepted == test["valid"]
        num_right += is_right
    return {
        "schemas": len(rows),
        "vocab_size": tokenizer.vocab_size,
        "compiled_share": round(len(compile_s) / len(rows), 4),
        "right_share": round(num_right / len(rows), 4),
        "tests": num_tests,
        "tests_left_out": num_left_out,
        "valid_refused": num_refused_valid,
        "invalid_accepted": num_accepted_invalid,
        "compile_and_first_mask_ms": _percentiles(compile_s, 1e3),
        "masks": len(mask_s),
        "mask_us": _percentiles([each[0] for each in mask_s], 1e6),
        "mask_cpu_us": _percentiles([each[1] for each in mask_s], 1e6),
        "refused": dict(sorted(refused.items(), key=lambda each: -each[1])),
    }


def accepts(cursor: GrammarCursor, token_ids: Sequence[int], mask_s: list[tuple[float, float]] | None = None) -> bool:
    """Tell whether a text is whole by a grammar, taking it token by token; times every mask where a list is given."""
    masks = np.zeros((1, cursor.num_words), dtype=np.int32)
    for place, token_id in enumerate(token_ids):
        if mask_s is not None:
            began_s, began_cpu_s = time.perf_counter(), time.thread_time()
            cursor.fill(masks)
            mask_s.append((time.perf_counter() - began_s, time.thread_time() - began_cpu_s))
        if not cursor.num_allowed([token_id]):
            return False
        if cursor.push(token_id):
            return place == len(token_ids) - 1
    return cursor.is_whole


def trained_tokenizer(vocab_size: int) -> Tokenizer:
    """Train byte-level BPE on the Python library's sources; what they do not yield is filled with words of numbers."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator(_sources(_SOURCE_BYTES), trainer)
    raw.add_special_tokens([_EOS])
    missing = vocab_size - raw.get_vocab_size(with_added_tokens=True)
    with tempfile.TemporaryDirectory() as folder:
        document = json.loads(raw.to_str())
        taken = len(document["model"]["vocab"])
        document["added_tokens"][0]["id"] = vocab_size - 1
        document["model"]["vocab"] |= {f"Ġw{number}x": taken + number for number in range(missing)}
        document["model"]["vocab"][_EOS] = vocab_size - 1
        (Path(folder) / "tokenizer.json").write_text(json.dumps(document))
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"eos_token": _EOS}))
        return Tokenizer(folder)


def _sources(num_bytes: int) -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        num_bytes -= len(text)
        yield text
        if num_bytes < 0:
            return


# Steps


def _load(name: str, args: argparse.Namespace) -> tuple[DecoderModel, Tokenizer]:
    if name in SHAPES:
        config = SHAPES[name]
        return dummy_model(config, device=args.device), trained_tokenizer(config.vocab_size)
    return load_model(BUILTIN / name, device=args.device), Tokenizer(BUILTIN / name)


def measure_steps(name: str, model: DecoderModel, tokenizer: Tokenizer, args: argparse.Namespace) -> dict[str, Any]:
    """Compare the seconds of a token with schemas on all rows, on one row, and on none."""
    vocab_size, count = model.config.vocab_size, args.requests
    eos = tokenizer.eos_token_ids
    compiler = GrammarCompiler(tokenizer, vocab_size, eos)
    constraint = Constraint(compiler.compile(GrammarSpec("json_schema", json.dumps(_SCHEMA))))
    config = EngineConfig(
        block_size=16, num_blocks=count * (-(-(args.tokens + 32) // 16) + 1), max_num_seqs=count, max_batch_tokens=1024
    )
    kinds: dict[str, Callable[[int], Constraint | None]] = {
        "without": lambda row: None,
        "one": lambda row: constraint if row == 0 else None,
        "all": lambda row: constraint,
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    computed: dict[str, list[float]] = {kind: [] for kind in kinds}
    engine = Engine(model, config, eos_token_ids=eos, name=name)
    try:
        for turn in range(args.repeats + 2):  # the first two compile and capture
            for kind, constraint_of in kinds.items():
                took_s, compute_s = _serve(engine, [constraint_of(row) for row in range(count)], args, turn)
                if turn > 1:
                    seconds[kind].append(took_s / args.tokens)
                    computed[kind].append(compute_s / args.tokens)
    finally:
        engine.close()
    medians = {kind: statistics.median(each) for kind, each in seconds.items()}
    costs = {kind: statistics.median(each) for kind, each in computed.items()}
    row = {
        "model": name,
        "device": args.device,
        "requests": count,
        "tokens": args.tokens,
        "vocab_size": vocab_size,
        "step_ms": {kind: [round(1e3 * each, 4) for each in sorted(found)] for kind, found in seconds.items()},
        "ratio_one": round(medians["one"] / medians["without"], 4),
        "ratio_all": round(medians["all"] / medians["without"], 4),
        # What was billed: on a CPU the thread's own time, which others' work does not count in.
        "compute_ms": {kind: [round(1e3 * each, 4) for each in sorted(found)] for kind, found in computed.items()},
        "compute_ratio_one": round(costs["one"] / costs["without"], 4),
        "compute_ratio_all": round(costs["all"] / costs["without"], 4),
    }
    print(json.dumps(row), flush=True)
    return row


def _serve(
    engine: Engine, constraints: list[Constraint | None], args: argparse.Namespace, turn: int
) -> tuple[float, float]:
    """Serve a pass; its seconds by the clock, and those that were billed."""
    sink = _CostCounter(len(constraints))
    sampling = [
        SamplingParams(temperature=args.temperature, seed=args.seed + row, max_tokens=args.tokens, ignore_eos=True)
        for row in range(len(constraints))
    ]
    asked = [
        Request(f"r{row}", tuple(range(3, 11)), sampling[row], constraint=each, cache_salt=f"{turn} {row}")
        for row, each in enumerate(constraints)
    ]
    began_s = time.perf_counter()
    engine.submit_all([(request, sink) for request in asked])
    sink.wait()
    return time.perf_counter() - began_s, sink.compute_s


class _CostCounter(EndingCounter):
    """Adds up what the requests of a pass are billed."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.compute_s = 0.0

    def put(self, event: Event) -> None:
        if isinstance(event, RequestEnding):
            self.compute_s += event.compute_s
        super().put(event)


def _percentiles(values: list[float], scale: float) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    found = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(values)}
    return {name: round(scale * value, 3) for name, value in found.items()}


if __name__ == "__main__":
    main()
